"""Keep a run's folder: its files, the progress bar, wandb, and how to resume if it ends early.

snapshots.jsonl is for the page of grpo.tools.replay. It begins with a few held-out inputs and what
the base model makes of them. Then it's one line per step, with the completion of each input, and
whether the rule calls it good:

    {"iteration": -1, "texts": [...], "masked": [...], "completions": [...], "good": [...]}
    {"iteration": 0, "completions": ["437+451=888", ...], "good": [true, ...]}
"""

import json
import shlex
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch
from tqdm import tqdm

from data.rules import check
from data.user_mistake import Mistake
from data.vocabulary import decode
from grpo.distributed import is_first
from grpo.metrics import BAR
from grpo.optimizer import Optimizer
from grpo.policy import Policy
from grpo.run.checkpoint import LATEST, save_checkpoint, write
from grpo.run.config import Config
from grpo.run.load import HeldOut, uncompiled

try:
    import fcntl
except ImportError:  # Windows has no fcntl, so nothing gets locked there
    fcntl = None

BAR_FORMAT = "{n_fmt}/{total_fmt} {elapsed}<{remaining}{postfix}"  # fits into 80 columns
METRICS, SNAPSHOTS, LOCK = "metrics.jsonl", "snapshots.jsonl", "run.lock"
INPUTS = 8  # of a snapshot


class Log:
    """Write a run's files, and move its bar. Only the first of several processes does so.

    Use it as `with Log(config, made_by, start, held_out) as log`.
    """

    def __init__(
        self, config: Config, made_by: str, start: int, held_out: HeldOut, quiet: bool = False
    ):
        """Open the folder after `start` steps. Raises a Mistake if another run is using it.

        `made_by` is what makes this run besides its settings (grpo/run/fingerprint.py).
        """
        self.config = config
        self.made_by = made_by
        self.folder = Path(config.out_dir)
        self.held_out = held_out
        self.rule_name = held_out.rule.name if held_out.rule else ""
        self.saved = start  # steps that are in the checkpoint
        self.talks = is_first() and not quiet
        self.wandb = None
        if is_first():
            self.lock = open_folder(self.folder, start)
            content = asdict(config) | {"rule": self.rule_name, "made_by": made_by}
            write(self.folder / "config.json", json.dumps(content, indent=1).encode())
            if config.wandb_project:
                import wandb

                self.wandb = wandb.init(
                    project=config.wandb_project,
                    name=config.wandb_run_name or None,
                    dir=config.out_dir,
                    config=asdict(config),
                    resume="auto",  # if a run in this folder was killed, wandb continues its log
                )
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

    def save(self, policy: Policy, reference: Policy, optimizer: Optimizer, done: int):
        """Save a checkpoint after `done` steps, unless it's saved already."""
        if done > self.saved:
            save_checkpoint(self.config, self.made_by, policy, reference, optimizer, done)
            self.saved = done

    def write(self, step: int, metrics: dict[str, float], policy: Policy):
        """Add a line to metrics.jsonl and to snapshots.jsonl, and move the bar."""
        if not is_first():
            return
        append(self.folder / METRICS, {"iteration": step, **metrics})
        self.snapshot(policy, step)
        names = {self.rule_name: self.rule_name} | BAR
        shown = [f"{name} {metrics[key]:.2f}" for name, key in names.items() if key in metrics]
        self.bar.set_postfix_str(" ".join(shown), refresh=False)
        self.bar.update()
        if self.wandb:
            self.wandb.log(metrics, step=step)

    @torch.no_grad()
    @uncompiled()
    def snapshot(self, policy: Policy, step: int):
        """Draw one completion of a few inputs, and check it, if there's a rule.

        The random numbers are the same at every step. So if a completion changes from one step to
        the next, that's the policy and not the luck of the draw. The base model's line, which is
        that of step -1, shows the inputs, too.
        """
        batch, rule = self.held_out.batch[:INPUTS], self.held_out.rule
        completions = policy(batch.masked).sample(batch.first(1)).completions  # (8,1,T)
        line = {"iteration": step, "completions": decode(completions)}
        if step < 0:
            line |= {"texts": decode(batch.tokens), "masked": decode(batch.masked)}
        if rule:
            line["good"] = check(rule, completions, batch.masked).flatten().tolist()
        append(self.folder / SNAPSHOTS, line)

    def table(self, result: dict, completions: list[dict], text: str):
        """Save and print the table, and suggest what to run next."""
        write(self.folder / "evaluation.json", json.dumps(result, indent=1).encode())
        write_lines(self.folder / "completions.jsonl", completions)
        if self.wandb:
            self.wandb.log(result)
        example, out = shlex.quote(completions[0]["input"]), shlex.quote(self.config.out_dir)
        self.say(
            f"{text}\nin {out}: evaluation.json, completions.jsonl, {METRICS}, {LATEST}; next:\n"
            f"  python -m grpo.tools.fill {example} --run={out}\n"
            f"  python -m grpo.tools.replay {out}    # watch it learn"
        )

    def __exit__(self, kind, error, _):
        """Close everything. If the run ends early, say how to resume."""
        self.bar.close()
        if not is_first():
            return
        self.lock.close()
        if self.wandb:
            self.wandb.finish(exit_code=int(kind is not None))
        if kind:
            line = f"the run ends early: {self.saved} of {self.config.max_iters} steps are saved"
            if self.saved:
                line += "; to resume: python train_grpo.py --init_from=resume"
                line += f" --out_dir={shlex.quote(self.config.out_dir)}"
            tqdm.write(line, sys.stderr)


def append(path: Path, line: dict) -> None:
    """Add a line to a .jsonl file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def write_lines(path: str | Path, lines: list[dict]) -> None:
    """Write a .jsonl file that's whole or not there at all."""
    write(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def read_lines(path: str | Path) -> list[dict]:
    """Read a .jsonl file, but for a last line that a kill left unfinished."""
    try:
        *whole, _ = Path(path).read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in whole]
    except ValueError:
        raise Mistake(f"{path} isn't lines of JSON; name another file or folder") from None


def open_folder(folder: Path, start: int) -> TextIO:
    """Lock a run's folder to keep other runs out: -> the open lock.

    A new run moves a folder that holds an old run aside. A resumed run keeps the lines of its first
    `start` steps. Raises a Mistake if another run is using the folder, or if it holds no run.
    """
    has_files = not start and folder.is_dir() and any(folder.iterdir())
    if has_files and not (folder / LOCK).exists():
        raise Mistake(f"out_dir={folder} isn't empty, and holds no run; name another folder")
    lock = lock_folder(folder)
    if has_files:
        # a name that out* doesn't match, so that nobody compares a run with its predecessor
        name = f"old-{folder.name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        tqdm.write(f"{folder} held a run, which is in {folder.rename(folder.with_name(name))} now")
        lock.close()
        lock = lock_folder(folder)
    if start:
        for path in folder / METRICS, folder / SNAPSHOTS:
            kept = [line for line in read_lines(path) if line["iteration"] < start]
            write_lines(path, kept)
        for name in "evaluation.json", "completions.jsonl", "replay.html":  # of a shorter run
            (folder / name).unlink(missing_ok=True)
    return lock


def lock_folder(folder: Path) -> TextIO:
    """Lock a folder until the file that this returns is closed, or the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / LOCK, "w")
    try:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Mistake(f"out_dir={folder} is in use by another run; name another out_dir") from None
    return lock
