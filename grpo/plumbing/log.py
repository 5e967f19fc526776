"""What a run leaves behind while it runs: the progress bar, metrics.jsonl, wandb, and how long each phase of a step took."""

import json
import os
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import torch
from tqdm import tqdm

from grpo.plumbing.checkpoint import LATEST, PREVIOUS, lock, write
from grpo.plumbing.distributed import agree, is_first


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
        now = torch.cuda.Event(enable_timing=True) if self.cuda else time.perf_counter()
        if self.cuda:
            now.record()
        self.marks.append((phase, now))

    def read(self):
        """{"fill_ms": ..., "step_ms": the whole}"""
        if self.cuda:
            torch.cuda.synchronize()
        took = {}
        for (_, a), (phase, b) in zip(self.marks, self.marks[1:]):
            took[f"{phase}_ms"] = took.get(f"{phase}_ms", 0) + (
                a.elapsed_time(b) if self.cuda else (b - a) * 1000
            )
        return took | {"step_ms": sum(took.values())}


def read_metrics(path):
    """The lines of a metrics.jsonl: a list of dicts. A last line that a kill cut short is left out."""
    lines = Path(path).read_text().splitlines(keepends=True) if Path(path).exists() else []
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError:
        raise ValueError(
            f"{path} has a line that is not JSON; take it out, or name another out_dir"
        ) from None


WANDB_SECONDS = 30  # that a run waits for Weights & Biases, at its start and at its end


def start_wandb(config, start):
    """-> wandb, with a run begun, or, from step `start`, the run that out_dir holds continued."""
    import wandb

    last = Path(config.out_dir) / "wandb" / "latest-run"  # its own link, to run-DATE-ID
    same = (
        {"id": last.resolve().name.rpartition("-")[2], "resume": "allow"}
        if start and last.exists()
        else {}
    )
    run = wandb.init(
        project=config.wandb_project,
        name=config.wandb_run_name or None,
        dir=config.out_dir,
        config=asdict(config),
        **same,
        settings=wandb.Settings(
            silent=True, init_timeout=WANDB_SECONDS, finish_timeout=WANDB_SECONDS
        ),
    )
    tqdm.write(f"wandb: {run.dir if run.offline else run.url}")
    return wandb


class Log(AbstractContextManager):
    """What a run writes while it goes: config.json, metrics.jsonl (on resume cut back to the checkpoint's iteration first), progress bar, wandb.
    Raises ValueError, before anything is written, if another run is in out_dir or no folder can be made there."""

    def __init__(self, config, start):
        out, self.first, self.lock = (
            Path(config.out_dir),
            is_first(),
            None,
        )  # of several processes one is heard
        kept = (
            [
                line
                for line in read_metrics(out / "metrics.jsonl")
                if line["iteration"] < start and (line["iteration"] + 1) % config.log_interval == 0
            ]
            if start
            else []
        )
        trouble = None
        if self.first:
            try:
                out.mkdir(parents=True, exist_ok=True)
                self.lock = lock(out)
                for stale in out.glob("*.[jp]*.[0-9]*.tmp"):  # of a write that a kill cut short
                    stale.unlink()
                (out / "evaluation.json").unlink(
                    missing_ok=True
                )  # of an earlier run, or of fewer steps
                if (
                    not start and (out / LATEST).exists()
                ):  # of another run: kept, but this one cannot go on from it
                    os.replace(out / LATEST, out / PREVIOUS)
                write(out / "config.json", json.dumps(asdict(config), indent=1).encode())
            except OSError as error:
                trouble = ValueError(
                    f"out_dir={out} cannot be written ({error.strerror}); name a folder that you may write to"
                )
            except ValueError as error:
                trouble = error
        if agree(trouble is not None):  # all processes end here, not in their first exchange
            raise trouble or ValueError
        write(out / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in kept).encode())
        self.file = open(out / "metrics.jsonl" if self.first else os.devnull, "ab", buffering=0)
        self.bar = tqdm(
            total=config.max_iters,
            initial=start,
            desc="GRPO",
            dynamic_ncols=True,
            mininterval=0.5,
            disable=not self.first,
        )
        self.config, self.wandb = config, config.wandb_log and self.first
        self.wandb = self.to_wandb(lambda _: start_wandb(config, start))

    def to_wandb(self, act):
        """act(wandb), where that is on. Whatever fails there, network, login, a process of its own, ends that log with one warning, and not the run."""
        try:
            return self.wandb and act(self.wandb)
        except Exception as error:
            self.wandb = None
            self.say(
                f"wandb_log=true is given up, the run goes on without: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            )

    def metrics(self, iteration, metrics, rollout):
        """A line of metrics.jsonl; to wandb also what the blanks earned, as histograms."""
        line = json.dumps({"iteration": iteration, **metrics}, allow_nan=False).encode() + b"\n"
        while line:  # a full disk takes a part, then raises
            line = line[self.file.write(line) :]
        blanks = rollout.mask[:, None].expand_as(rollout.completions)  # (B,G,T)
        self.to_wandb(
            lambda wandb: wandb.log(
                metrics
                | {
                    name: wandb.Histogram(vars(rollout)[name].expand_as(blanks)[blanks].cpu())
                    for name in ("credits", "advantages")
                },
                step=iteration,
            )
        )
        shown = {
            "reward": "mean_reward",
            "valid": "valid_words",
            "kl": "mean_kl",
            "entropy": "entropy",
            "ms": "step_ms",
        }
        self.bar.set_postfix(
            {
                name: f"{metrics[key]:.0f}" if name == "ms" else f"{metrics[key]:.3f}"
                for name, key in shown.items()
            },
            refresh=False,
        )

    def say(self, text):
        if self.first:
            tqdm.write(text)

    def evaluation(self):
        """What `Evaluation.finish` wrote, to wandb too: the figures as the run's summary, the completions as a table."""

        def send(wandb):
            result, lines = (
                (Path(self.config.out_dir) / name).read_text()
                for name in ("evaluation.json", "completions.jsonl")
            )
            rows = [json.loads(line) for line in lines.splitlines()]
            wandb.log(
                {"completions": wandb.Table(list(rows[0]), [list(row.values()) for row in rows])},
                step=self.config.max_iters - 1,
            )
            wandb.summary.update(json.loads(result))

        self.to_wandb(send)

    def __exit__(self, kind, *_):
        self.bar.close()
        self.file.close()
        self.to_wandb(lambda wandb: wandb.finish(exit_code=int(kind is not None)))
        if self.lock:
            os.close(self.lock)


def colours():
    """Does the reader's terminal show them? See no-color.org."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def highlight(text, mask):
    """Blanks in colour on a terminal, in [brackets] elsewhere: text of T characters, mask (T,) -> str."""
    on, off = ("\033[1;32m", "\033[0m") if colours() else ("[", "]")
    runs = (
        (blank, "".join(c for _, c in run))
        for blank, run in groupby(zip(mask, text), key=lambda pair: pair[0])
    )
    return "".join(on + run + off if blank else run for blank, run in runs)
