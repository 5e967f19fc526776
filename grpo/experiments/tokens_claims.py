"""Ask which claims of claims.md hold for a model that writes token by token (grpo/tokens.py).

    python -m grpo.experiments.tokens_claims runs      # all that results/tokens.jsonl still lacks
    python -m grpo.experiments.tokens_claims curves    # what it has, averaged over seeds
    python -m grpo.experiments.compare grpo/experiments/results/tokens.jsonl

As in fair.py, each variant chooses its own β and learning rate, on numbers and with seeds that
aren't reported. Then it's reported with more seeds, on other numbers. Ways to average aren't tuned:
they have the settings of tokens.py. (The others take half as many prompts a step, because they're
so many.) All start from one base model. Each run is a line: its settings, and what came out. If you
interrupt it, the same command goes on.
"""

import copy
import json
import sys
from functools import partial
from pathlib import Path
from statistics import mean

import torch

from grpo import tokens
from grpo.experiments.fair import choose
from grpo.experiments.figures import reported

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
UNTUNED = {"as the file stands": {}}
AVERAGES = {f"average: {name}": {"average": name} for name in ("completion", "token", "constant")}


def describe(policy, numbers, times):
    """Measure a policy on numbers, with times · G completions of each."""
    texts, correct, length, entropy = tokens.evaluate(policy, numbers.repeat(times))
    lengths = tokens.completion_mask(tokens.encode(texts)).sum(dim=1).double()  # (N,)
    right = torch.tensor([tokens.is_correct(text) for text in texts])  # (N,)
    figures = {"correct": correct, "length": length, "entropy": entropy}
    for name, some in ("right", lengths[right]), ("wrong", lengths[~right]):
        figures[name] = some.mean().nan_to_num().item()  # 0 if there are none
    return {name: round(value, 4) for name, value in figures.items()}


def run(base, variant, half, tuned, seed):
    """Make a run, unless it's in the file, and return its line."""
    size = tokens.B if variant in AVERAGES else tokens.B // 2  # prompts of a step
    line = {"arm": variant, "half": half, "size": size, "tuned": tuned, "seed": seed}
    for made in read():
        if made | line == made:
            return made
    policy, numbers = copy.deepcopy(base), HALVES[half]
    curve = []  # at steps 0, 20, ...
    for step in tokens.train(
        policy, base, seed, size, **tuned, **(TUNED | UNTUNED | AVERAGES)[variant]
    ):
        if half == "report" and step % 20 == 0:
            curve.append(describe(policy, numbers, 4))
    line |= describe(policy, numbers, 16)
    line["training"] = describe(policy, tokens.TRAINING, 1)["correct"]
    if curve:
        line["curve"] = curve
    with FILE.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return line


def read():
    return [json.loads(text) for text in FILE.read_text().splitlines()] if FILE.exists() else []


def make_runs():
    torch.set_num_threads(1)
    base = tokens.pretrain()
    for last in 5, 10, 15:  # seeds, so that all have five before one has more

        def make(half, candidates, seeds, variant):
            return [[run(base, variant, half, c, seed) for seed in seeds] for c in candidates]

        for variant in TUNED:
            grid = GRID | {"beta": [0]} if variant == "no KL" else GRID
            tuned = choose(grid, partial(make, variant=variant))
            make("report", [tuned], range(1, last + 1), variant)
        make("report", [{}], range(1, last + 1), *UNTUNED)
        for variant in AVERAGES:
            make("report", [{}], range(1, 4 if last == 5 else 7), variant)


def print_curves():
    for arm, lines in reported("tokens").items():
        print(arm)
        for i, points in enumerate(zip(*(line["curve"] for line in lines))):
            print(
                "step", 20 * i, {name: mean(point[name] for point in points) for name in points[0]}
            )


if __name__ == "__main__":
    {"runs": make_runs, "curves": print_curves}[sys.argv[1]]()
