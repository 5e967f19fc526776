"""Execute a Python file of the user's, a config file or one with a reward, and call the reward."""

import contextlib
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from data.files import shipped_path
from data.user_mistake import Mistake
from data.vocabulary import decode
from grpo.batch import Batch


def run_file(path: str | Path, what: str) -> dict[str, object]:
    """Execute a user's Python file, and return its names. If it fails, this raises a Mistake."""
    path = shipped_path(path)
    if path.suffix != ".py" or not path.is_file():
        raise Mistake(
            f"{what} {path} doesn't exist, or isn't a .py file; name another file, or write a"
            " setting as --key=value"
        )
    sys.path.append(str(path.resolve().parent))  # so that the user's file can import its neighbors
    name, file = path.stem, str(path.resolve())
    if getattr(sys.modules.get(name), "__file__", file) != file:
        name = f"{name} of the user"  # random.py must not replace Python's own
    module = sys.modules[name] = types.ModuleType(name)  # dataclasses and pickle look there
    module.__file__ = file
    content = path.read_bytes()
    try:
        with contained():
            exec(compile(content, path, "exec"), vars(module))
        return vars(module)
    except (Exception, SystemExit) as error:  # any error in that file is the user's mistake
        del sys.modules[name]
        name = type(error).__name__
        raise Mistake(f"{what} {path} does not run ({name}: {error}); fix it") from error


def load_function(path: str | Path, name: str) -> Callable:
    """Load a user's own function. Raises a Mistake if the file fails or has no such function."""
    function = run_file(path, "reward file").get(name)
    if not callable(function):
        raise Mistake(
            f"reward file {path} has no function {name}; write def {name}(completions, batch) there"
        )
    return function


@contextlib.contextmanager
def contained():
    """Undo what a user's code does to the whole process: its folder, and gradients that are off."""
    folder = os.getcwd()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        os.chdir(folder)


def call(name: str, function: Callable, completions: Tensor, batch: Batch) -> Tensor:
    """Call a user's function. Whatever it raises is a Mistake."""
    try:
        with contained():  # and it may write into what it gets
            values = function(completions.clone(), batch.map(torch.clone))
    except (Exception, SystemExit) as error:
        raise Mistake(f"reward {name} failed: {type(error).__name__}: {error}") from error
    try:
        return torch.as_tensor(values, dtype=torch.float32, device=completions.device).detach()
    except (TypeError, ValueError, RuntimeError):
        what = type(values).__name__
        raise Mistake(
            f"reward {name} returned a {what} that isn't an array of numbers; return (B,G)"
        ) from None


def user_reward(name: str, function: Callable, completions: Tensor, batch: Batch) -> Tensor:
    """Call a user's function, which returns (B,G). If it fails, raise a Mistake."""
    B, G, T = completions.shape
    values = call(name, function, completions, batch)
    if values.shape != (B, G):
        raise Mistake(
            f"reward {name} returned the shape {tuple(values.shape)} for completions of the shape"
            f" (B, G, T) = {(B, G, T)}; return (B, G) = {(B, G)}, a number for each completion"
        )
    bad = ~values.isfinite()  # (B,G)
    if bad.any():
        worst = decode(completions[bad])[0]
        raise Mistake(f"reward {name} returned NaN or infinity for the completion {worst!r}")
    return values
