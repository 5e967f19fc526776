"""Imported before everything else: Ctrl-C while the rest is imported is one line, no traceback."""

import sys


def tell(kind, error, trace):
    """What becomes of an exception that nothing has caught."""
    if kind is KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = tell
