"""How every command reads config files and --key=value flags, and reports a user's mistake.

    python train_grpo.py config/latent.py --group_size=8         # left to right, the last one wins

A config file is Python and is executed. Every name that it assigns is a setting, except names that
begin with _, which it may use for itself. A dataclass lists the settings there are: `Config` for a
run, and `Settings` for `model/pretrain.py`.
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

from data.exceptions import Mistake, refuse
from grpo.plumbing.checkpoint import ROOT, find

LARGEST = 2**31 - 1
TINY = 1e-9  # for what must be more than 0

# The least and the largest value of a setting. For a setting that is not listed, the least is 1 if
# it is a whole number, and otherwise 0.
RANGES = {
    "group_size": (2, LARGEST),
    "block_size": (5, LARGEST),  # the 5-gram model of the evaluation needs 5
    "temperature": (1e-3, 100),
    "repetition_penalty": (1, 100),
    "n_embd": (32, LARGEST),
}
for name in "top_k minibatch_size warmup_iters lr_decay_iters seed".split():
    RANGES[name] = (0, LARGEST)
for name in "generator_steps judge_steps judge_layers".split():  # of model/pretrain.py
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
    """Turn text from a flag, or a Python value from a file, into what a setting holds.

    `settings` is the dataclass. Raises a Mistake, which names `source`, for what the setting does
    not take.
    """
    kinds = settings.__annotations__  # {name: type}
    fix = "--help lists them; a config file's own names begin with _"
    for near in difflib.get_close_matches(name, kinds, n=1):
        fix = f"did you mean {near!r}?"
    refuse(name not in kinds, f"{source}: there is no setting {name!r}; {fix}")
    kind = kinds[name]
    choices = get_args(kind)  # of a Literal
    low, high = RANGES.get(name, (int(kind is int), LARGEST))
    text = str(value)
    with contextlib.suppress(ValueError):  # of text that is no number
        if kind is str and isinstance(value, str):
            return os.path.expanduser(value)  # no shell expands the ~ of --out_dir=~/runs
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if text.lower() in choices:  # compile = True in a file
            return text.lower()
        if kind in (int, float) and low <= kind(text) <= high:
            return kind(text)
    takes = " or ".join(choices) or kind.__name__
    if kind in (int, float):
        takes += f" from {low} to {high}"
    raise Mistake(f"{source}: {name}={value!r:.200} is not allowed; {name} takes {takes}")


def run_file(path, what):
    """Execute a user's Python file: -> {name: value}. If it fails, this raises a Mistake."""
    found = find(path)
    refuse(
        not found.is_file(),
        f"{what} {path} does not exist; name a file, and write a setting as --key=value",
    )
    sys.path.append(str(found.parent))  # it may import what lies beside it
    try:
        return runpy.run_path(found)
    except (Exception, SystemExit) as error:  # whatever it raises is the user's mistake
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
    """Read one --key=value: -> {name: value}. A bare --key turns a setting of true or false on."""
    name, equals, value = argument.removeprefix("--").partition("=")
    bare = not equals and name in settings.__annotations__
    if bare and settings.__annotations__[name] is bool:
        value = "true"
    else:
        refuse(bare, f"{argument} has no value; write it in one piece, {argument}=VALUE")
    return {name: value}


def read_arguments(settings, arguments, usage):
    """Apply config files and flags, left to right: -> {name: value} of what they set.

    `settings` is the dataclass. -h or --help prints it, with the values in force, and ends.
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
    """Show the class as it stands in its file, with the values in force."""
    setting = r"(?m)^(    (\w+): .*? = ).+?(?=  #|$)"
    source = inspect.getsource(type(config))
    return f"{usage}\n\n" + re.sub(setting, lambda it: it[1] + repr(getattr(config, it[2])), source)


class Parser(argparse.ArgumentParser):
    """This is argparse, but it raises a Mistake for arguments that it cannot read."""

    def error(self, message):
        raise Mistake(f"{message}; --help lists what there is")


def print_cause(error):
    """Show what a user's own file raised, without the frames that led into it."""
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

    An error in the user's own file shows its traceback before that.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook has put others there
            stream.reconfigure(errors="replace")  # the terminal may not be UTF-8
    try:
        yield
    except KeyboardInterrupt:  # while a program starts
        sys.exit(128 + signal.SIGINT)
    except Mistake as error:
        print_cause(error)
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)
