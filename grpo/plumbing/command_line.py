"""Read a command's config files and flags, and report a user's mistake in one line.

    python train_grpo.py config/latent.py --group_size=8         # left to right, the last one wins

A config file is Python, and we execute it. Every name that it assigns has to be a setting, unless
the name begins with _. The settings of a run are listed in the dataclass `Config`. The settings of
`model/pretrain.py` are listed in its dataclass `Settings`.
"""

import argparse
import contextlib
import difflib
import inspect
import io
import os
import re
import runpy
import signal
import sys
import traceback
from typing import get_args

from data.user_mistake import Mistake, refuse
from grpo.plumbing.checkpoint import ROOT, find

LARGEST = 2**31 - 1
# A setting that must be above 0 is at least TINY. One that must be below 1 is at most 1 - TINY.
TINY = 1e-9

# The least and the largest value of a setting. If a setting is not listed here, its least value is
# 1 for a whole number, and 0 for any other number.
RANGES = {
    "group_size": (2, LARGEST),
    "block_size": (5, LARGEST),  # the evaluation's 5-gram model needs 5 characters
    "temperature": (1e-3, 100),
    "repetition_penalty": (1, 100),
    "n_embd": (32, LARGEST),
}
for name in "top_k minibatch_size warmup_iters lr_decay_iters seed".split():
    RANGES[name] = (0, LARGEST)
for name in "generator_steps judge_steps judge_layers".split():  # settings of model/pretrain.py
    RANGES[name] = (0, LARGEST)
for name in "mask_ratio min_p xtc_probability clip_eps".split():
    RANGES[name] = (0, 1)
for name in "sapo_tau sapo_tau_negative".split():
    RANGES[name] = (1e-3, 100)
for name in "ema_alpha top_p xtc_threshold top_entropy_quantile".split():
    RANGES[name] = (TINY, 1)
for name in "beta1 beta2".split():
    RANGES[name] = (0, 1 - TINY)


def convert(settings, name, value, source):
    """Convert the text of a flag, or a value from a config file, to the type of its setting.

    `settings` is the dataclass that lists all settings. If there is no setting `name`, or if it
    does not take this value, this raises a Mistake that names `source`.
    """
    kinds = settings.__annotations__  # {name: type}
    fix = "--help lists the settings; in a config file, begin a name of your own with _"
    for near in difflib.get_close_matches(name, kinds, n=1):
        fix = f"did you mean {near!r}?"
    refuse(name not in kinds, f"{source}: there is no setting {name!r}; {fix}")
    kind = kinds[name]
    choices = get_args(kind)  # the values of a Literal, or ()
    low, high = RANGES.get(name, (int(kind is int), LARGEST))
    text = str(value)
    with contextlib.suppress(ValueError):  # for text that is not a number
        if kind is str and isinstance(value, str):
            return os.path.expanduser(value)  # the shell does not expand the ~ in --out_dir=~/runs
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if text.lower() in choices:  # lower, because a file may say compile = True
            return text.lower()
        if kind in (int, float) and low <= kind(text) <= high:
            return kind(text)
    plain = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    takes = " or ".join(choices) or plain[kind]
    if kind in (int, float):
        takes += f" from {low} to {high}"
    raise Mistake(f"{source}: {name}={value!r:.200} is not allowed; {name} takes {takes}")


def run_file(path, what):
    """Execute a user's Python file: -> {name: value}. If it fails, this raises a Mistake."""
    found = find(path)
    refuse(
        not found.is_file(),
        f"{what} {path} does not exist; name another file, or write a setting as --key=value",
    )
    sys.path.append(str(found.parent))  # so that the user's file can import files beside it
    try:
        return runpy.run_path(found)
    except (Exception, SystemExit) as error:  # any error in that file is the user's mistake
        name = type(error).__name__
        raise Mistake(f"{what} {path} does not run ({name}: {error}); fix it") from error


def read_file(path):
    """Read the settings that a config file assigns: -> {name: value}."""
    values = run_file(path, "config file")
    settings = {name: value for name, value in values.items() if not name.startswith("_")}
    for name in values.get("__annotations__", {}):
        refuse(name not in values, f"config file {path}: {name} has no value; write {name} = VALUE")
    refuse(not settings, f"config file {path} sets nothing; write for example group_size = 8")
    return settings


def read_flag(settings, argument):
    """Read one flag, --key=value: -> {key: value}. For a bool, --key alone means --key=true."""
    name, equals, value = argument.removeprefix("--").partition("=")
    bare = not equals and name in settings.__annotations__
    if bare and settings.__annotations__[name] is bool:
        value = "true"
    else:
        refuse(bare, f"{argument} has no value; write it in one piece, {argument}=VALUE")
    return {name: value}


def read_arguments(settings, arguments, usage):
    """Read config files and flags, left to right: -> {name: value} of the settings that they set.

    `settings` is the dataclass that lists all settings. If -h or --help is among the arguments,
    this prints the dataclass with the values that the other arguments gave it, and ends the
    program.
    """
    wants_help = {"-h", "--help"} & {*arguments}
    given = {}
    for argument in arguments:
        if argument in ("-h", "--help"):
            continue
        flag = argument.startswith("-")
        assigned = read_flag(settings, argument) if flag else read_file(argument)
        for name, value in assigned.items():
            given[name] = convert(settings, name, value, argument)
    if wants_help:
        print(help_text(settings(**given), usage))
        sys.exit()
    return given


def help_text(config, usage):
    """Return `usage`, then the source code of config's class with config's values as defaults."""
    setting = r"(?m)^(    (\w+): .*? = ).+?(?=  #|$)"
    source = inspect.getsource(type(config))
    return f"{usage}\n\n" + re.sub(setting, lambda it: it[1] + repr(getattr(config, it[2])), source)


class Parser(argparse.ArgumentParser):
    """This is argparse, but it raises a Mistake for arguments that it cannot read."""

    def error(self, message):
        raise Mistake(f"{message}; --help lists the arguments")


def print_cause(error):
    """Print the traceback of an error in a user's own file, from that file's first frame on."""
    cause = error.__cause__
    if not cause:
        return
    frame = cause.__traceback__
    ours = (str(ROOT / "grpo"), "<frozen runpy>")
    while frame and frame.tb_frame.f_code.co_filename.startswith(ours):
        frame = frame.tb_next
    traceback.print_exception(cause.with_traceback(frame), chain=False)


@contextlib.contextmanager
def exit_on_mistake(program):
    """Turn a user's mistake into one line on stderr and exit code 2.

    If the mistake is an error in a file of the user's own, its traceback comes before that line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook's streams are of other types
            stream.reconfigure(errors="replace")  # the terminal may not be UTF-8
    try:
        yield
    except KeyboardInterrupt:  # Ctrl-C, wherever `Signals` does not handle it
        sys.exit(128 + signal.SIGINT)
    except Mistake as error:
        print_cause(error)
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)
