"""How a program ends before its time: with one line on stderr, and an exit code that is not 0.

A mistake of the user's, found before anything is written: 2. Whatever stops a run that has begun,
a reward that fails, a full disk, a figure that is not finite: 1. A signal: 128 and its number.
"""

import contextlib
import math
import os
import signal
import sys
import traceback
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


class Stopped(BaseException):
    """The run ends here: (message, exit code). Nobody's `except Exception` keeps it."""


class RewardFailed(ValueError):
    """A reward function raised, or returned what is no reward."""


OWN = "<run_path>"  # what runpy calls a file of the user's: settings, or a reward


def told(error):
    """An error in one line: what it is, and where in the user's own file it arose."""
    line = f"{type(error).__name__}: {error}".splitlines()[0]
    place = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_globals["__name__"] == OWN:
            place = f" ({frame.f_code.co_filename}, line {number})"
    return line + place


def say(line):
    """The line on stderr. Each process tells what it alone may have met."""
    _, rank = world()
    who = f"process {rank}: " if rank else ""
    print(who + line.replace("\n", "\\n"), file=sys.stderr)


def is_out_of_memory(error):
    """torch has its own ways to say so."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


@contextlib.contextmanager
def exit_on_mistake(program):
    """A user's mistake becomes one line on stderr and exit code 2.

    That is a ValueError, a file that cannot be read or written, or more memory than there is.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w"))
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        say(f"{program}: stopped")
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        mend = ""
        if is_out_of_memory(error):
            mend = "; that is more memory than there is: ask for less at once"
        elif isinstance(error, OSError):
            mend = "; name another file or folder"
        elif isinstance(error, RuntimeError):
            raise
        say(f"{program}: {error}{mend}")
        sys.exit(2)


class Signals(contextlib.AbstractContextManager):
    """SIGINT and SIGTERM ask for the step at hand to be finished, and saved.

    A second one ends the program at once, but under torchrun, which passes on what all were sent.
    """

    def __enter__(self):
        self.received = 0
        self.before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # what is ignored stays ignored
                self.before[number] = signal.signal(number, self.receive)
        return self

    def receive(self, number, _):
        self.received = number
        if world()[0] == 1:
            for each in self.before:
                signal.signal(each, signal.SIG_DFL)
        if is_first():
            os.write(2, b"\nfinishing the step; again: stop now\n")

    def requested(self):
        """The signal, or 0. All processes get the same answer: none waits for one that has left."""
        return agree(self.received)

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


class Ending(Signals):
    """The one place that knows how far a run is, and says what is true of it where it ends.

    After the steps the first signal ends it at once.
    """

    def __init__(self, config, saved):
        self.config = config
        self.saved = saved  # steps that the checkpoint holds
        self.in_steps = True
        self.complete = False  # is the table written?

    def receive(self, number, frame):
        if not self.in_steps:
            self.stop(number)
        super().receive(number, frame)

    def stop(self, number, when=""):
        raise Stopped(f"stopped by {signal.Signals(number).name}{when}", 128 + number)

    def steps_done(self):
        """From here on there is no step to finish: a signal ends the run at once."""
        self.in_steps = False
        if self.received:
            self.stop(self.received)

    def prospects(self):
        """What is true of the run now, and the command that goes on."""
        out = self.config.out_dir
        if self.complete:
            return f"the run is complete: its table is in {out}/evaluation.json"
        if not self.saved or not (Path(out) / LATEST).is_file():
            return "nothing was saved yet"
        if self.saved == self.config.max_iters:
            return f"all steps are done and saved: python -m grpo.evaluate {out} makes the table"
        return f"--init_from=resume --out_dir={out} goes on from step {self.saved}"

    def explain(self, error):
        """-> the line, without its end, and the exit code; None for an error of the program's."""
        if isinstance(error, Stopped):
            return error.args
        if isinstance(error, KeyboardInterrupt):
            return "stopped", 128 + signal.SIGINT
        if is_out_of_memory(error):
            less = "--gradient_checkpointing=true" if self.in_steps else "a smaller --eval_inputs"
            return f"out of memory: {less} takes less", 1
        if isinstance(error, (RewardFailed, OSError, FloatingPointError)):
            return error, 1
        return None

    def __exit__(self, kind, error, _):
        super().__exit__()
        explained = self.explain(error)
        if not explained:
            return
        message, code = explained
        line = f"train_grpo.py: {message}"
        if not isinstance(error, FloatingPointError):  # resumed, it would stop there again
            line += f"; {self.prospects()}"
        common = isinstance(error, (Stopped, FloatingPointError))  # all processes met it
        if is_first() or not common:
            say(line)
        sys.exit(code)


def fetch(steps):
    """Empties the list of (iteration, {metric: scalar tensor}) -> the last step's, as numbers.

    Raises FloatingPointError, naming step and tensor, where one is not finite. The update that
    met it was left out.
    """
    for iteration, metrics in steps:
        values = torch.stack([value.float() for value in metrics.values()])  # (metrics,)
        figures = dict(zip(metrics, values.tolist()))  # waits for the device once
        for name, what in SUSPECTS.items():
            if not math.isfinite(figures[name]):
                raise FloatingPointError(
                    f"step {iteration}: not finite: {what} ({name}={figures[name]}); "
                    "begin anew with a lower learning_rate, or look at what made it"
                )
    steps.clear()
    return figures
