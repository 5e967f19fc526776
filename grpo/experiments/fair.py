"""Measure a variant of GRPO fairly: tuned on its own, over several seeds, on sums.

    python -m grpo.experiments.fair out-none config/rule.py --baseline=none --scale_rewards=none
    python -m grpo.experiments.fair out-no-kl config/rule.py --kl_beta=0
    python -m grpo.experiments.fair out-q supervised any --power=1 --rate=1e-3,2e-3,4e-3

Of held-out sums, half are for choosing settings and half for reporting. A flag with several values
is a row of the grid. Each candidate (by default four values of β times three learning rates, unless
the command sets them) gets a run with a seed that isn't reported,
on the half for choosing. If the best one sits at an edge of the grid, the grid grows by one value
there. The best three get a second seed. Then the winner gets the seeds that are reported, on the
other half. That's 25 runs: at half a minute each, a quarter of an hour.

Each run has a folder of its own and is made only once, so you can interrupt this and give the same
command again. runs.jsonl has a line for each run, the choosing ones too.
grpo/experiments/claims.md has what came of many variants.
"""

import hashlib
import json
import math
import re
import shutil
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import mean

import torch
from tqdm import tqdm

import train_grpo
from data.dataset import make_if_missing
from data.files import PROJECT
from data.rules import SumRule
from data.sums.rule import correct_answers
from data.user_mistake import Mistake, run_program
from data.vocabulary import decode
from grpo.evaluation import exact
from grpo.experiments import supervised
from grpo.reward import distinct
from grpo.run.checkpoint import LATEST, write
from grpo.run.config import Config, load_config
from grpo.run.fingerprint import fingerprint
from grpo.run.load import Models, load_generator, load_rewards
from grpo.run.log import write_lines
from grpo.truncation import truncates

CPU = torch.device("cpu")
CHOOSING = 101, 102  # the seeds that choose
INPUTS = 12_000  # held-out ones that a run is measured on, some 3,600 of them different
FINALISTS = 3
HALVES = {"choose": "choose", "report": "val"}
GRID = {
    "grpo": {"kl_beta": [0.01, 0.02, 0.05, 0.1], "learning_rate": [5e-4, 1e-3, 2e-3]},
    "supervised": {"rate": [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]},
}
TEACHING = "grpo/experiments/supervised.py", "model/pretrain.py", "model/losses.py"
K = [2**i for i in range(13)]  # of pass@k
LOST = 1e-6  # with less than this for all correct answers together, an input is lost


class Variant:
    """A variant, its candidates, and its runs: each is a half, a candidate and a seed."""

    def __init__(self, folder: Path, words: list[str], grid: dict[str, list[float]]):
        self.folder, self.words, self.grid = folder, words, grid
        self.kind = "supervised" if words[0] == "supervised" else "grpo"
        if self.kind == "supervised":
            self.config, self.settings = self.supervised_settings()
        else:
            self.settings = self.config = load_config(words)

    def supervised_settings(self, **candidate) -> tuple[Config, supervised.Settings]:
        answers, flags = self.words[1:2], self.words[2:]
        flags = flags + [f"--{name}={value:g}" for name, value in candidate.items()]
        _, _, config, settings = supervised.read([*answers, "out", *flags])
        start = settings.start or config.generator_checkpoint
        return replace(config, generator_checkpoint=start), settings

    def made_by(self) -> str:
        """Hash the code and files that its runs depend on."""
        make_if_missing(self.config.dataset)
        if ".py:" in self.config.reward:  # execute it, to see what it loads
            load_rewards(self.config, Models(None, None, None, None, None), SumRule(), CPU)
        teaching = b"".join((PROJECT / path).read_bytes() for path in TEACHING)
        return f"{fingerprint(self.config)} {hashlib.sha256(teaching).hexdigest()[:12]}"

    def folder_of(self, half: str, candidate: dict, seed: int) -> Path:
        return self.folder / "-".join([half, *(f"{x:g}" for x in candidate.values()), str(seed)])

    def run(self, half: str, candidate: dict, seed: int) -> dict:
        """Make a run, unless it's there, and sum it up. One that diverges has no `correct`."""
        out_dir = self.folder_of(half, candidate, seed)
        line = out_dir / "summary.json"
        if not line.exists():
            flags = [f"--{name}={value:g}" for name, value in candidate.items()]
            flags += [f"--seed={seed}"]
            summary = {"half": half, "tuned": candidate, "seed": seed}
            try:
                if self.kind == "supervised":
                    shutil.rmtree(out_dir, ignore_errors=True)  # of a run that was stopped
                    supervised.main([self.words[1], str(out_dir), *self.words[2:], *flags])
                else:
                    flags += [f"--held_out={HALVES[half]}", f"--out_dir={out_dir}"]
                    train_grpo.main([*self.words, *flags], quiet=True)
                made = "generator.pt" if self.kind == "supervised" else LATEST
                summary |= self.describe(out_dir / made, half)
            except FloatingPointError:
                pass
            write(line, json.dumps(summary).encode())
        return json.loads(line.read_bytes())

    @torch.no_grad()
    def describe(self, file: str | Path, half: str) -> dict:
        """Sum a generator up: exact figures, pass@k, and what's lost."""
        config = replace(
            self.config,
            held_out=HALVES[half],
            eval_inputs=INPUTS,
            reward="correct",
            judge_checkpoint="",
            reference_checkpoint="",
        )
        models, _, held_out = load_generator(file, config)
        masked, which = distinct(held_out.batch.masked)  # (D,T), (N,) equal inputs count once
        answers = [correct_answers(text) for text in decode(masked)]
        different = exact.probabilities(models.policy(masked), answers)  # D times (answers,)
        shares = [different[i] for i in which.tolist()]  # N times (answers,)
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
    if len(candidates) == 1:
        return candidates[0]
    found = [(score(runs), c) for runs, c in zip(make("choose", candidates, [first]), candidates)]
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


def open_variant(variant: Variant) -> None:
    """Open the folder. Raises a Mistake if a run would, or if it holds anything else."""
    if str(variant.folder).startswith("-"):
        raise Mistake(f"{variant.folder} isn't a folder; name one before any flags, such as out")
    for name, values in variant.grid.items():
        for value in values:
            if variant.kind == "grpo":
                load_config([*variant.words, f"--{name}={value:g}"])
            else:
                variant.supervised_settings(**{name: value})
    if variant.config.dataset != "sums" or truncates(variant.config):
        raise Mistake("fair is for sums without a truncation, whose figures are exact")
    opened = variant.folder / "fair.json"
    now = {
        "words": variant.words,
        "settings": asdict(variant.settings),
        "made_by": variant.made_by(),
    }
    if opened.exists():
        then = json.loads(opened.read_bytes())
        changed = [name for name in now if then[name] != now[name]]
        if changed:
            raise Mistake(
                f"{variant.folder} has runs with other {' and '.join(changed)}; name another folder"
            )
    elif variant.folder.exists():
        raise Mistake(f"{variant.folder} holds something else; name another folder")
    write(opened, json.dumps(now).encode())


def numbers(text: str) -> list[float]:
    """Read .01,.02. Raises a Mistake if it's anything else."""
    try:
        return [float(x) for x in text.split(",")]
    except ValueError:
        raise Mistake(f"{text!r} isn't numbers such as .01,.02; change it") from None


def whole_numbers(text: str) -> list[int]:
    """Read 1,2,5 or 1-10. Raises a Mistake if it's neither."""
    first, dash, last = text.partition("-")
    try:
        if dash:
            return [*range(int(first), int(last) + 1)]
        return [int(x) for x in text.split(",")]
    except ValueError:
        raise Mistake(f"{text!r} isn't whole numbers such as 1,2,5 or 1-10; change it") from None


def read(arguments: list[str]) -> tuple[Variant, list[int]]:
    """Read the command line: -> the variant, and the seeds to report. Raises a Mistake."""
    if len(arguments) < 2:
        raise Mistake("name a folder, and a config, or `supervised` and what it learns")
    folder, *arguments = arguments
    grid = dict(GRID["supervised" if arguments[0] == "supervised" else "grpo"])
    words, seeds = [], "1-10"
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition("=")
        if name == "seeds":
            seeds = value
        elif name in ("seed", "held_out", "out_dir"):
            raise Mistake(f"fair sets {name} itself; see --seeds")
        elif argument.startswith("--") and "," in value and re.fullmatch(r"[-+.,e\d]+", value):
            grid[name] = numbers(value)
        else:
            grid.pop(name, None)  # it's fixed
            words.append(argument)
    reported = whole_numbers(seeds)
    if {*CHOOSING} & {*reported} or not reported or min(reported) < 1:
        raise Mistake(
            f"seeds={seeds}: name some from 1 on, such as 1-5, but not {CHOOSING}, which choose"
        )
    return Variant(Path(folder), words, grid), reported


def measure(variant: Variant, seeds: list[int]) -> list[dict]:
    """Choose on one half and report on the other: -> all runs, the reported ones last."""
    made = {}
    planned = math.prod(map(len, variant.grid.values())) + FINALISTS + len(seeds)
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

    make("report", [choose(variant.grid, make)], seeds)
    bar.close()
    return [*made.values()]


def report(folder: Path, arms: dict[str, str], seeds) -> list[dict]:
    """Run variants whose settings are known, {arm: command}: -> a line for each run."""
    lines = []
    for arm, command in arms.items():
        name = arm.replace(",", "").replace("'", "").replace(" ", "-")
        variant = Variant(folder / name, command.split(), {})
        open_variant(variant)
        for seed in seeds:
            lines.append({"arm": arm, "flags": command} | variant.run("report", {}, seed))
    return lines


def main(arguments: list[str]) -> None:
    variant, seeds = read(arguments)
    open_variant(variant)
    runs = measure(variant, seeds)
    write_lines(variant.folder / "runs.jsonl", runs)
    reported = [run for run in runs if run["half"] == "report"]
    correct = [run["correct"] for run in reported]
    chosen = ", ".join(f"{name}={value:g}" for name, value in reported[0]["tuned"].items())
    print(f"{chosen}: correct {mean(correct):.3f} ({min(correct):.3f} to {max(correct):.3f})")


if __name__ == "__main__":
    run_program(main, __doc__)
