"""Measure runs on text: every short word of the report half once, with several referees.

    python -m grpo.experiments.text out-text-1,out-text-2 out-chain-1,out-chain-2 --judge=FILE.pt

Runs joined by commas are averaged. The ± is a 95% interval over blocks of the text, because words
of one paragraph aren't independent. `--judge` is one that no run was trained with, and
`--half=choose` measures on the other half, where settings are chosen. The columns:

    exact     the share of words that came back
    new       the same, without near-copies: words that stand in the training text with the same
              eight characters on both sides
    valid     the share that are words of the training text
    accepts   by the run's own judge, and `fooled` of what isn't valid; `other` is fooled by --judge
    chain     log p when the base model reads blank by blank
    distance  between the frequencies of words written and of those that were there

Shapes: N words, n completions of each, T characters.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset, read_splits
from data.masking import SHORT
from data.rules import check
from data.user_mistake import Mistake, exit_on_mistake
from data.vocabulary import decode, encode, highlight
from grpo.batch import make_batch
from grpo.evaluation.evaluate import distance
from grpo.evaluation.rivals import best_by_judge, fill_in_passes, fill_with_common_words
from grpo.reward import chain, exact, judge_scores
from grpo.run.checkpoint import LATEST, load_weights, read, training_state
from grpo.run.config import Config, Parser
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


def interval(x: Tensor) -> tuple[float, float]:
    """Return the mean over the blocks of x (N,), and half the width of its 95% interval."""
    blocks = [block.double().mean().item() for block in x.tensor_split(BLOCKS)]
    return mean(blocks), 2.07 * stdev(blocks) / BLOCKS**0.5  # Student's t for 23 degrees of freedom


@torch.no_grad()
def measure(completions: Tensor, held_out: HeldOut, copies: Tensor, base, judges: dict) -> dict:
    """Compute the figures of completions (N,n,T): -> {column: (mean, half of its interval)}."""
    batch = held_out.batch
    right = exact(completions, batch)  # (N,n)
    good = check(held_out.rule, completions, batch.masked)  # (N,n)
    shares = {
        "exact": right.mean(dim=1),
        "new": right.mean(dim=1)[~copies],
        "valid": good.float().mean(dim=1),
        "chain": chain(base, completions, batch).mean(dim=1),
    }
    for name, judge in judges.items():
        accepted = (judge_scores(judge, completions, batch) > 0).float()  # (N,n)
        if name == "own":
            shares["accepts"] = accepted.mean(dim=1)
        if (~good).sum() >= 20:
            shares["fooled" if name == "own" else "other"] = accepted[~good]
    figures = {name: interval(x) for name, x in shares.items()}
    return figures | {"distance": (distance(completions, batch), 0.0)}


def rows_of_base(base, held_out: HeldOut, judge) -> dict[str, Tensor]:
    """Fill the words in every way that needs no GRPO: -> {title: completions}."""
    batch = held_out.batch
    q = base(batch)
    draws = q.sample().completions  # (N,16,T)
    cold = replace(q, config=replace(q.config, temperature=0.3))
    rows = {
        "the truth": batch.tokens[:, None],
        "base, sampled": draws[:, :DRAWN],
        "base, sampled at τ = 0.3": cold.sample().completions[:, :DRAWN],
        "base, argmax": q.best_guess()[:, None],
        "cheat: common words": fill_with_common_words(batch, held_out.rule.lexicon),
    }
    if judge:
        scores = judge_scores(judge, draws, batch)  # (N,16)
        rows["best of 16, judge"] = best_by_judge(q, draws, scores)
    rows["one by one, argmax"], _ = fill_in_passes(base, batch, "confidence")
    return rows


@torch.no_grad()
def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m grpo.experiments.text")
    add = parser.add_argument
    add("runs", nargs="+", help="folders of runs; those joined by commas are averaged")
    add("--judge", required=True, help="a judge that no run was trained with")
    add("--half", choices=["report", "choose"], default="report")
    add("--show", type=int, default=0, help="print so many windows of each row")
    add("--json", help="write the figures to this file")
    with exit_on_mistake("text"):
        args = parser.parse_args(arguments)
        groups = [group.split(",") for group in args.runs]
        first = Config(**training_state(Path(groups[0][0]) / LATEST)["config"])
        if first.masking != "short":
            raise Mistake(f"{groups[0][0]} doesn't hide one short word (--masking=short)")
        T = first.block_size
        config = Config(
            generator_checkpoint=first.generator_checkpoint, judge_checkpoint="", block_size=T
        )
        train, val = read_splits("text" if args.half == "report" else "text_choose", T)
        held_out, copies = every_word(train, val, T)
        models = load_models(config, CPU)
        other = load_judge(args.judge, config, CPU)
        own = load_judge(first.judge_checkpoint, config, CPU)
        judges = {"other": other} | ({"own": own} if own else {})
        table = {}
        for title, completions in rows_of_base(models.base, held_out, own).items():
            table[title] = measure(completions, held_out, copies, models.base, judges)
            show(title, completions, held_out, args.show)
        for group in groups:
            found = {"sampled": [], "argmax": []}
            for folder in group:
                path = Path(folder) / LATEST
                load_weights(models.policy.network, read(path)["weights"], path)
                q = models.policy(held_out.batch)
                found["sampled"].append(q.sample().completions[:, :DRAWN])
                found["argmax"].append(q.best_guess()[:, None])
            file = training_state(Path(group[0]) / LATEST)["config"]["judge_checkpoint"]
            own = load_judge(file, config, CPU)
            judges = {"other": other} | ({"own": own} if own else {})
            for kind, parts in found.items():
                completions = torch.cat(parts, dim=1)  # (N,n,T) of all runs of the group
                title = f"{group[0]} (runs: {len(group)}), {kind}"
                table[title] = measure(completions, held_out, copies, models.base, judges)
                table[title]["distance"] = (
                    mean(distance(part, held_out.batch) for part in parts),
                    0.0,
                )
                show(title, parts[0], held_out, args.show)
        columns = "exact new valid accepts fooled other chain distance".split()
        print(f"{len(copies)} words, {copies.float().mean():.2f} of them near-copies")
        print("filled by".ljust(44), *(f"{name:>12}" for name in columns))
        for title, row in table.items():
            cells = [f"{row[c][0]:.3f} ±{row[c][1]:.3f}" if c in row else "" for c in columns]
            print(title.ljust(44), *(f"{text:>12}" for text in cells))
        if args.json:
            Path(args.json).write_text(json.dumps(table, indent=1), encoding="utf-8")


def show(title: str, completions: Tensor, held_out: HeldOut, how_many: int) -> None:
    """Print a few windows, the same ones for each row: (N,n,T)."""
    if not how_many:
        return
    print(f"\n{title}")
    for i in np.random.default_rng(SEED).permutation(len(completions))[:how_many].tolist():
        print("  ", highlight(decode(completions[i, 0])[0], held_out.batch.mask[i].tolist()))


if __name__ == "__main__":
    main(sys.argv[1:])
