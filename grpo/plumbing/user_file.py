"""Execute a Python file of the user's: a config file, or one with a reward."""

import runpy
import sys
from pathlib import Path

from data.user_mistake import Mistake, refuse


def run_file(path, what):
    """Execute a user's Python file: -> {name: value}. If it fails, this raises a Mistake."""
    refuse(
        not Path(path).is_file(),
        f"{what} {path} does not exist; name another file, or write a setting as --key=value",
    )
    sys.path.append(str(Path(path).parent))  # so that the user's file can import files beside it
    try:
        return runpy.run_path(path)
    except (Exception, SystemExit) as error:  # any error in that file is the user's mistake
        name = type(error).__name__
        raise Mistake(f"{what} {path} does not run ({name}: {error}); fix it") from error


def load_function(path, name):
    """Load a user's own function. Raises a Mistake if the file fails or has no such function."""
    function = run_file(path, "reward file").get(name)
    refuse(
        not callable(function),
        f"reward file {path} has no function {name}; write"
        f" def {name}(completions, masked, mask, decode) there",
    )
    return function
