"""What ends a run before its last step, with one line on stderr and an exit code that is not 0.

A signal, a figure that is not finite, a reward that fails, a full disk: the last checkpoint stays.
"""

import contextlib
import math
import signal
import sys
from pathlib import Path

import torch

from grpo.plumbing.checkpoint import LATEST
from grpo.plumbing.distributed import agree, is_first, world

# The first of these metrics that is not finite tells what went wrong: each is made from those
# before it.
SUSPECTS = {
    "entropy": "the generator's logits",
    "mean_kl": "the reference's logits",
    "mean_reward": "the rewards",
    "loss": "the loss",
    "grad_norm": "the gradient",
}


class Stopped(Exception):
    """The run ends here: (message, exit code)."""


class RewardFailed(ValueError):
    """A reward function raised, or returned what is no reward."""


class Signals:
    """SIGINT and SIGTERM ask the run to stop after the step that it is in.

    A second one ends it at once, but under torchrun, which passes on what all were sent anyway.
    """

    def __enter__(self):
        self.received = 0
        self.before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self.receive)
        return self

    def receive(self, number, _):
        self.received = number
        if world()[0] == 1:
            for each in self.before:
                signal.signal(each, signal.SIG_DFL)

    def requested(self):
        """The signal, or 0. All processes get the same answer: none waits for one that has left."""
        number = agree(self.received)
        return number and signal.Signals(number)

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def fetch(steps):
    """Empties the list of (iteration, {metric: scalar tensor}) -> the last step's, as numbers.

    Raises Stopped, naming step and tensor, where one is not finite. The update that met it was
    left out.
    """
    for iteration, metrics in steps:
        values = torch.stack([value.float() for value in metrics.values()])  # (metrics,)
        figures = dict(zip(metrics, values.tolist()))  # waits for the device once
        for name, what in SUSPECTS.items():
            if not math.isfinite(figures[name]):
                raise Stopped(
                    f"step {iteration}: not finite: {what} ({name}={figures[name]}); "
                    "begin anew with a lower learning_rate, or look at what made it",
                    1,
                )
    steps.clear()
    return figures


@contextlib.contextmanager
def exit_when_stopped(out_dir):
    """The one line, and the exit code."""
    code = 1
    told = is_first()
    try:
        yield
        return
    except Stopped as error:
        message, code = error.args
    except KeyboardInterrupt:
        message = "stopped"
        code = 130
    except RewardFailed as error:
        message = error
        told = True  # it may have failed in another process alone
    except (OSError, MemoryError) as error:
        message = error
    mend = "nothing was saved yet"
    if (Path(out_dir) / LATEST).exists():
        mend = f"--init_from=resume goes on from {out_dir}/{LATEST}"
    if told:
        print(f"train_grpo.py: {message}; {mend}", file=sys.stderr)
    sys.exit(code)
