"""A user's mistake ends a program with one line on stderr and exit code 2."""

import contextlib
import os
import signal
import sys
import traceback


class Mistake(Exception):
    """One line for the user: what's wrong, what's allowed, how to fix it.

    Only a Mistake gets printed as one line. Every other error keeps its traceback, because whoever
    changes the code needs it.
    """


@contextlib.contextmanager
def exit_on_mistake(program: str):
    """Turn a user's mistake into one line on stderr and exit code 2.

    If the mistake is an error in the user's own file, its traceback comes before that line.
    """
    try:
        yield
        print(end="", flush=True)
    except BrokenPipeError:  # nobody reads on, as after `| head -1`
        os._exit(0)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if not error.filename:
            raise
        line = f"{program}: {error.filename} cannot be used ({error.strerror}); name another path"
        print(f"{line}, or change its permissions", file=sys.stderr)
        sys.exit(2)
    except Mistake as error:
        if error.__cause__:
            traceback.print_exception(error.__cause__)
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)
