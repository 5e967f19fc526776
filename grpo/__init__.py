"""Imported before everything else: Ctrl-C while the rest is imported is one line, no traceback.

In the commands of this repository, that is; a program that imports `grpo` keeps its own ways.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def tell(kind, error, trace):
    """What becomes of an exception that nothing has caught."""
    if kind is KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


program = sys.argv[0]  # "-m" while python -m imports the packages above its module
if program == "-m" or REPOSITORY in Path(program).resolve().parents:
    sys.excepthook = tell
