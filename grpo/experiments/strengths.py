"""Which verdicts flip with the base model? Six claims, from seven base models.

    python -m grpo.experiments.strengths out-strengths    # some eight hours on one core; resumable
    python -m grpo.experiments.strengths flips            # sum its results up

The base models are made by one recipe, with an eighth, a quarter, a half and all of the updates of
model/pretrained/sums.pt, and all but the last again, with another seed: their twins. Every variant
of config/rule.py is tuned from each of them by `fair` (nine pairs of beta and rate, and what's
beyond an edge) and gets five seeds (the default ten), on 12,000 held-out inputs. The runs go to
grpo/experiments/results/strengths.jsonl.

What we expected of the first four, written down before any of their runs (differences from the same
base model's tuned default, from the strongest base model to the weakest):

    no KL          -.02 to 0, and more is lost everywhere. Doesn't flip.
    no clip        -.03 to -.06. Doesn't flip.
    no deviation   -.02 to -.03. Doesn't flip.
    no baseline    equal at all four, because the best baseline is near 0 if success is rare.
    luck           -.015 to -.1: where right sums are as rare as lucky ones, it isn't a detail.
    habit          -.2 to -.1: a weaker base model has less of the habit. Luck catches up with it.

And of the twins, written down before they were tuned, but after runs with the others' settings:

    no clip        worse from all three, at 1.1 to 1.6 times as many wrong answers.
    habit          worse from all three, by .05 to .25.
    the rest       undecided, or not what the other one said.
"""

import sys
from pathlib import Path
from statistics import mean

from data.files import PROJECT
from data.user_mistake import Mistake, run_program
from grpo.experiments.compare import difference, interval, read_arms
from grpo.experiments.fair import Variant, measure, open_variant
from grpo.run.log import write_lines
from model import pretrain

RESULTS = PROJECT / "grpo/experiments/results/strengths.jsonl"
SEEDS = 5  # of a claim; the default has twice as many, because all others are compared with it
SHIPPED = "model/pretrained/sums.pt"
RECIPE = (
    "--dataset=sums --block_size=11 --n_layer=3 --n_embd=96 --batch_size=256 --judge_steps=0"
    " --masking=digits:0.5,columns:0.5 --dtype=float32"
)
BASES = {  # updates and seed
    "all": (1200, 1),
    "quarter": (300, 1),
    "eighth": (150, 1),
    "half": (600, 1),
    "twin quarter": (300, 2),
    "twin eighth": (150, 2),
    "twin half": (600, 2),
}
WEAK = "eighth", "quarter", "twin eighth", "twin quarter"  # drawn after the runs
STRONG = "half", "all", "twin half"
OWN = "grpo/experiments/rewards.py"
VARIANTS = {
    "default": "",
    "no KL": "--kl_beta=0",
    "no clip": "--clip_eps=1 --clip_eps_high=1e9",
    "no deviation": "--scale_rewards=none",
    "no baseline": "--baseline=none --scale_rewards=none",
    "luck": f"--reward={OWN}:lucky",
    "habit": f"--reward={OWN}:loose",
}
GRID = {"kl_beta": [0.01, 0.03, 0.1], "learning_rate": [5e-4, 1e-3, 2e-3]}


def base_model(folder: Path, name: str) -> str:
    """Return the file of a base model. Make it if it isn't there."""
    if name == "all":
        return SHIPPED
    updates, seed = BASES[name]
    out_dir = folder / f"base-{name}".replace(" ", "-")
    file = out_dir / "generator.pt"
    if not file.exists():
        flags = f"{RECIPE} --generator_steps={updates} --seed={seed} --out_dir={out_dir}"
        pretrain.main(flags.split())
    return str(file)


def variant_of(folder: Path, base: str, file: str, name: str) -> Variant:
    """Make a variant of config/rule.py that starts from a base model, and open its folder."""
    flags = f"config/rule.py --eval_inputs=32 --generator_checkpoint={file} {VARIANTS[name]}"
    grid = {key: values for key, values in GRID.items() if f"--{key}=" not in flags}
    variant = Variant(folder / f"{base} {name}".replace(" ", "-"), flags.split(), grid)
    open_variant(variant)
    return variant


def correct(arms: dict[str, list[dict]], base: str, name: str) -> float:
    """Average what's correct over the runs of a variant from a base model."""
    return mean(run["correct"] for run in arms[f"{base}: {name}"])


def averages(claim: str) -> tuple[list[list[float]], list[float]]:
    """Compare a claim's variant with the default, from weak and then from strong base models.

    Returns two lists of differences in what's correct, one for each base model, and two ratios:
    how many times as many answers are wrong.
    """
    arms = read_arms(RESULTS)
    effects, ratios = [], []
    for bases in (WEAK, STRONG):
        before = [correct(arms, base, "default") for base in bases]
        after = [correct(arms, base, claim) for base in bases]
        effects.append([y - x for x, y in zip(before, after)])
        ratios.append((len(bases) - sum(after)) / (len(bases) - sum(before)))
    return effects, ratios


def flips() -> None:
    """Print each claim's effect for weak and for strong base models, and whether they differ.

    A base model is a unit here: the intervals are over base models.
    """
    head = ["", "weak", "strong", "weak − strong", "times as many wrong: weak", "strong"]
    print("|", " | ".join(head), "|")
    print("|", " | ".join(["---"] * len(head)), "|")
    for claim in [*VARIANTS][1:]:
        (weak, strong), ratios = averages(claim)
        gap, half = difference(strong, weak)
        cells = [f"{mean(x):+.3f} ± {interval(x):.3f}" for x in (weak, strong)]
        cells.append(f"{gap:+.3f} ± {half:.3f}")
        cells += [f"{ratio:.2f}" for ratio in ratios]
        print("|", " | ".join([claim, *cells]), "|")


def main(arguments: list[str]) -> None:
    if arguments == ["flips"]:
        return flips()
    if not arguments or arguments[0] in BASES or not {*arguments[1:]} <= {*BASES}:
        raise Mistake(f"name a folder for the runs, and, if not all, some of {', '.join(BASES)}")
    folder, bases = Path(arguments[0]), arguments[1:] or [*BASES]
    lines = []
    for base in bases:
        file = base_model(folder, base)
        for name in VARIANTS:
            variant = variant_of(folder, base, file, name)
            if name == "default":
                before = variant.describe(file, "report")
                lines.append({"base": base, "arm": "base model", "half": "before", **before})
            seeds = 2 * SEEDS if name == "default" else SEEDS
            runs = measure(variant, [*range(1, seeds + 1)])
            lines += [{"base": base, "arm": name, **run} for run in runs]
            values = [run["correct"] for run in runs if run["half"] == "report"]
            row = f"{base:14} {name:13} {mean(values):.3f} ± {interval(values):.3f}"
            print(row, file=sys.stderr, flush=True)
    write_lines(RESULTS, lines)


if __name__ == "__main__":
    run_program(main, __doc__)
