"""A user's mistake ends a program with one line on stderr and exit code 2."""

import sys
from collections.abc import Callable


class Mistake(Exception):
    """One line for the user: what's wrong, what's allowed, how to fix it.

    It gets printed as one line, and so does a path that can't be used. Every other error keeps its
    traceback, because whoever changes the code needs it.
    """


def run_program(main: Callable[[list[str]], object], usage: str = "") -> None:
    """Call main with the words of the command line. Print a user's mistake in one line.

    --help prints `usage`. Without one, main reads it, and shows its settings.
    """
    words = sys.argv[1:]
    if usage and {"-h", "--help"} & {*words}:
        print(usage)
        return
    try:
        main(words)
        return
    except Mistake as error:
        line = str(error)
    except OSError as error:
        if not error.filename:
            raise
        line = f"{error.filename} can't be used ({error.strerror}); name another path"
    print(f"mistake: {line}", file=sys.stderr)
    sys.exit(2)
