"""Keep a run's folder: its files, the progress bar, wandb, and a line if the run ends early."""

import contextlib
import errno
import json
import os
import shlex
import signal
import sys
import threading
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from data.user_mistake import Mistake, refuse
from grpo.advantage import EPSILON
from grpo.distributed import is_first, largest_of_processes, n_processes
from grpo.run.checkpoint import LATEST, training_state, write

try:
    import fcntl
except ImportError:  # Windows has no fcntl, so we do not lock there
    fcntl = None

# The progress bar fits into 80 columns, with everything that it shows.
BAR = "{desc}|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
WANDB = {"silent": True, "init_timeout": 30}  # seconds
# {name in the bar: metric}, of which the bar shows those that the run has
SHOWN = {
    "reward": "mean_reward",
    "valid": "valid_words",
    "right": "right",
    "accepts": "accepts",
    "kl": "mean_kl",
}


class Log:
    """Write a run's files, move its bar, and tell whether the user wants it to stop.

    Only the first process writes and prints. Use it as `with Log(config, start) as log`.
    """

    def __init__(self, config, start, quiet=False):
        """Open the folder after `start` steps. Raises a Mistake if another run is using it."""
        self.config = config
        self.first = is_first()
        self.talks = self.first and not quiet
        folder = Path(config.out_dir).resolve()  # of a symbolic link, the folder that it points to
        self.file = claim(folder, start) if self.first else open(os.devnull, "a")
        content = json.dumps(asdict(config), indent=1)
        try:
            write(Path(config.out_dir) / "config.json", content.encode())
            self.wandb = start_wandb(config) if config.wandb_project and self.first else None
        except BaseException:  # Ctrl-C, too: the next run of a notebook may want this folder
            self.file.close()
            raise
        self.received = 0  # the signal that arrived
        self.handlers = {}
        self.bar = tqdm(
            desc="GRPO",
            total=config.max_iters,
            initial=start,
            disable=None if self.talks else True,  # None: no bar in a file, which keeps each state
            bar_format=BAR,
        )

    def __enter__(self):
        """Let Ctrl-C and SIGTERM only tell `stop_requested` from here on.

        If the terminal is closed, which sends SIGHUP, the training goes on.
        """
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self.receive)
            if hasattr(signal, "SIGHUP"):  # Windows has none
                self.handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return self

    def receive(self, number, _):
        """Remember the signal. A second one ends the program, as it would without us.

        Under torchrun, which may send a signal twice, a second one changes nothing.
        """
        self.received = number
        if n_processes() == 1:
            for each in self.handlers:
                signal.signal(each, signal.SIG_DFL)
            with contextlib.suppress(OSError):  # the terminal may have gone away
                os.write(2, b"\nfinishing this step; once more stops at once\n")

    def stop_requested(self):
        """Return the signal that arrived, or 0. All processes get the same answer."""
        return largest_of_processes(self.received)

    def end_training(self):
        """Close the bar, and let Ctrl-C and SIGTERM end the program as usual again."""
        with contextlib.suppress(OSError):
            self.bar.close()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def say(self, text):
        if self.talks:
            say(text)

    def tell_wandb(self, method, *arguments, **options):
        """Call a method of the run on wandb. In trouble, print one warning and tell it no more."""
        if self.wandb is None:
            return
        try:
            getattr(self.wandb, method)(*arguments, **options)
        except Exception as error:  # its process may have died, or the network
            self.wandb = None
            say(f"wandb is given up, the run goes on without: {first_line(error)}")

    def write(self, step, metrics):
        """Write a step's line of metrics.jsonl, and show its numbers in the bar and in wandb."""
        self.file.write(json.dumps({"iteration": step, **metrics}) + "\n")
        self.file.flush()
        shown = {name: f"{metrics[key]:.3f}" for name, key in SHOWN.items() if key in metrics}
        with contextlib.suppress(OSError):  # the terminal may have gone away
            self.bar.set_postfix(shown, refresh=False)
            self.bar.update()
        self.tell_wandb("log", metrics, step=step)
        if step == 0 and self.first:
            self.warn(metrics)

    def warn(self, metrics):
        """Say it if the rewards of the first step can teach little or nothing."""
        if metrics["frac_reward_zero_std"] == 1:
            say("warning: all fills of an input earned the same, so there is nothing to learn")
        elif self.config.scale_rewards == "group" and metrics["std_reward"] < 10 * EPSILON:
            say(
                f"warning: scale_rewards=group adds {EPSILON} to deviations, and those of these"
                " rewards are not much larger; give the reward a larger weight"
            )

    def table(self, result, completions, text):
        """Save and print the table, and print commands to try next."""
        out = Path(self.config.out_dir)
        save_table(out, result, completions)
        self.tell_wandb("log", result)
        quoted = shlex.quote(self.config.out_dir)
        self.say(text)
        self.say(f"in {out}: evaluation.json, completions.jsonl, metrics.jsonl, {LATEST}; next:")
        self.say(f'  python -m grpo.tools.fill "{completions[0]["input"]}" --run={quoted}')
        self.say(f"  python -m grpo.tools.replay {quoted}    # watch it learn")

    def __exit__(self, kind, error, _):
        """Close everything. If the run ends early, say what is saved and how to go on."""
        self.end_training()
        self.file.close()
        self.tell_wandb("finish", exit_code=int(kind is not None))
        if kind and self.first:
            say(f"the run ends early: {how_to_go_on(self.config)}", sys.stderr)


def say(text, file=None):
    """Print a text. If the terminal has gone away, the run goes on without it."""
    with contextlib.suppress(OSError):
        tqdm.write(text, file)


def how_to_go_on(config):
    """Say how many steps of a run are saved, and with which command it goes on."""
    path = Path(config.out_dir) / LATEST
    if not path.exists():
        return f"0 of {config.max_iters} steps are saved"
    state = training_state(path)
    saved = state["iteration"]
    flags = {"out_dir": config.out_dir}
    for name, value in asdict(config).items():
        # A resumed run may have changed a setting after its last checkpoint. And we run a user's
        # FILE.py only if the command line names it.
        changed = value != state["config"][name] and name != "init_from"
        if changed or (name == "reward" and ".py:" in value):
            flags[name] = value
    line = f"{saved} of {config.max_iters} steps are saved"
    if saved < config.max_iters:
        again = [f"--{name}={value}" for name, value in flags.items()]
        return f"{line}; to go on: python train_grpo.py --init_from=resume {shlex.join(again)}"
    again = [config.out_dir, "--again"]
    if "reward" in flags:
        again.append(f"--reward={config.reward}")
    return f"{line}; for the table: python -m grpo.evaluation {shlex.join(again)}"


def start_wandb(config):
    """Begin to log to Weights & Biases: -> its run. In trouble, print one warning: -> None."""
    try:
        import wandb

        run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_run_name or None,
            dir=config.out_dir,
            config=asdict(config),
            settings=WANDB,
            resume="auto",  # if a run in this folder was killed, wandb continues its log
        )
        say(f"wandb: {run.url or run.dir}")
        return run
    except Exception as error:  # the network, the login or wandb's own process may fail
        say(f"wandb is given up, the run goes on without: {first_line(error)}")


def first_line(error):
    return f"{type(error).__name__}: {error}".splitlines()[0]


def read_lines(path):
    """Read a .jsonl file: -> a list of dicts. Leaves out the last line if a kill cut it short.

    What is NaN or infinite becomes None, because the JSON of a web page knows neither.
    """
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return [json.loads(line, parse_constant=lambda _: None) for line in whole]


def cut_back(path, start):
    """Remove the lines of step `start` and of later steps from the .jsonl file `path`."""
    kept = sum(line["iteration"] < start for line in read_lines(path))
    os.truncate(path, sum(map(len, path.read_bytes().splitlines(keepends=True)[:kept])))


def lock(file):
    """Lock a file: -> False if its file system has no locks.

    Raises an OSError if another process has locked it.
    """
    if fcntl:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            return False
    return True


def claim(folder, start):
    """Open metrics.jsonl in a run's folder for appending, and keep other runs out: -> the file.

    The file is locked while it is open. A new run, with a `start` of 0, renames a folder that holds
    an earlier run, and makes a new one. A resumed run keeps the lines of its first
    `start` steps. Raises a Mistake if another run is using the folder, if the folder holds anything
    else than a run, or if we cannot write there.
    """
    path = folder / "metrics.jsonl"
    holds_run = path.exists() or (folder / LATEST).exists()
    refuse(
        folder.is_dir() and any(folder.iterdir()) and not holds_run,
        f"out_dir={folder} is not empty, and holds no run; name another folder",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(path, "a", encoding="utf-8")
        locked = lock(file)
        if os.fstat(file.fileno()).st_ino != path.stat().st_ino:  # just moved aside by another run
            raise OSError(errno.EAGAIN, "another run has begun there")
        if not start and (path.stat().st_size or (folder / LATEST).exists()):
            if not fcntl:
                file.close()  # Windows does not rename the folder of an open file
            aside = folder.rename(f"{folder}-until-{datetime.now():%Y%m%d-%H%M%S-%f}")
            say(f"{folder} held a run, which is in {aside} now")
            if (aside / LATEST).exists():
                again = shlex.join(["--init_from=resume", f"--out_dir={aside}"])
                say(f"  (to go on with it: {again})")
            new = claim(folder, start)
            file.close()  # only now, so that the old folder is locked until the new one is ours
            return new
    except OSError as error:
        raise Mistake(
            f"out_dir={folder} is in use by another run, or cannot be written ({error.strerror});"
            " wait until that run ends, or name another out_dir"
        ) from None
    if not locked:
        say(f"{path} cannot be locked here; start no second run in this folder")
    cut_back(path, start)
    return file


def save_table(out_dir, result, completions):
    """Write evaluation.json and completions.jsonl."""
    lines = "".join(json.dumps(line) + "\n" for line in completions)
    write(Path(out_dir) / "completions.jsonl", lines.encode())
    write(Path(out_dir) / "evaluation.json", json.dumps(result, indent=1).encode())
