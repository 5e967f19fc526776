"""A user's mistake ends a program with one line on stderr and exit code 2."""


class Mistake(Exception):
    """Says in one line what is wrong, which values are allowed and how to fix it.

    Only a Mistake is printed as one line. Every other error keeps its traceback, because whoever
    changes the code needs it.
    """


def refuse(wrong, line):
    """Raise a Mistake with this line if `wrong` is true."""
    if wrong:
        raise Mistake(line)
