"""Execute a Python file of the user's, a config file or one with a reward, and call the reward."""

import inspect
import runpy
import sys
import types

import torch

from data.files import find
from data.user_mistake import Mistake, refuse
from data.vocabulary import decode


def run_file(path, what):
    """Execute a user's Python file: -> {name: value}. If it fails, this raises a Mistake."""
    path = find(path)
    refuse(
        path.suffix != ".py" or not path.is_file(),
        f"{what} {path} does not exist, or is no .py file; name another file, or write a setting as"
        " --key=value",
    )
    sys.path.append(str(path.parent))  # so that the user's file can import files beside it
    try:
        return runpy.run_path(str(path), run_name=path.stem)
    except (Exception, SystemExit) as error:  # any error in that file is the user's mistake
        name = type(error).__name__
        raise Mistake(f"{what} {path} does not run ({name}: {error}); fix it") from error


def load_function(path, name):
    """Load a user's own function. Raises a Mistake if the file fails or has no such function.

    The file becomes a module, so that a pool of processes can find the function. It never replaces
    a module of another file.
    """
    names = run_file(path, "reward file")
    module = types.ModuleType(names["__name__"])
    vars(module).update(names)
    there = sys.modules.setdefault(module.__name__, module)
    if getattr(there, "__file__", None) == module.__file__:
        sys.modules[module.__name__] = module
    function = names.get(name)
    refuse(
        not callable(function),
        f"reward file {path} has no function {name}; write"
        f" def {name}(completions, masked, mask, decode) there",
    )
    return function


def own_reward(name, function, completions, batch):
    """Call a user's function: -> (B,G) or (B,G,T). If it fails, this raises a Mistake."""
    # The user's function gets copies, because it may write into them.
    own = [completions.clone(), batch.masked.clone(), batch.mask.clone(), decode]
    try:
        if "words" in inspect.signature(function).parameters:
            values = function(*own, words=batch.words.clone())
        else:
            values = function(*own)
        refuse(values is None, f"reward {name} returned None; end it with a return of its rewards")
        values = torch.as_tensor(values, dtype=torch.float32, device=completions.device).detach()
    except Mistake:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's code may raise
        raise Mistake(f"reward {name} failed: {type(error).__name__}: {error}") from error
    whole, each = completions.shape[:2], completions.shape
    refuse(
        values.shape not in (whole, each),
        f"reward {name} returned the shape {tuple(values.shape)}; it must be (B, G) ="
        f" {tuple(whole)} or (B, G, T) = {tuple(each)}",
    )
    bad = int((~values.isfinite()).sum())
    refuse(bad, f"reward {name} returned {bad} numbers that are NaN or infinite; give finite ones")
    return values
