"""A user's mistake ends a program with one line on stderr and exit code 2."""

import sys
from collections.abc import Callable


class Mistake(Exception):
    """One line for the user: what's wrong, what's allowed, how to fix it.

    It gets printed as one line, and so does a path that can't be used. Every other error keeps its
    traceback, because whoever changes the code needs it.
    """


def run_program(main: Callable[[list[str]], object]) -> None:
    """Call main with the words of the command line. Print a user's mistake in one line."""
    try:
        main(sys.argv[1:])
        return
    except Mistake as error:
        line = str(error)
    except OSError as error:
        if not error.filename:
            raise
        line = f"{error.filename} can't be used ({error.strerror}); name another path"
    print(f"mistake: {line}", file=sys.stderr)
    sys.exit(2)
