"""What a run leaves behind while it runs: the progress bar, metrics.jsonl, wandb, phases' times."""

import json
import os
import sys
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
from tqdm import tqdm

from grpo.plumbing.checkpoint import LATEST, PREVIOUS, lock, make_folder, unlock, write
from grpo.plumbing.distributed import agree, is_first
from grpo.plumbing.stop import told


class Clock:
    """Milliseconds per phase. On CUDA it records events and waits for nothing until `read`."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.start()

    def start(self):
        self.marks = []
        self.mark("start")

    def mark(self, phase):
        """The time since the last mark belongs to `phase`."""
        now = time.perf_counter()
        if self.cuda:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self.marks.append((phase, now))

    def read(self):
        """{"fill_ms": ..., "step_ms": the whole}"""
        if self.cuda:
            torch.cuda.synchronize()
        took = Counter()
        for (_, begin), (phase, end) in pairwise(self.marks):
            ms = begin.elapsed_time(end) if self.cuda else (end - begin) * 1000
            took[f"{phase}_ms"] += ms
        return {**took, "step_ms": sum(took.values())}


def read_metrics(path):
    """The lines of a metrics.jsonl: a list of dicts. One that a kill cut short is left out."""
    path = Path(path)
    if not path.exists():
        return []
    try:
        lines = path.read_text().splitlines(keepends=True)
        steps = [json.loads(line) for line in lines if line.endswith("\n")]
        if not all(type(step["iteration"]) is int for step in steps):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{path} has a line that is no step's, in JSON; take it out, or name another out_dir"
        ) from None
    return steps


WANDB_SECONDS = 30  # that a run waits for Weights & Biases, at its start and at its end


def start_wandb(config, start):
    """-> wandb, with a run begun, or, from step `start`, the run that out_dir holds continued."""
    import wandb

    last = Path(config.out_dir) / "wandb" / "latest-run"  # its own link, to run-DATE-ID
    same = {}
    if start and last.exists():
        same = {"id": last.resolve().name.rpartition("-")[2], "resume": "allow"}
    run = wandb.init(
        project=config.wandb_project,
        name=config.wandb_run_name or None,
        dir=config.out_dir,
        config=asdict(config),
        settings=wandb.Settings(
            silent=True, init_timeout=WANDB_SECONDS, finish_timeout=WANDB_SECONDS
        ),
        **same,
    )
    place = run.dir if run.offline else run.url
    tqdm.write(f"wandb: {place}")
    return wandb


RUN = ("config.json", "metrics.jsonl", "evaluation.json", "completions.jsonl", LATEST, PREVIOUS)


def put_aside(out):
    """Move an earlier run's files to a folder of their own -> that folder."""
    number = 1
    while (earlier := out / f"earlier-{number}").exists():
        number += 1
    make_folder(earlier)
    for name in RUN:
        if (out / name).exists():
            os.replace(out / name, earlier / name)
    return earlier


def claim(config, start):
    """Lock out_dir, write config.json, put an earlier run aside -> where that is, or None.

    First what may fail, a folder and a file, then what changes the run that is there. Raises
    ValueError if another run is in out_dir, or it cannot be written.
    """
    out = Path(config.out_dir)
    settings = json.dumps(asdict(config), indent=1).encode()
    try:
        make_folder(out)
        lock(out)
        for stale in out.glob("*.[jp]*.*.tmp"):  # of a write that a kill cut short
            stale.unlink()
        earlier = None
        if not start and (out / LATEST).exists():
            write(out / "config.json.next.tmp", settings)
            earlier = put_aside(out)
            os.replace(out / "config.json.next.tmp", out / "config.json")
        else:
            write(out / "config.json", settings)
        (out / "evaluation.json").unlink(missing_ok=True)  # of fewer steps
    except OSError as error:
        raise ValueError(
            f"out_dir={out} cannot be written ({error.strerror}); "
            "name a folder that you may write to"
        ) from None
    return earlier


# Beside the bar: what it is called there, and how it is written.
SHOWN = {
    "mean_reward": "reward={:.3f}",
    "valid_words": "valid={:.3f}",
    "mean_kl": "kl={:.3f}",
    "entropy": "entropy={:.3f}",
    "step_ms": "ms={:.0f}",
}


class Log(AbstractContextManager):
    """What a run writes while it goes: config.json, metrics.jsonl, progress bar, wandb.

    On resume metrics.jsonl is cut back to the checkpoint's iteration first. Raises ValueError,
    before anything is written, if another run is in out_dir or no folder can be made there.
    """

    def __init__(self, config, start):
        self.config = config
        self.warned = set()
        self.first = is_first()  # of several processes one is heard
        path = Path(config.out_dir) / "metrics.jsonl"
        kept = []
        for line in read_metrics(path) if start else []:
            done = line["iteration"] + 1
            if done <= start and done % config.log_interval == 0:
                kept.append(json.dumps(line) + "\n")

        earlier = None
        trouble = None
        if self.first:
            try:
                earlier = claim(config, start)
            except ValueError as error:
                trouble = error
        if agree(trouble is not None):  # all processes end here, not in their first exchange
            raise trouble or SystemExit(2)  # one of them tells

        write(path, "".join(kept).encode())
        self.file = open(path if self.first else os.devnull, "ab", buffering=0)
        self.bar = tqdm(
            total=config.max_iters,
            initial=start,
            desc="GRPO",
            dynamic_ncols=True,
            mininterval=0.5,
            disable=not self.first,
        )
        if earlier:
            self.say(f"{config.out_dir} held a run: its files are in {earlier} now")
        self.wandb = config.wandb_log and self.first
        self.wandb = self.to_wandb(lambda _: start_wandb(config, start))

    def to_wandb(self, act):
        """act(wandb), where that is on.

        Whatever fails there, network, login, a process of its own, ends that log with one
        warning, and not the run.
        """
        try:
            return self.wandb and act(self.wandb)
        except Exception as error:
            self.wandb = None
            self.say(f"wandb_log=true is given up, the run goes on without: {told(error)}")

    def metrics(self, iteration, metrics, rollout):
        """A line of metrics.jsonl; to wandb also what the blanks earned, as histograms.

        Raises OSError if the disk is full, or the file has been deleted.
        """
        if self.first and not os.fstat(self.file.fileno()).st_nlink:
            raise FileNotFoundError(f"out_dir={self.config.out_dir} was deleted")
        line = json.dumps({"iteration": iteration, **metrics}, allow_nan=False).encode() + b"\n"
        while line:  # a full disk takes a part, then raises
            line = line[self.file.write(line) :]

        def send(wandb):
            blanks = rollout.mask[:, None].expand_as(rollout.completions)  # (R,g,T)
            earned = {}
            for name in ("credits", "advantages"):
                values = getattr(rollout, name).expand_as(blanks)[blanks]  # (drawn characters,)
                earned[name] = wandb.Histogram(values.cpu())
            wandb.log(metrics | earned, step=iteration)

        self.to_wandb(send)
        beside = [form.format(metrics[name]) for name, form in SHOWN.items()]
        self.bar.set_postfix_str(", ".join(beside), refresh=False)

    def say(self, text):
        if self.first:
            tqdm.write(text)

    def warn(self, about, line):
        """On stderr, once about each thing."""
        if self.first and about not in self.warned:
            tqdm.write(f"train_grpo.py: {line}", file=sys.stderr)
        self.warned.add(about)

    def evaluation(self):
        """What `Evaluation.finish` wrote, to wandb too: the run's summary, and a table."""
        out = Path(self.config.out_dir)

        def send(wandb):
            lines = (out / "completions.jsonl").read_text().splitlines()
            rows = [json.loads(line) for line in lines]
            table = wandb.Table(list(rows[0]), [list(row.values()) for row in rows])
            wandb.log({"completions": table}, step=self.config.max_iters - 1)
            wandb.summary.update(json.loads((out / "evaluation.json").read_text()))

        self.to_wandb(send)

    def __exit__(self, kind, *_):
        self.bar.close()
        self.file.close()
        code = int(kind is not None)
        self.to_wandb(lambda wandb: wandb.finish(exit_code=code))
        unlock(self.config.out_dir)


def colours():
    """Does the reader's terminal show them? See no-color.org."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def highlight(text, mask):
    """Blanks in colour on a terminal, in [brackets] elsewhere: T characters, mask (T,) -> str."""
    on, off = ("\033[1;32m", "\033[0m") if colours() else ("[", "]")
    shown = ""
    in_blanks = False
    for blank, character in zip(mask, text):
        if blank != in_blanks:
            shown += on if blank else off
        shown += character
        in_blanks = blank
    return shown + off if in_blanks else shown
