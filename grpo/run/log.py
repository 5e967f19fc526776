"""Keep a run's folder: its files, the progress bar, wandb, and how to resume if it ends early."""

import contextlib
import json
import shlex
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from data.files import write_whole
from data.user_mistake import Mistake
from grpo.distributed import is_first
from grpo.metrics import BAR
from grpo.run.checkpoint import LATEST, write
from grpo.run.config import Config

try:
    import fcntl
except ImportError:  # Windows has no fcntl, so nothing gets locked there
    fcntl = None

BAR_FORMAT = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"  # fits into 80 columns
WANDB = {"silent": True, "init_timeout": 30}  # seconds
METRICS, SNAPSHOTS, LOCK = "metrics.jsonl", "snapshots.jsonl", "run.lock"


class Log:
    """Write a run's files, and move its bar. Only the first of several processes does so.

    Use it as `with Log(config, start, rule) as log`.
    """

    def __init__(self, config: Config, start: int, rule: str, quiet: bool = False):
        """Open the folder after `start` steps. Raises a Mistake if another run is using it.

        `rule` is the name of the dataset's rule, or empty.
        """
        self.config = config
        self.shown = BAR | ({rule: rule} if rule else {})
        self.saved = start  # steps that are in the checkpoint
        self.talks = is_first() and not quiet
        self.dead_steps = 0  # in a row
        self.lock = self.wandb = None
        if is_first():
            self.lock = open_folder(Path(config.out_dir), start)
            content = asdict(config) | {"rule": rule, "made_by": config.made_by}
            write(Path(config.out_dir) / "config.json", json.dumps(content, indent=1).encode())
            if config.wandb_project:
                self.wandb = self.ask_wandb(start_wandb, config)
        self.bar = tqdm(
            total=config.max_iters,
            initial=start,
            disable=None if self.talks else True,  # None: only a terminal gets a bar
            bar_format=BAR_FORMAT,
        )

    def __enter__(self):
        return self

    def say(self, text: str):
        if self.talks:
            tqdm.write(text)
            sys.stdout.flush()  # if it's a file, somebody may be watching

    def ask_wandb(self, function, *arguments, **options):
        """Call a function of wandb. In trouble, print one warning and leave wandb alone."""
        try:
            return function(*arguments, **options)
        except Exception as error:  # the network, the login, or wandb's own process
            self.wandb = None
            tqdm.write(f"wandb failed, continuing without it: {type(error).__name__}: {error}")

    def write(self, step: int, metrics: dict[str, float]):
        """Write a line of metrics.jsonl, and show its numbers in the bar and in wandb."""
        if not is_first():
            return
        append(Path(self.config.out_dir) / METRICS, {"iteration": step, **metrics})
        shown = [f"{name} {metrics[key]:.2f}" for name, key in self.shown.items() if key in metrics]
        self.bar.set_postfix_str(" ".join(shown), refresh=False)
        self.bar.update()
        if self.wandb:
            self.ask_wandb(self.wandb.log, metrics, step=step)
        dead = metrics["frac_reward_zero_std"] == 1 and self.config.baseline != "none"
        self.dead_steps = self.dead_steps + 1 if dead else 0
        if self.dead_steps == 10 or (self.dead_steps and step == 0):
            line = "all completions of an input earned the same, so there's nothing to learn"
            tqdm.write(f"warning: step {step}: {line}")

    def table(self, result: dict, completions: list[dict], text: str):
        """Save and print the table, and suggest what to run next."""
        out = self.config.out_dir
        save_table(out, result, completions)
        if self.wandb:
            self.ask_wandb(self.wandb.log, result)
        example = shlex.quote(completions[0]["input"])
        self.say(
            f"{text}\nin {out}: evaluation.json, completions.jsonl, {METRICS}, {LATEST}; next:\n"
            f"  python -m grpo.tools.fill {example} --run={shlex.quote(out)}\n"
            f"  python -m grpo.tools.replay {shlex.quote(out)}    # watch it learn"
        )

    def __exit__(self, kind, error, _):
        """Close everything. If the run ends early, say how to resume."""
        self.bar.close()
        if not is_first():
            return
        self.lock.close()
        if self.wandb:
            self.ask_wandb(self.wandb.finish, exit_code=int(kind is not None))
        if kind:
            line = f"the run ends early: {self.saved} of {self.config.max_iters} steps are saved"
            command = f"python train_grpo.py --init_from=resume --out_dir={self.config.out_dir}"
            if ".py:" in self.config.reward:  # a FILE.py runs only if the command names it
                command += f" --reward={self.config.reward}"
            tqdm.write(f"{line}; to resume: {command}" if self.saved else line, sys.stderr)


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
        tqdm.write(f"wandb: {run.url or run.dir}")
    return run


def append(path: Path, line: dict) -> None:
    """Add a line to a .jsonl file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_lines(path: str | Path) -> list[dict]:
    """Read a .jsonl file up to the first line that isn't whole, as a kill or a power cut leaves it.

    What is NaN or infinite becomes None, because the JSON of a web page knows neither.
    """
    lines = []
    with contextlib.suppress(ValueError, FileNotFoundError):  # not JSON, or not even UTF-8
        for line in Path(path).read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            lines.append(json.loads(line, parse_constant=lambda _: None))
    return lines


def cut_back(path: Path, start: int) -> None:
    """Keep the lines of a .jsonl file that are about the steps before `start`."""
    kept = [json.dumps(line) for line in read_lines(path) if line["iteration"] < start]
    write_whole(path, "".join(line + "\n" for line in kept).encode())


def open_folder(folder: Path, start: int) -> TextIO:
    """Lock a run's folder to keep other runs out: -> the open lock.

    A new run moves a folder that holds an old run aside. A resumed run keeps the lines of its first
    `start` steps. Raises a Mistake if another run is using the folder, or if it holds no run.
    """
    holds_run = any((folder / name).exists() for name in (METRICS, LATEST, LOCK))
    if folder.is_dir() and any(folder.iterdir()) and not holds_run:
        raise Mistake(f"out_dir={folder} isn't empty, and holds no run; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    lock = lock_folder(folder)
    if holds_run and not start:
        # a name that out* doesn't match, so that nobody compares a run with its predecessor
        name = f"old-{folder.name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        tqdm.write(f"{folder} held a run, which is in {folder.rename(folder.with_name(name))} now")
        folder.mkdir()
        lock.close()
        lock = lock_folder(folder)
    for name in METRICS, SNAPSHOTS:
        cut_back(folder / name, start)
    for name in "evaluation.json", "completions.jsonl", "replay.html":  # of a shorter run
        (folder / name).unlink(missing_ok=True)
    return lock


def lock_folder(folder: Path) -> TextIO:
    """Lock a folder until the file that this returns is closed, or the process ends."""
    lock = open(folder / LOCK, "w")
    try:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Mistake(f"out_dir={folder} is in use by another run; name another out_dir") from None
    return lock


def save_table(out_dir: str | Path, result: dict, completions: list[dict]) -> None:
    """Write evaluation.json and completions.jsonl."""
    lines = "".join(json.dumps(line) + "\n" for line in completions)
    write(Path(out_dir) / "completions.jsonl", lines.encode())
    write(Path(out_dir) / "evaluation.json", json.dumps(result, indent=1).encode())
