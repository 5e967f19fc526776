"""Read a command line into the settings of a dataclass, and execute a user's Python files.

    config/latent.py --group_size=8 --compile        # left to right, the last one wins

A config file is Python, and we execute it. What it assigns has to be a setting, unless the name
begins with _. Every program of the project reads its flags here.
"""

import contextlib
import difflib
import inspect
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from dataclasses import Field, field, fields
from pathlib import Path
from typing import get_args

from data.user_mistake import Mistake

LARGEST = 2**31 - 1
TINY = 1e-9  # stands for "more than 0", and 1 - TINY for "less than 1"


def within(default: float, least: float, largest: float = LARGEST) -> Field:
    """Declare a number that's at least `least`. Without this, a whole number is 1 or more, and any
    other number 0 or more."""
    return field(default=default, metadata={"range": (least, largest)})


def read_setting(known: dict[str, Field], name: str, value: object, source: str = "") -> object:
    """Convert a value to the type of its setting, which is one of those that are `known`.

    Raises a Mistake that begins with its `source`, for example the name of a config file.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean --{near[0]}?" if near else "--help lists them all"
        raise Mistake(f"{source}there is no setting {name}; {hint}")
    kind, text = known[name].type, str(value)
    if kind is str and isinstance(value, str):
        return os.path.expanduser(text)  # no shell expands the ~ of --out_dir=~/runs
    if kind in (int, float):
        low, high = known[name].metadata.get("range", (int(kind is int), LARGEST))
        with contextlib.suppress(ValueError):
            if low <= kind(text) <= high:  # as a text, so that 1.5 is no whole number
                return kind(text)
        allowed = f"{'a whole number' if kind is int else 'a number'} from {low} to {high}"
    else:
        choices = ("true", "false") if kind is bool else get_args(kind)
        if text.lower() in choices:
            return text.lower() == "true" if kind is bool else text.lower()
        allowed = " or ".join(choices) or "a text"
    raise Mistake(f"{source}{name}: {value!r} is not {allowed}")


def read_arguments(
    settings: type, arguments: Sequence[str], usage: str = ""
) -> tuple[dict[str, object], list[str]]:
    """Read a command line: -> {setting: value}, as flags and config files say, and other words.

    With -h or --help this prints the usage and the source of `settings`, a dataclass, and ends the
    program.
    """
    known = {setting.name: setting for setting in fields(settings)}
    if {"-h", "--help"} & {*arguments}:
        print(usage, inspect.getsource(settings), sep="\n\n")
        for name, setting in known.items():
            if get_args(setting.type):
                print(f"{name}: {', '.join(get_args(setting.type))}")
        sys.exit()
    values, words = {}, []
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, text = argument.removeprefix("--").partition("=")
            if not equals and name in known and known[name].type is not bool:
                raise Mistake(f"--{name} has no value; write --{name}=VALUE")
            values[name] = read_setting(known, name, text if equals else "true")
        elif argument.endswith(".py"):
            for name, value in run_file(argument).items():
                helper = name.startswith("_") or callable(value) or inspect.ismodule(value)
                if name in known or not helper:
                    values[name] = read_setting(known, name, value, f"{argument}: ")
        else:
            words.append(argument)
    return values, words


def read_flags(settings: type, arguments: Sequence[str], usage: str = "") -> dict[str, object]:
    """Read a command line that has only config files and flags: -> {setting: value}."""
    values, words = read_arguments(settings, arguments, usage)
    if words:
        raise Mistake(f"{words[0]!r} is neither a config file (a .py) nor a flag (--key=value)")
    return values


def run_file(path: str | Path) -> dict[str, object]:
    """Execute a user's Python file, and return its names. If it fails, this raises a Mistake."""
    path = Path(path).resolve()
    sys.path.append(str(path.parent))  # so that the user's file can import its neighbors
    try:
        return runpy.run_path(str(path))
    except OSError:  # it names the file that's missing
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        line = f", line {lines[-1]}" if lines else ""
        raise Mistake(f"{path}{line}: {type(error).__name__}: {error}") from error
