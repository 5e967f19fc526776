"""Measure runs on text: every short word of the report half once, with several referees.

    python -m grpo.experiments.text out-text-1,out-text-2 out-chain-1,out-chain-2 --judge=FILE.pt

Runs joined by commas are one row. ± is a 95% interval over blocks of the text, because words of one
paragraph aren't independent, and over the runs of the row. `--judge` is a second one, which runs
that were trained with it leave out. `--half=choose` measures on the other half, where settings are
chosen. The columns:

    exact     the share of words that came back
    new       the same, without near-copies: words that stand in the training text with the same
              eight characters on both sides
    valid     the share that are words of the training text
    accepts   by the run's own judge, and `fooled` of what isn't valid; `other` is fooled by --judge
    chain     log p when the base model reads blank by blank
    distance  between the frequencies of words written and of those that were there

Best guesses of a run have a second line: how much more they have than the base model's.

Shapes: N words, n completions of each, T characters.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset, read_splits
from data.masking import SHORT
from data.rules import check
from data.user_mistake import Mistake, run_program
from data.vocabulary import encode
from grpo.batch import make_batch
from grpo.evaluation.evaluate import distance, drawn_rows, other_rows
from grpo.experiments.compare import interval
from grpo.reward import chain, exact, judge_scores
from grpo.run.arguments import read_arguments
from grpo.run.checkpoint import LATEST, load_weights, read, training_state, write
from grpo.run.config import Config
from grpo.run.load import SAMPLES, HeldOut, load_judge, load_models

SEED = 2**31 + 5  # begins the seeds here, so that no training draws the same random numbers
BLOCKS = 24
AROUND = 8  # characters on both sides that make a near-copy
CPU = torch.device("cpu")
DRAWN = 1  # completions of a word, where they are drawn


def every_word(train: Dataset, val: Dataset, T: int) -> tuple[HeldOut, Tensor]:
    """Hide each short word of `val` in a window of its own: -> N inputs, and which are near-copies.

    Where the word stands in its window is random.
    """
    text = val.lines[0]
    rng = np.random.default_rng(SEED)
    windows, masks, copies = [], [], []
    end = -1
    for word in text.split(" "):
        start, end = end + 1, end + 1 + len(word)
        earliest, latest = max(0, end + 1 - T), min(start - 1, len(text) - T)
        if len(word) not in SHORT or latest < earliest:
            continue
        at = int(rng.integers(earliest, latest + 1))
        windows.append(text[at : at + T])
        masks.append([start - at <= t < end - at for t in range(T)])
        copies.append(text[max(0, start - AROUND) : end + AROUND] in train.lines[0])
    tokens = encode("".join(windows)).view(-1, T)  # (N,T)
    batch = make_batch(tokens, torch.tensor(masks), SAMPLES, (SEED,))
    return HeldOut(batch, train.rule), torch.tensor(copies)


def blocks(x: Tensor) -> list[float]:
    """Return the mean over each block of the text: (N,) -> a number a block."""
    return [block.double().mean().item() for block in x.tensor_split(BLOCKS)]


@torch.no_grad()
def measure(completions: Tensor, held_out: HeldOut, copies: Tensor, reader, judges: dict) -> dict:
    """Compute the figures of completions (N,n,T): -> {column: a number a block}."""
    batch = held_out.batch
    right = exact(completions, batch).mean(dim=1)  # (N,)
    good = check(held_out.rule, completions, batch.masked)  # (N,n)
    shares = {
        "exact": right,
        "new": right[~copies],
        "valid": good.float().mean(dim=1),
        "chain": chain(reader, completions, batch).mean(dim=1),
    }
    for name, judge in judges.items():
        accepted = (judge_scores(judge, completions, batch) > 0).float()  # (N,n)
        if name == "own":
            shares["accepts"] = accepted.mean(dim=1)
        if (~good).sum() >= 100:
            shares["fooled" if name == "own" else "other"] = accepted[~good]
    return {name: blocks(x) for name, x in shares.items()} | {
        "distance": [distance(completions, batch)]
    }


def summary(runs: list[dict]) -> dict[str, tuple[float, float]]:
    """Average runs, each {column: a number a block}: -> {column: (mean, half of its interval)}."""
    found = {}
    for name in {name: None for run in runs for name in run}:
        values = [run[name] for run in runs if name in run]
        of_blocks = [mean(block) for block in zip(*values)]
        of_runs = [mean(run) for run in values]
        halves = [interval(x) for x in (of_blocks, of_runs) if len(x) > 1]
        found[name] = mean(of_runs), sum(half**2 for half in halves) ** 0.5
    return found


def minus(run: dict, other: dict) -> dict:
    """Subtract the figures of `other`, block by block."""
    both = [name for name in run if name in other and name not in ("fooled", "other")]
    return {name: [a - b for a, b in zip(run[name], other[name])] for name in both}


@dataclass
class Settings:
    judge: str = ""  # another judge than a run's own
    half: Literal["val", "choose"] = "val"
    json: str = ""  # write the figures to this file


@torch.no_grad()
def main(arguments: list[str]) -> None:
    given, words = read_arguments(Settings, arguments, __doc__)
    args = Settings(**given)
    groups = [group.split(",") for group in words]
    if not groups or not args.judge:
        raise Mistake("name the folders of runs, and another judge with --judge=FILE.pt")
    settings = {}
    for folder in (folder for group in groups for folder in group):
        settings[folder] = Config(**training_state(Path(folder) / LATEST)["config"])
        if settings[folder].masking != "short":
            raise Mistake(f"{folder} doesn't hide one short word (--masking=short)")
    first = settings[groups[0][0]]
    T = first.block_size
    config = Config(
        generator_checkpoint=first.generator_checkpoint,
        judge_checkpoint=first.judge_checkpoint,
        block_size=T,
    )
    train, val = read_splits("text", args.half, T)
    held_out, copies = every_word(train, val, T)
    batch = held_out.batch
    models = load_models(config, CPU)
    vocab_size = models.base.network.vocab_size
    other = {"other": load_judge(args.judge, config, CPU, vocab_size)}
    own = other | ({"own": models.judge} if models.judge else {})
    table, figures = {}, {}
    rows = {title: q.sample(batch).completions for title, q in drawn_rows(models, held_out).items()}
    for title, completions, _ in other_rows(models, None, held_out, everything=True):
        rows[title] = completions
    for title, completions in rows.items():
        if "after" not in title:
            figures[title] = measure(completions[:, :DRAWN], held_out, copies, models.reader, own)
            table[title] = summary([figures[title]])
    for group in groups:
        found = {"sampled": [], "argmax": []}
        for folder in group:
            path = Path(folder) / LATEST
            load_weights(models.policy.network, read(path)["weights"], path)
            judge = load_judge(settings[folder].judge_checkpoint, config, CPU, vocab_size)
            judges = {"own": judge} if judge else {}
            if settings[folder].judge_checkpoint != args.judge:
                judges |= other
            q = models.policy(batch.masked)
            found["sampled"].append(q.sample(batch).completions[:, :DRAWN])
            found["argmax"].append(q.best_guess()[:, None])
            for kind in found:
                found[kind][-1] = measure(found[kind][-1], held_out, copies, models.reader, judges)
        for kind, runs in found.items():
            table[f"{group[0]} (runs: {len(runs)}), {kind}"] = summary(runs)
        gained = [minus(run, figures["before, argmax"]) for run in found["argmax"]]
        table[f"{group[0]}, argmax, minus before, argmax"] = summary(gained)
    columns = "exact new valid accepts fooled other chain distance".split()
    print(f"{len(copies)} words, {copies.float().mean():.2f} of them near-copies")
    print("filled by".ljust(44), *(f"{name:>14}" for name in columns))
    for title, row in table.items():
        cells = [f"{row[c][0]:.3f} ±{row[c][1]:.3f}" if c in row else "" for c in columns]
        print(title.ljust(44), *(f"{text:>14}" for text in cells))
    if args.json:
        state = training_state(Path(groups[0][0]) / LATEST)
        content = {"table": table, "settings": state["config"], "made_by": state["made_by"]}
        write(args.json, json.dumps(content, indent=1).encode())


if __name__ == "__main__":
    run_program(main)
