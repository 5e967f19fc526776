"""Execute a Python file of the user's: a config file, or one with a reward."""

import runpy
import sys
import types

from data.files import find
from data.user_mistake import Mistake, refuse


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
