"""Measure a variant of GRPO fairly: tuned on its own, over several seeds, on sums.

    python -m grpo.experiments.fair out-none config/rule.py --baseline=none --scale_rewards=none
    python -m grpo.experiments.fair out-no-kl config/rule.py --grid kl_beta=0
    python -m grpo.experiments.fair out-q supervised any --power=1 --grid rate=1e-3,2e-3,4e-3

Of held-out sums, half are for choosing settings and half for reporting. Each candidate of the grid
(by default four values of β times three learning rates) gets a run with a seed that isn't reported,
on the half for choosing. If the best one sits at an edge of the grid, the grid grows by one value
there. The best three get a second seed. Then the winner gets the seeds that are reported, on the
other half. That's 25 runs: at half a minute each, a quarter of an hour.

Each run has a folder of its own and is made only once, so you can interrupt this and give the same
command again. runs.jsonl has a line for each run, the choosing ones too.
grpo/experiments/claims.md has what came of many variants.
"""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from tqdm import tqdm

from data.files import PROJECT, shipped_path
from data.user_mistake import Mistake, exit_on_mistake
from grpo.evaluation import exact
from grpo.experiments import supervised
from grpo.run.checkpoint import LATEST, write
from grpo.run.config import Config, Parser, load_config
from grpo.run.load import load_generator
from grpo.run.origin import differences, made_with
from grpo.truncation import truncates

CHOOSING = 101, 102  # the seeds that choose
FINALISTS = 3
DATASETS = {"choose": "sums_choose", "report": "sums"}
GRID = {
    "grpo": {"kl_beta": [0.01, 0.02, 0.05, 0.1], "learning_rate": [5e-4, 1e-3, 2e-3]},
    "supervised": {"rate": [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]},
}
TEACHING = "grpo/experiments/supervised.py", "model/pretrain.py", "model/losses.py"
K = [2**i for i in range(13)]  # of pass@k
LOST = 1e-6  # with less than this for all correct answers together, an input is lost


class Variant:
    """A variant, its candidates, and its runs: each is a half, a candidate and a seed."""

    def __init__(self, folder: Path, words: list[str]):
        self.folder = folder
        self.kind = "supervised" if words[0] == "supervised" else "grpo"
        self.words = words  # of the command line
        if self.kind == "supervised":
            # what it's made with besides: the student, and the reward of its answers
            words = [word.replace("--start=", "--generator_checkpoint=") for word in words]
            ours = "--generator_checkpoint=", "--reward="
            self.config = load_config([word for word in words if word.startswith(ours)])
            self.made_with = made_with(self.config, TEACHING)
        else:
            self.config = load_config(words)
            self.made_with = made_with(self.config)

    def command(self, half: str, candidate: dict, seed: int) -> list[str]:
        """Write the command of a run."""
        out_dir = self.folder_of(half, candidate, seed)
        flags = [f"--{name}={value:g}" for name, value in candidate.items()] + [f"--seed={seed}"]
        if self.kind == "supervised":
            _, answers, *others = self.words
            return ["-m", "grpo.experiments.supervised", answers, str(out_dir), *others, *flags]
        flags += [f"--dataset={DATASETS[half]}", f"--out_dir={out_dir}"]
        return [str(shipped_path("train_grpo.py")), *self.words, *flags]

    def folder_of(self, half: str, candidate: dict, seed: int) -> Path:
        return self.folder / "-".join([half, *(f"{x:g}" for x in candidate.values()), str(seed)])

    def run(self, half: str, candidate: dict, seed: int) -> dict:
        """Make a run, unless it's there, and sum it up. One that diverges has no `correct`."""
        out_dir = self.folder_of(half, candidate, seed)
        line = out_dir / "summary.json"
        if not line.exists():
            command = [sys.executable, *self.command(half, candidate, seed)]
            # it finds the project from any folder, and computes on one thread
            environment = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            summary = {"half": half, "tuned": candidate, "seed": seed}
            if done.returncode == 0:
                summary |= self.describe(out_dir, half)
            elif "FloatingPointError" not in done.stderr:
                raise Mistake(f"{' '.join(command[1:])} failed: {done.stderr.strip()}")
            write(line, json.dumps(summary).encode())
        return json.loads(line.read_bytes())

    @torch.no_grad()
    def describe(self, out_dir: Path, half: str) -> dict:
        """Sum a run up: exact figures, pass@k, and what's lost."""
        file = out_dir / ("generator.pt" if self.kind == "supervised" else LATEST)
        config = Config(dataset=DATASETS[half], reward="correct", judge_checkpoint="")
        models, _, held_out = load_generator(file, config)
        q = models.policy(held_out.batch)
        shares = exact.probabilities(q, held_out.answers)  # N times (answers,)
        p = torch.stack([each.sum() for each in shares]).clamp(max=1)  # (N,)
        return {
            **exact.figures(shares, held_out.batch.mask),
            "pass": [(1 - (1 - p) ** k).mean().item() for k in K],
            "lost": (p < LOST).double().mean().item(),
        }


def score(runs: list[dict]) -> float:
    """Return what's correct on average. A run that diverged counts as -1."""
    return mean(run.get("correct", -1.0) for run in runs)


def choose(grid: dict[str, list[float]], make) -> dict[str, float]:
    """Return the candidate with the most correct on the half for choosing.

    make(half, candidates, seeds) makes runs, and returns a list of them for each candidate.
    """
    first, second = CHOOSING
    names = [*grid]
    candidates = [dict(zip(names, values)) for values in product(*grid.values())]
    found = [(score(runs), c) for runs, c in zip(make("choose", candidates, [first]), candidates)]
    if len(found) > 1:
        best = max(found, key=lambda pair: pair[0])[1]
        more = [best | {name: x} for name in names for x in beyond(grid[name], best[name])]
        found += [(score(runs), c) for runs, c in zip(make("choose", more, [first]), more)]
        finalists = [c for _, c in sorted(found, key=lambda pair: -pair[0])[:FINALISTS]]
        both = make("choose", finalists, [first, second])
        found = [(score(runs), c) for runs, c in zip(both, finalists)]
    return max(found, key=lambda pair: pair[0])[1]


def beyond(values: list[float], best: float) -> list[float]:
    """Return the value beyond the edge of a grid if the best one is at it."""
    values = sorted(values)
    if len(values) < 2 or not 0 < best:
        return []
    if best == values[-1]:
        return [best * best / values[-2]]
    return [best * best / values[1]] if best == values[0] else []


def check(args, variant: Variant, grid: dict[str, list[float]]) -> None:
    """Raise a Mistake if a run would, or if the folder holds anything else. Else open it."""
    ours = {*grid, "seed", "dataset", "out_dir"}
    for word in args.words:
        if word.startswith("--") and word[2:].partition("=")[0] in ours:
            raise Mistake(f"fair sets {word.partition('=')[0]} itself; see --grid and --seeds")
    if {*CHOOSING} & {*args.seeds}:
        raise Mistake(f"seeds {CHOOSING} choose, so they can't be reported; leave them out")
    for name, values in grid.items():
        for value in values:
            words = [*args.words, f"--{name}={value:g}"]
            if variant.kind == "grpo":
                load_config(words)
            else:
                _, answers, *flags = words
                supervised.read([answers, "out", *flags])
    if variant.kind == "grpo":
        if variant.config.dataset != "sums" or truncates(variant.config):
            raise Mistake("fair is for sums without a truncation, whose figures are exact")
    folder = Path(args.out_dir)
    opened = folder / "fair.json"
    now = {"words": args.words, "settings": asdict(variant.config), "made_with": variant.made_with}
    if opened.exists():
        then = json.loads(opened.read_bytes())
        changed = differences(then["made_with"], now["made_with"])
        if (then["words"], then["settings"]) != (now["words"], now["settings"]):
            changed = ["other settings", *changed]
        if changed:
            raise Mistake(f"out_dir={folder} has runs made with {', '.join(changed)}; name another")
    elif folder.exists():
        raise Mistake(f"out_dir={folder} holds something else; name another folder")
    write(opened, json.dumps(now).encode())


def read_grid(given: list[str], kind: str) -> dict[str, list[float]]:
    """Read NAME=VALUE,VALUE,... of each --grid, which replaces or joins the default grid."""
    grid = dict(GRID[kind])
    for text in given:
        name, _, values = text.partition("=")
        try:
            grid[name] = [float(value) for value in values.split(",")]
        except ValueError:
            raise Mistake(f"--grid {text} isn't NAME=VALUE,VALUE,...; change it") from None
    return grid


def whole_numbers(text: str) -> list[int]:
    """Read 1,2,5 or 1-10. Raises a ValueError if that's none."""
    first, dash, last = text.partition("-")
    numbers = [*range(int(first), int(last) + 1)] if dash else [int(x) for x in text.split(",")]
    if not numbers:
        raise ValueError
    return numbers


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m grpo.experiments.fair", allow_abbrev=False, epilog=__doc__)
    add = parser.add_argument
    add("out_dir", help="the folder of this variant; config files and flags of a run follow")
    add("--grid", action="append", default=[], help="a setting and its values: kl_beta=0.05,0.1")
    add("--seeds", type=whole_numbers, default=[*range(1, 11)], help="to report: 1,2,5 or 1-10")
    with exit_on_mistake("fair"):
        args, args.words = parser.parse_known_args(arguments)
        if not args.words:
            raise Mistake("name a config, or `supervised` and what it learns")
        variant = Variant(Path(args.out_dir), args.words)
        grid = read_grid(args.grid, variant.kind)
        check(args, variant, grid)
        made = {}
        planned = math.prod(map(len, grid.values())) + FINALISTS + len(args.seeds)
        bar = tqdm(desc="fair", total=planned, dynamic_ncols=True)

        def make(half, candidates, seeds):
            return [[one(half, c, seed) for seed in seeds] for c in candidates]

        def one(half, candidate, seed):
            key = str((half, candidate, seed))
            if key not in made:
                run = made[key] = variant.run(half, candidate, seed)
                bar.update()
                tuned = " ".join(f"{name}={value:g}" for name, value in candidate.items())
                share = f"{run['correct']:.3f}" if "correct" in run else "diverged"
                bar.write(f"{half} {tuned} seed {seed}: {share}")
            return made[key]

        try:
            tuned = choose(grid, make)
            (runs,) = make("report", [tuned], args.seeds)
        except KeyboardInterrupt:
            bar.write("stopped; the same command goes on from here", sys.stderr)
            raise
        bar.close()
        content = "".join(json.dumps(run) + "\n" for run in made.values())
        write(Path(args.out_dir, "runs.jsonl"), content.encode())
        correct = [run["correct"] for run in runs]
        chosen = ", ".join(f"{name}={value:g}" for name, value in tuned.items())
        print(f"{chosen}: correct {mean(correct):.3f} ({min(correct):.3f} to {max(correct):.3f})")


if __name__ == "__main__":
    main(sys.argv[1:])
