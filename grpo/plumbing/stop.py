"""What ends a run before its last step: a signal, a figure that is not finite, a reward that fails, a full disk. It ends with one line on
stderr and an exit code that is not 0, and the last checkpoint stays.
"""

import contextlib
import math
import signal
import sys
from pathlib import Path

import torch

from grpo.plumbing.checkpoint import LATEST
from grpo.plumbing.distributed import agree, is_first, world

# The first of these metrics that is not finite tells what went wrong: each is made from those before it.
SUSPECTS = {
    "entropy": "the generator's logits",
    "mean_kl": "the reference's logits",
    "mean_reward": "the rewards",
    "loss": "the loss",
    "grad_norm": "the gradient",
}


class RewardFailed(ValueError):
    """A reward function raised, or returned what is no reward."""


class Stopped(Exception):
    """The run ends here: (message, exit code)."""


class Signals:
    """SIGINT and SIGTERM ask the run to stop after the step that it is in; a second one ends it at once (but under torchrun)."""

    def __enter__(self):
        self.received, self.before = (
            0,
            {
                number: signal.signal(number, self.receive)
                for number in (signal.SIGINT, signal.SIGTERM)
            },
        )
        return self

    def receive(self, number, _):
        self.received = number
        for each in (
            self.before if world()[0] == 1 else ()
        ):  # torchrun passes on what all were sent, so a second one says nothing new
            signal.signal(each, signal.SIG_DFL)

    def requested(self):
        """The signal, or 0: none. All processes get the same answer, so that none waits for another that has left."""
        number = agree(self.received)
        return number and signal.Signals(number)

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def fetch(steps):
    """Empties the list of (iteration, {metric: scalar tensor}) since the last time -> the last step's metrics, as numbers.
    Raises Stopped, naming step and tensor, where one is not finite. The update that met it was left out (`step.update`)."""
    for iteration, metrics in steps:
        figures = dict(
            zip(metrics, torch.stack([value.float() for value in metrics.values()]).tolist())
        )  # waits for the device once
        for name, what in SUSPECTS.items():
            if not math.isfinite(figures[name]):
                raise Stopped(
                    f"step {iteration}: not finite: {what} ({name}={figures[name]}); begin anew with a lower learning_rate, or look at what made it",
                    1,
                )
    steps.clear()
    return figures


@contextlib.contextmanager
def exit_when_stopped(out_dir):
    """The one line, and the exit code."""
    try:
        yield
    except (Stopped, RewardFailed, OSError, MemoryError, KeyboardInterrupt) as error:
        message, code = (
            error.args
            if isinstance(error, Stopped)
            else ("stopped", 130)
            if isinstance(error, KeyboardInterrupt)
            else (error, 1)
        )
        if is_first() or isinstance(
            error, RewardFailed
        ):  # which may have failed in another process alone
            saved = (Path(out_dir) / LATEST).exists()
            print(
                f"train_grpo.py: {message}; "
                + (
                    f"--init_from=resume goes on from {out_dir}/{LATEST}"
                    if saved
                    else "nothing was saved yet"
                ),
                file=sys.stderr,
            )
        sys.exit(code)
