"""Ask which claims of claims.md hold for a model that writes token by token (grpo/tokens.py).

    python -m grpo.experiments.tokens_claims    # makes all that results/tokens.jsonl still lacks
    python -m grpo.experiments.compare grpo/experiments/results/tokens.jsonl

As in fair.py, each variant chooses its own β and learning rate, on numbers and with seeds that
aren't reported. Then it's reported with more seeds, on other numbers. A step has half as many
prompts as in tokens.py, because there are so many runs. All start from one base model. Each run is
a line: its settings, and what came out. If you interrupt it, the same command goes on.
"""

import copy
from functools import partial
from pathlib import Path

import torch

from data.user_mistake import Mistake, run_program
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


def run(base, variant, half, tuned, seed):
    """Make a run, unless it's in the file, and return its line."""
    line = {"arm": variant, "half": half, "tuned": tuned, "seed": seed}
    for made in read_lines(FILE):
        if made | line == made:
            return made
    policy = copy.deepcopy(base)
    settings = tuned | TUNED.get(variant, {})
    for _ in tokens.train(policy, base, seed, tokens.B // 2, **settings):
        pass
    _, correct, length, entropy = tokens.evaluate(policy, HALVES[half].repeat(16))
    line |= {"correct": correct, "length": length, "entropy": entropy}
    append(FILE, line)
    return line


def main(arguments):
    if arguments:
        raise Mistake("it takes no words: python -m grpo.experiments.tokens_claims")
    torch.set_num_threads(1)
    base = tokens.pretrain()

    def make(half, candidates, seeds, variant):
        return [[run(base, variant, half, c, seed) for seed in seeds] for c in candidates]

    for variant in TUNED:
        grid = GRID | {"beta": [0]} if variant == "no KL" else GRID
        tuned = choose(grid, partial(make, variant=variant))
        make("report", [tuned], range(1, 11), variant)
    make("report", [{}], range(1, 11), UNTUNED)


if __name__ == "__main__":
    run_program(main, __doc__)
