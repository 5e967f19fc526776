"""Ask which claims of claims.md hold for a model that writes token by token (grpo/tokens.py).

    python -m grpo.experiments.tokens_claims    # makes all that results/tokens.jsonl still lacks
    python -m grpo.experiments.compare grpo/experiments/results/tokens.jsonl

As in fair.py, each variant chooses its own β and learning rate, on numbers and with seeds that
aren't reported. Then it's reported with more seeds, on other numbers. Ways to average aren't tuned:
they have the settings of tokens.py. (The others take half as many prompts a step, because they're
so many.) All start from one base model. Each run is a line: its settings, and what came out. If you
interrupt it, the same command goes on.
"""

import copy
from functools import partial
from pathlib import Path

import torch

from grpo import tokens
from grpo.experiments.fair import choose
from grpo.run.log import append, read_lines

FILE = Path(__file__).parent / "results" / "tokens.jsonl"
HALVES = {"choose": tokens.CHOOSING, "report": tokens.HELD_OUT}
GRID = {"beta": [0.01, 0.04], "rate": [1e-3, 2e-3]}


def only_centered(rewards):
    return rewards - rewards.mean(dim=1, keepdim=True)  # (B,G)


def successes(rewards):
    return rewards  # (B,G) 1 or 0


TUNED = {
    "default": {},
    "no KL": {},  # its grid has β = 0
    "no baseline, 1/0": {"advantages": successes},
    "no deviation": {"advantages": only_centered},
    "no clip": {"clip": 1e9},
}
UNTUNED = "as the file stands"
AVERAGES = {f"average: {name}": {"average": name} for name in ("completion", "token", "constant")}


def describe(policy, numbers):
    """Measure a policy on numbers, with 16 · G completions of each."""
    texts, correct, length, entropy = tokens.evaluate(policy, numbers.repeat(16))
    lengths = tokens.completion_mask(tokens.encode(texts)).sum(dim=1).double()  # (N,)
    right = torch.tensor([tokens.is_correct(text) for text in texts])  # (N,)
    figures = {"correct": correct, "length": length, "entropy": entropy}
    return figures | {"right": lengths[right].mean().item(), "wrong": lengths[~right].mean().item()}


def run(base, variant, half, tuned, seed):
    """Make a run, unless it's in the file, and return its line."""
    line = {"arm": variant, "half": half, "tuned": tuned, "seed": seed}
    for made in read_lines(FILE):
        if made | line == made:
            return made
    policy = copy.deepcopy(base)
    size = tokens.B if variant in AVERAGES else tokens.B // 2  # prompts of a step
    settings = tuned | (TUNED | AVERAGES).get(variant, {})
    for _ in tokens.train(policy, base, seed, size, **settings):
        pass
    _, training, *_ = tokens.evaluate(policy, tokens.TRAINING)
    line |= describe(policy, HALVES[half]) | {"training": training}
    append(FILE, line)
    return line


def main():
    torch.set_num_threads(1)
    base = tokens.pretrain()

    def make(half, candidates, seeds, variant):
        return [[run(base, variant, half, c, seed) for seed in seeds] for c in candidates]

    for variant in TUNED:
        grid = GRID | {"beta": [0]} if variant == "no KL" else GRID
        tuned = choose(grid, partial(make, variant=variant))
        make("report", [tuned], range(1, 11), variant)
    make("report", [{}], range(1, 11), UNTUNED)
    for variant in AVERAGES:
        make("report", [{}], range(1, 7), variant)


if __name__ == "__main__":
    main()
