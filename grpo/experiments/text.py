"""Measure runs on text: every short word of the report half once, with several referees.

    python -m grpo.experiments.text out-q/generator.pt out-text-1,out-text-2 --judge=FILE.pt

Runs, or generators that `supervised` made, are joined by commas to make one row. ± is a 95%
interval over blocks of the text, because words of one paragraph aren't independent, and over the
runs of the row. `--judge` is a second one, which runs that were trained with it leave out.
`--half=choose` measures on the other half, where settings are chosen. The columns:

    exact     the share of words that came back
    new       the same, without near-copies: words that stand in the training text with the same
              eight characters on both sides
    valid     the share that are words of the training text, and no e those of them without an e
    accepts   by the run's own judge, and `fooled` of what isn't valid; `other` is fooled by --judge
    chain     log p when the base model reads blank by blank
    distance  between the frequencies of words written and of those that were there
    words     how many different ones are written

Data, base model and judge are those of config/text.py (its chain_checkpoint is the base model).
Each row comes sampled, with each blank's best guess (argmax), with the likeliest word of a list
(those of the training text, or those without an e) and, with --best, as the best of 16 draws by the
judge, which takes minutes. Best guesses, and those of the list, have another line: how much more
they have than the base model's, or than those of the rows that --minus names.

Shapes: N words, n completions of each, T characters.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset, read_splits
from data.files import PROJECT
from data.masking import SHORT
from data.rules import check
from data.user_mistake import Mistake, run_program
from data.vocabulary import PAD, decode, encode
from grpo.batch import Batch, make_batch
from grpo.evaluation.evaluate import distance
from grpo.evaluation.rivals import best_by_judge, fill_in_passes, fill_with_common_words
from grpo.experiments.compare import interval
from grpo.experiments.rewards import without_e
from grpo.policy import Product
from grpo.reward import chain, exact, judge_scores
from grpo.run.arguments import read_arguments
from grpo.run.checkpoint import load_weights, read, write
from grpo.run.config import Config, checkpoints, load_config
from grpo.run.load import SAMPLES, HeldOut, load_judge, load_models

SEED = 2**31 + 5  # begins the seeds here, so that no training draws the same random numbers
BLOCKS = 24
AROUND = 8  # characters on both sides that make a near-copy
COLUMNS = "exact,new,valid,no e,accepts,fooled,other,chain,distance,words".split(",")
CPU = torch.device("cpu")


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
        "no e": without_e(completions, batch).mean(dim=1),
        "chain": chain(reader, completions, batch).mean(dim=1),
    }
    for name, judge in judges.items():
        accepted = (judge_scores(judge, completions, batch) > 0).float()  # (N,n)
        if name == "own":
            shares["accepts"] = accepted.mean(dim=1)
        if (~good).sum() >= 100:
            shares["fooled" if name == "own" else "other"] = accepted[~good]
    written = completions.where(batch.mask[:, None], PAD).flatten(0, 1)  # (N·n,T)
    words = {text.strip("\0") for text in decode(written)}
    figures = {name: blocks(x) for name, x in shares.items()}
    return figures | {"distance": [distance(completions, batch)], "words": [len(words)]}


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


def pooled(runs: list[dict]) -> dict:
    """Average runs, block by block."""
    common = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: [mean(block) for block in zip(*(run[name] for run in runs))] for name in common}


def minus(run: dict, other: dict) -> dict:
    """Subtract the figures of `other`, block by block."""
    both = [name for name in run if name in other and name not in ("fooled", "other")]
    return {name: [a - b for a, b in zip(run[name], other[name])] for name in both}


@dataclass
class Settings:
    judge: str = ""  # another judge than a run's own
    half: Literal["val", "choose"] = "val"
    best: bool = False  # add the best of 16 draws by the judge
    minus: str = ""  # subtract the figures of these rows, too, joined by commas
    json: str = ""  # write the figures to this file


def listed(q: Product, batch: Batch, words: list[str]) -> Tensor:  # (N,1,T)
    """Fill in the word of a list that has the largest Σ log q, in one pass."""
    log_q = q.log_marginals()  # (N,T,V)
    filled = batch.masked.clone()  # (N,T)
    for length in SHORT:
        rows = batch.mask & (batch.mask.sum(dim=1) == length)[:, None]  # (N,T)
        fitting = "".join(word for word in words if len(word) == length)
        letters = encode(fitting).view(-1, length)  # (W,length)
        at_blanks = log_q[rows].view(-1, length, log_q.shape[-1])  # (n,length,V)
        scores = at_blanks[:, torch.arange(length), letters].sum(dim=-1)  # (n,W)
        filled[rows] = letters[scores.argmax(dim=1)].flatten()
    return filled[:, None]


def ways(q: Product, held_out: HeldOut, judge) -> dict[str, Tensor]:  # each (N,1,T)
    """Fill in the words in one pass: drawn, guessed, from a list, and, by a judge, best of 16."""
    batch, words = held_out.batch, [*held_out.rule.lexicon]
    drawn = q.sample(batch).completions  # (N,16,T)
    found = {"sampled": drawn[:, :1], "argmax": q.best_guess()[:, None]}
    found["listed"] = listed(q, batch, words)
    found["listed, no e"] = listed(q, batch, [word for word in words if "e" not in word])
    if judge:
        found["best of 16"] = best_by_judge(q, drawn, judge_scores(judge, drawn, batch))
    return found


class Measured:
    """The figures of each row, every one of them {column: a number a block} of a run."""

    def __init__(self, args: Settings, config: Config):
        self.args, self.config = args, config
        train, val = read_splits("text", args.half, config.block_size)
        self.held_out, self.copies = every_word(train, val, config.block_size)
        self.models = load_models(config, CPU)
        vocab_size = self.models.base.network.vocab_size
        self.judge = cache(lambda path: load_judge(path, config, CPU, vocab_size))
        self.figures, self.settings = {}, {}

    def add(self, title: str, completions: Tensor, judge: str) -> None:
        judges = {"own": self.judge(judge)} if judge else {}
        if judge != self.args.judge:
            judges["other"] = self.judge(self.args.judge)
        found = measure(completions, self.held_out, self.copies, self.models.reader, judges)
        self.figures.setdefault(title, []).append(found)

    def add_references(self) -> None:
        batch, lexicon = self.held_out.batch, self.held_out.rule.lexicon
        self.add("the truth", batch.tokens[:, None], self.config.judge_checkpoint)
        self.add("common words", fill_with_common_words(batch, lexicon), "")
        no_e = Counter({word: n for word, n in lexicon.items() if "e" not in word})
        self.add("common words, no e", fill_with_common_words(batch, no_e), "")
        one_by_one, _ = fill_in_passes(self.models.reader, batch, "confidence")
        self.add("one blank a pass", one_by_one, self.config.judge_checkpoint)

    def add_row(self, row: str) -> None:
        """Measure the runs or generators that a row names, joined by commas."""
        masked = self.held_out.batch.masked
        for path in row.split(","):
            content = read(path)
            load_weights(self.models.policy.network, content["weights"], path)
            settings = content["training"]["config"] if "training" in content else {}
            self.settings[path] = settings
            judge = settings.get("judge_checkpoint", self.config.judge_checkpoint)
            picks = self.judge(judge) if self.args.best else None
            for way, filled in ways(self.models.policy(masked), self.held_out, picks).items():
                self.add(f"{row}, {way}", filled, judge)

    def table(self, rows: list[str], base: str) -> dict[str, dict[str, tuple[float, float]]]:
        """Average each row, and what it has more than others, by best guesses or by the list."""
        table = {title: summary(runs) for title, runs in self.figures.items()}
        for row in rows:
            for other in {base, *self.args.minus.split(",")} - {row, ""}:
                for way in ("argmax", "listed"):
                    before = pooled(self.figures[f"{other}, {way}"])
                    gained = [minus(run, before) for run in self.figures[f"{row}, {way}"]]
                    table[f"{row}, {way}, minus {other}"] = summary(gained)
        return table


@torch.no_grad()
def main(arguments: list[str]) -> None:
    given, rows = read_arguments(Settings, arguments, __doc__)
    args = Settings(**given)
    if not rows or not args.judge:
        raise Mistake("name runs or generators, and another judge with --judge=FILE.pt")
    for other in args.minus.split(","):
        if other and other not in rows:
            raise Mistake(f"minus={other} isn't one of the rows; name one as the command does")
    for path in ",".join(rows).split(","):
        read(path)  # raises now, not in some minutes, if it can't be used
    config = load_config(["config/text.py"])
    shipped = filter(None, checkpoints(config))
    base = config.chain_checkpoint or config.generator_checkpoint
    measured = Measured(args, replace(config, generator_checkpoint=base))
    measured.add_references()
    for row in [base, *rows]:
        measured.add_row(row)
    table = measured.table(rows, base)
    copies = measured.copies
    print(f"{len(copies)} words, {copies.float().mean():.2f} of them near-copies")
    print(*(f"{column:>14}" for column in COLUMNS))
    for title, row in table.items():
        cells = [f"{row[c][0]:.3f} ±{row[c][1]:.3f}" if c in row else "" for c in COLUMNS]
        print(title)
        print(*(f"{text:>14}" for text in cells))
    if args.json:
        files = {name: hashlib.sha256((PROJECT / name).read_bytes()) for name in shipped}
        weights = {name: digest.hexdigest()[:12] for name, digest in files.items()}
        content = {"rows": rows, "table": table, "settings": measured.settings, "weights": weights}
        write(args.json, json.dumps(content, indent=1).encode())


if __name__ == "__main__":
    run_program(main)
