"""Log a run to metrics.jsonl, a progress bar and wandb.

It also times the run and watches for signals.
"""

import contextlib
import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data.user_mistake import Mistake
from grpo.distributed import is_first, largest_of_processes, n_processes
from grpo.evaluation import evaluate
from grpo.plumbing.checkpoint import LATEST, PREVIOUS, ROOT, write
from grpo.plumbing.command_line import print_cause

try:
    import fcntl
except ImportError:  # Windows has no fcntl, so we do not lock there
    fcntl = None


class Clock:
    """This measures the time of a step, and of the calls that `timed` wraps, in milliseconds.

    On CUDA the clock records events, and only `read` waits for the device.
    """

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.start()

    def start(self):
        self.spans = []  # (name, begin, end)
        self.begin = self.now()

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def timed(self, name, call):
        """Wrap `call` so that the time of each call is added to {name}_ms, which `read` returns."""

        def timed_call(*arguments, **options):
            begin = self.now()
            result = call(*arguments, **options)
            self.spans.append((f"{name}_ms", begin, self.now()))
            return result

        return timed_call

    def read(self):
        """Return {"policy_ms": ..., "step_ms": ..., "rest_ms": ...}.

        step_ms is the time since `start`, and rest_ms is the part of it that no timed call took.
        """
        end = self.now()
        if self.cuda:
            torch.cuda.synchronize()

        def milliseconds(begin, end):
            return begin.elapsed_time(end) if self.cuda else 1000 * (end - begin)

        took = Counter()
        for name, begin, stop in self.spans:
            took[name] += milliseconds(begin, stop)
        whole = milliseconds(self.begin, end)
        return {**took, "rest_ms": whole - sum(took.values()), "step_ms": whole}


class Signals:
    """This lets a program finish its step and save after Ctrl-C, SIGTERM or a closed terminal.

    A second signal ends the program at once, except under torchrun, which may itself send a signal
    twice.
    """

    def __enter__(self):
        self.received = 0
        self.before = {}
        for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup tells us to ignore SIGHUP
                self.before.setdefault(number, signal.signal(number, self.receive))
        return self

    def receive(self, number, _):
        if self.received and n_processes() == 1:
            os._exit(128 + number)
        self.received = number
        with contextlib.suppress(OSError):  # the terminal may be gone
            if is_first():
                os.write(2, b"\nfinishing what is at hand; again: stop now\n")

    def requested(self):
        """Return the signal that arrived, or 0.

        All processes get the same answer, because if only one ended, the others would wait for it.
        """
        stop = largest_of_processes(self.received)
        self.received = stop or self.received  # keep a signal that came in the meantime
        return stop

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def read_metrics(path):
    """Read a .jsonl file: -> a list of dicts. Leaves out the last line if a kill cut it short."""
    lines = Path(path).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


CURVES = ("mean_reward", "valid_words", "mean_kl", "entropy", "frac_reward_zero_std", "grad_norm")
EIGHTHS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # characters of a curve


def curves(metrics, apart=()):
    """Draw the CURVES of each run as text: the first value, a row of bars, and the last value.

    `metrics` is {run: the lines of its metrics.jsonl}. A curve has the same scale in all runs. Only
    the curves that `apart` names have a scale of their own in each run.
    """
    lines = []
    width = max(map(len, metrics))
    for name in CURVES:
        series = {run: [line[name] for line in rows] for run, rows in metrics.items()}
        for run, values in series.items():
            every = values if name in apart else np.concatenate([*series.values()])
            parts = np.array_split(values, min(WIDTH, len(values)))
            heights = [(part.mean() - min(every)) / (np.ptp(every) or 1) for part in parts]
            drawn = "".join(EIGHTHS[round(7 * height)] for height in heights)
            lines.append(f"{name:20s}  {run:{width}}{values[0]:8.3f} {drawn} {values[-1]:.3f}")
    return "\n".join(lines)


def save_table(out_dir, result, completions):
    """Write evaluation.json and completions.jsonl."""
    lines = "".join(json.dumps(line) + "\n" for line in completions)
    write(Path(out_dir) / "completions.jsonl", lines.encode())
    write(Path(out_dir) / "evaluation.json", json.dumps(result, indent=1).encode())


def cut_back(path, start):
    """Remove the lines of step `start` and of later steps from the .jsonl file `path`."""
    kept = sum(line["iteration"] < start for line in read_metrics(path))
    os.truncate(path, sum(map(len, path.read_bytes().splitlines(keepends=True)[:kept])))


def claim(folder, start, name="metrics.jsonl"):
    """Open the file `name` in a run's folder for appending, and keep other runs out: -> the file.

    The file is locked while it is open. If `start` is 0, the run is new. If the folder then holds
    an earlier run, we rename the folder and make a new one. If `start` is larger, the run is
    resumed, and we remove the file's lines of step `start` and of later steps. Raises a Mistake if
    another run is using the folder, or if we cannot write there.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a")
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept = path.stat().st_size or any((folder / name).exists() for name in (LATEST, PREVIOUS))
        if kept and not start:
            file.close()
            aside = folder.rename(f"{folder}-until-{datetime.now():%Y%m%d-%H%M%S-%f}")
            tqdm.write(f"{folder} held a run: it is in {aside} now")
            return claim(folder, start)
    except OSError as error:
        raise Mistake(
            f"out_dir={folder} is in use by another run, or cannot be written ({error.strerror});"
            " wait until that run ends, or name another out_dir"
        ) from None
    cut_back(path, start)
    return file


WANDB = {"silent": True, "init_timeout": 30, "finish_timeout": 30}  # timeouts in seconds


def start_wandb(config):
    import wandb

    run = wandb.init(
        project=config.wandb_project,
        name=config.wandb_run_name or None,
        dir=config.out_dir,
        config=asdict(config),
        settings=WANDB,
        resume="auto",  # if a run in this folder was killed, wandb continues its log
    )
    tqdm.write(f"wandb: {run.url or run.dir}")
    return run


# The progress bar fits into 80 columns, with everything that it shows.
BAR = "{desc}|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
SHOWN = {"reward": "mean_reward", "valid": "valid_words", "kl": "mean_kl"}


class Log:
    """Write a run's files, move the progress bar, and say how to go on if the run ends early."""

    def __init__(self, config, start, clock):
        """Open the files. If another run uses out_dir, raise a Mistake before writing anything."""
        self.config = config
        self.clock = clock
        self.start = self.step = self.saved = start
        self.again = shlex.quote(config.out_dir)  # part of the commands that `__exit__` prints
        # We run a user's FILE.py only if the command line names it, so these commands name it.
        if ".py:" in config.reward:
            self.again += f" --reward={shlex.quote(config.reward)}"
        self.signals = Signals()
        out = Path(config.out_dir)
        self.first = is_first()  # only the first process writes and prints
        self.records = config.replay and self.first
        self.file = claim(out, start) if self.first else open(os.devnull, "a")
        write(out / "config.json", json.dumps(asdict(config), indent=1).encode())
        total = config.max_iters
        self.bar = tqdm(
            desc="GRPO", total=total, initial=start, disable=not self.first, bar_format=BAR
        )
        wanted = config.wandb_log and self.first
        self.wandb = self.unless_it_fails(start_wandb, config) if wanted else None

    def __enter__(self):
        self.signals.__enter__()
        self.began = time.monotonic()
        return self

    def begin_step(self, step):
        self.step = step
        self.clock.start()

    def exit_on_signal(self):
        stop = self.signals.requested()
        if stop:
            sys.exit(128 + stop)

    def unless_it_fails(self, call, *arguments):
        """Call wandb. If it fails, the run prints one warning and goes on without wandb."""
        try:
            return call(*arguments)
        except Exception as error:  # the network, the login or wandb's own process may fail
            self.wandb = None
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            self.say(f"wandb_log=true is given up, the run goes on without: {line}")

    def to_wandb(self, send):
        """Call `send` with wandb's run, if this run logs to wandb."""
        if self.wandb:
            self.unless_it_fails(send, self.wandb)

    def say(self, text):
        if self.first:
            tqdm.write(text)

    def metrics(self, step, numbers):
        """Write a step's line of metrics.jsonl, and show its numbers in the bar and in wandb."""
        self.file.write(json.dumps({"iteration": step, **numbers}, allow_nan=False) + "\n")
        self.file.flush()
        shown = {name: f"{numbers[metric]:.3f}" for name, metric in SHOWN.items()}
        self.bar.set_postfix(shown, refresh=False)
        self.to_wandb(lambda run: run.log(numbers, step=step))

    def table(self, result, completions):
        """Save and print the table. Then print the run's curves, and commands to try next."""
        out = self.config.out_dir
        save_table(out, result, completions)
        say = self.say
        say(evaluate.format_table(result, evaluate.SHORT_ROWS, evaluate.SHORT_COLUMNS))
        say(curves({"": read_metrics(Path(out) / "metrics.jsonl")}))
        table = time.monotonic() - self.trained
        say(f"the steps took {self.trained - self.began:.0f} s, the table {table:.0f} s")
        say(f"in {out}: evaluation.json, completions.jsonl, metrics.jsonl, {LATEST}; next:")
        python = "python" if Path.cwd() == ROOT else f"PYTHONPATH={shlex.quote(str(ROOT))} python"
        quoted = shlex.quote(out)
        text = "this function returns a ____ of strings"
        say(f'  {python} -m grpo.tools.fill "{text}" --run={quoted}')
        if self.records:
            say(f"  {python} -m grpo.tools.replay {quoted}    # watch it learn")
        say(f"  {python} -m grpo.evaluation {quoted}    # all of the table")
        self.to_wandb(lambda run: run.summary.update(result))

    def __exit__(self, kind, error, _):
        """If the run ends early, print one last line: why, what is saved, and how to go on."""
        self.signals.__exit__()
        self.close(failed=kind is not None)
        if not error:
            return
        what = f"{error}" if kind in (Mistake, FloatingPointError) else f"{kind.__name__}: {error}"
        if self.signals.received:
            what = f"stopped by {signal.Signals(self.signals.received).name}"
        go_on = "nothing was saved yet"
        if self.saved:
            go_on = f"{self.saved} of {self.config.max_iters} steps are saved;"
            if self.saved < self.config.max_iters:
                go_on += f" to go on: --init_from=resume --out_dir={self.again},"
            go_on += f" for the table: python -m grpo.evaluation {self.again} --again"
        if isinstance(error, Mistake):
            print_cause(error)
        elif not isinstance(error, (FloatingPointError, OSError, SystemExit)):
            traceback.print_exception(error)
        if self.first:
            print(f"train_grpo.py: step {self.step}: {what}; {go_on}", file=sys.stderr)
        if not isinstance(error, SystemExit):
            sys.exit(2 if isinstance(error, Mistake) else 1)

    def close(self, failed):
        self.bar.close()
        with contextlib.suppress(OSError):  # on a full disk, closing the file can fail, too
            self.file.close()
        self.to_wandb(lambda run: run.finish(exit_code=int(failed)))
