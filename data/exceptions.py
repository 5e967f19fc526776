"""A user's mistake: one line on stderr, exit code 2, nothing written."""


class Mistake(Exception):
    """Says in one line what is wrong, which values are allowed and how to fix it.

    Only this becomes one line. Every other error keeps its traceback, because whoever changes the
    code needs it.
    """


def refuse(wrong, line):
    """Raise a Mistake with this line if something is wrong."""
    if wrong:
        raise Mistake(line)
