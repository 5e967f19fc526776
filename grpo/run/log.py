"""Keep a run's folder: its files, the progress bar, wandb, and how to resume if it ends early."""

import contextlib
import json
import os
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from data.files import command_line, shipped_path
from data.user_mistake import Mistake
from grpo.distributed import is_first, largest_of_processes, n_processes
from grpo.run.checkpoint import LATEST, training_state, write
from grpo.run.config import Config
from grpo.run.signals import StopSignals

try:
    import fcntl
except ImportError:  # Windows has no fcntl, so nothing gets locked there
    fcntl = None

# everything it shows fits into 80 columns
BAR = "{desc}|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
WANDB = {"silent": True, "init_timeout": 30}  # seconds


def say(text: str) -> None:
    """Print lines above the bar. Once nobody reads them, as after `| head -1`, they go nowhere."""
    try:
        tqdm.write(text)
        print(end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Log:
    """Write a run's files, move its bar, and tell whether the user wants it to stop.

    Only the first process writes and prints. Use it as `with Log(config, start, rule) as log`.
    """

    def __init__(self, config: Config, start: int, rule: str, quiet: bool = False):
        """Open the folder after `start` steps. Raises a Mistake if another run is using it.

        `rule` is the name of the dataset's rule, or empty.
        """
        self.config = config
        # {name in the bar: metric}; the bar shows those that the run has
        self.shown = {"reward": "mean_reward", rule: rule, "accepts": "accepts", "kl": "mean_kl"}
        self.first = is_first()
        self.talks = self.first and not quiet
        self.signals = StopSignals(second_one_ends=n_processes() == 1)
        self.dead_steps = 0  # in a row
        self.file = self.wandb = None
        if self.first:
            self.file = lock_folder(Path(config.out_dir), start)
            noted = {"rule": rule, "changes": config.changes, "made_with": config.made_with}
            content = json.dumps(asdict(config) | noted, indent=1)
            write(Path(config.out_dir) / "config.json", content.encode())
            if config.wandb_project:
                self.wandb = self.ask_wandb(start_wandb, config)
        self.bar = tqdm(
            desc="GRPO",
            total=config.max_iters,
            initial=start,
            disable=None if self.talks else True,  # None: only a terminal gets a bar
            bar_format=BAR,
        )

    def __enter__(self):
        """From here on, Ctrl-C and SIGTERM only tell `stop_requested`."""
        self.signals.__enter__()
        return self

    def stop_requested(self) -> int:
        """Return the signal that arrived, or 0. All processes get the same answer."""
        return largest_of_processes(self.signals.received)

    def end_training(self):
        """Close the bar, and let Ctrl-C and SIGTERM end the program as usual again."""
        self.bar.close()
        self.signals.__exit__()

    def say(self, text: str):
        if self.talks:
            say(text)

    def ask_wandb(self, function, *arguments, **options):
        """Call a function of wandb. In trouble, print one warning and leave wandb alone."""
        try:
            return function(*arguments, **options)
        except Exception as error:  # the network, the login, or wandb's own process
            self.wandb = None
            line = f"{type(error).__name__}: {error}".splitlines()[0]
            say(f"wandb failed, continuing without it: {line}")

    def write(self, step: int, metrics: dict[str, float]):
        """Write a line of metrics.jsonl, and show its numbers in the bar and in wandb."""
        if not self.first:
            return
        self.file.write(json.dumps({"iteration": step, **metrics}) + "\n")
        self.file.flush()
        shown = {name: f"{metrics[key]:.3f}" for name, key in self.shown.items() if key in metrics}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update()
        if self.wandb:
            self.ask_wandb(self.wandb.log, metrics, step=step)
        self.dead_steps = self.dead_steps + 1 if metrics["frac_reward_zero_std"] == 1 else 0
        if self.dead_steps == 10 or (self.dead_steps and step == 0):
            line = "all completions of an input earned the same, so there's nothing to learn"
            say(f"warning: step {step}: {line}")

    def table(self, result: dict, completions: list[dict], text: str):
        """Save and print the table, and suggest what to run next."""
        save_table(self.config.out_dir, result, completions)
        if self.wandb:
            self.ask_wandb(self.wandb.log, result)
        out, masked = self.config.out_dir, completions[0]["input"]
        self.say(
            f"{text}\n"
            f"in {out}: evaluation.json, completions.jsonl, metrics.jsonl, {LATEST}; next:\n"
            f"  {command_line('-m', 'grpo.tools.fill', masked, f'--run={out}')}\n"
            f"  {command_line('-m', 'grpo.tools.replay', out)}    # watch it learn"
        )

    def __exit__(self, kind, error, _):
        """Close everything. If the run ends early, say how to resume."""
        self.end_training()
        if not self.first:
            return
        with contextlib.suppress(OSError):  # on a full disk, closing fails again
            self.file.close()
        if self.wandb:
            self.ask_wandb(self.wandb.finish, exit_code=int(kind is not None))
        if kind:
            line = f"the run ends early: {how_to_resume(self.config)}"
            if isinstance(error, OSError):  # most likely the disk is full
                raise Mistake(f"{error}; {line}") from None
            tqdm.write(line, sys.stderr)


def how_to_resume(config: Config) -> str:
    """Say how many steps of a run are saved, and which command continues."""
    out = config.out_dir
    if not (Path(out) / LATEST).exists():
        return f"0 of {config.max_iters} steps are saved"
    state = training_state(Path(out) / LATEST)
    words = [str(shipped_path("train_grpo.py")), "--init_from=resume", f"--out_dir={out}"]
    saved = f"{state['iteration']} of {config.max_iters} steps are saved"
    if ".py:" in config.reward:  # a FILE.py runs only if the command names it
        words.append(f"--reward={config.reward}")
    return f"{saved}; to resume: {command_line(*words)}"


def start_wandb(config: Config):
    """Begin to log to Weights & Biases, and return its run."""
    import wandb

    run = wandb.init(
        project=config.wandb_project,
        name=config.wandb_run_name or None,
        dir=config.out_dir,
        config=asdict(config),
        settings=WANDB,
        resume="auto",  # if a run in this folder was killed, wandb continues its log
    )
    if not run.disabled:
        say(f"wandb: {run.url or run.dir}")
    return run


def read_lines(path: str | Path) -> list[dict]:
    """Read a .jsonl file up to the first line that isn't whole, as a kill or a power cut leaves it.

    What is NaN or infinite becomes None, because the JSON of a web page knows neither.
    """
    lines = []
    with contextlib.suppress(ValueError):  # it isn't JSON, or not even UTF-8
        for line in Path(path).read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            lines.append(json.loads(line, parse_constant=lambda _: None))
    return lines


def cut_back(path: Path, start: int) -> None:
    """Remove the lines of step `start` and of later steps from a .jsonl file."""
    kept = sum(line["iteration"] < start for line in read_lines(path))
    os.truncate(path, sum(map(len, path.read_bytes().splitlines(keepends=True)[:kept])))


def lock_folder(folder: Path, start: int) -> TextIO:
    """Open metrics.jsonl in a run's folder for appending, and lock it to keep other runs out.

    A new run moves a folder that holds an old run aside. A resumed run keeps the lines of its first
    `start` steps. Raises a Mistake if another run is using the folder, or if it holds no run.
    """
    path = folder / "metrics.jsonl"
    holds_run = path.exists() or (folder / LATEST).exists()
    if folder.is_dir() and any(folder.iterdir()) and not holds_run:
        raise Mistake(f"out_dir={folder} isn't empty, and holds no run; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    file = open(path, "a", encoding="utf-8")
    try:
        if fcntl:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Mistake(f"out_dir={folder} is in use by another run; name another out_dir") from None
    if not start and (path.stat().st_size or (folder / LATEST).exists()):
        if Path.cwd().is_relative_to(folder.resolve()):
            raise Mistake(
                f"out_dir={folder} holds a run, and you're in it, so it can't be moved aside; name"
                " another out_dir"
            )
        # a name that out* doesn't match, so that nobody compares a run with its predecessor
        name = f"old-{folder.name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        aside = folder.rename(folder.with_name(name))
        say(f"{folder} held a run, which is in {aside} now")
        return lock_folder(folder, start)
    cut_back(path, start)
    for name in ("evaluation.json", "completions.jsonl", "replay.html"):  # of a shorter run
        (folder / name).unlink(missing_ok=True)
    return file


def save_table(out_dir: str | Path, result: dict, completions: list[dict]) -> None:
    """Write evaluation.json and completions.jsonl."""
    lines = "".join(json.dumps(line) + "\n" for line in completions)
    write(Path(out_dir) / "completions.jsonl", lines.encode())
    write(Path(out_dir) / "evaluation.json", json.dumps(result, indent=1).encode())
