"""Execute a Python file of the user's, a config file or one with a reward, and call the reward."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from data.files import find
from data.user_mistake import Mistake
from grpo.batch import Batch


def run_file(path: str | Path, what: str) -> dict[str, object]:
    """Execute a user's Python file, and return its names. If it fails, this raises a Mistake."""
    path = find(path)
    if path.suffix != ".py" or not path.is_file():
        raise Mistake(
            f"{what} {path} doesn't exist, or isn't a .py file; name another file, or write a"
            " setting as --key=value"
        )
    sys.path.append(str(path.parent))  # so that the user's file can import its neighbors
    try:
        return runpy.run_path(str(path), run_name=path.stem)
    except (Exception, SystemExit) as error:  # any error in that file is the user's mistake
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


def user_reward(name: str, function: Callable, completions: Tensor, batch: Batch) -> Tensor:
    """Call a user's function, which returns (B,G) or (B,G,T). If it fails, raise a Mistake."""
    try:
        values = function(completions.clone(), batch.map(torch.clone))  # it may write into them
        values = torch.as_tensor(values, dtype=torch.float32, device=completions.device).detach()
    except (Exception, SystemExit) as error:  # whatever the user's code may raise
        raise Mistake(f"reward {name} failed: {type(error).__name__}: {error}") from error
    B, G, T = completions.shape
    if values.shape not in ((B, G), (B, G, T)):
        raise Mistake(
            f"reward {name} returned the shape {tuple(values.shape)} for completions of the shape"
            f" (B, G, T) = {(B, G, T)}; return (B, G) = {(B, G)}, or (B, G, T)"
        )
    bad = int((~values.isfinite()).sum())
    if bad:
        raise Mistake(f"reward {name} returned {bad} numbers that are NaN or infinite")
    return values
