"""Compare variants that `fair` measured: intervals of the differences, and a verdict on each.

    python -m grpo.experiments.compare out-default out-none out-no-kl    # folders of `fair`
    python -m grpo.experiments.compare grpo/experiments/results/ladder.jsonl

The first one is the reference, or the first one of each base model. Every other one has Welch's
interval of its difference (Biometrika 34, 1947), with 95% confidence, and a verdict:

    equal          the interval lies within ±.03
    worse, better  it excludes 0, and the difference is more than .02: one tuning can be off by that
    undecided      otherwise
"""

from pathlib import Path
from statistics import NormalDist, mean, variance

from data.user_mistake import Mistake, run_program
from grpo.run.log import read_lines

EQUAL = 0.03
TUNING = 0.02


def student(df: float) -> float:
    """Return the two-sided 95% quantile of Student's t, by the expansion of Cornish and Fisher.

    At 2 degrees of freedom, three runs, it's .75% too small, and at 1 degree 11%. With more it's
    closer.
    """
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / df + second / df**2 + third / df**3 + fourth / df**4


def interval(values: list[float]) -> float:
    """Return half the width of the interval of the mean of two or more values."""
    n = len(values)
    return student(n - 1) * (variance(values) / n) ** 0.5


def difference(a: list[float], b: list[float]) -> tuple[float, float]:
    """Return mean(b) − mean(a), and half the width of Welch's interval."""
    spread = variance(a) / len(a), variance(b) / len(b)
    total = sum(spread)
    parts = sum(s**2 / (len(x) - 1) for s, x in zip(spread, (a, b)))
    df = total**2 / parts if parts else 1.0  # if no value differs, so does no interval
    return mean(b) - mean(a), student(df) * total**0.5


def verdict(a: list[float], b: list[float]) -> str:
    """Say whether b is equal to a, worse, better, or whether it's undecided."""
    found, half = difference(a, b)
    if abs(found) + half < EQUAL:
        return "equal"
    if abs(found) > max(half, TUNING):
        return "better" if found > 0 else "worse"
    return "undecided"


def read_arms(path: str) -> dict[str, list[dict]]:
    """Read a folder of `fair`, or a file of several: -> {name: the runs that are reported}.

    If its lines name a base model, the name is "base model: variant".
    """
    file = Path(path)
    file = file / "runs.jsonl" if file.is_dir() else file
    if not file.exists():
        raise Mistake(f"there is no {file}; let `fair` finish, or name another")
    arms = {}
    for run in read_lines(file):
        if run.get("half") == "report":
            name = run.get("arm", path)
            name = f"{run['base']}: {name}" if "base" in run else name
            arms.setdefault(name, []).append(run)
    if not arms:
        raise Mistake(f"{file} has no reported run; name a folder of `fair`, or a file of its runs")
    return arms


def row(name: str, runs: list[dict], reference: list[float]) -> list[str]:
    """Make a row: the variant, its seeds, what's correct, what's lost, difference and verdict."""
    values = [run["correct"] for run in runs]
    lost = f"{mean(run['lost'] for run in runs):.3f}" if "lost" in runs[0] else ""
    if len(values) == 1:
        return [name, "1", f"{values[0]:.3f}", lost]
    cells = [name, str(len(values)), f"{mean(values):.3f} ± {interval(values):.3f}", lost]
    if values != reference and len(reference) > 1:
        found, half = difference(reference, values)
        cells.append(f"{found:+.3f} [{found - half:+.3f}, {found + half:+.3f}]")
        cells.append(verdict(reference, values))
    return cells


def main(arguments: list[str]) -> None:
    if not arguments:
        raise Mistake("name folders of `fair`, the reference first")
    arms = {}
    for path in arguments:
        arms |= read_arms(path)
    rows, base, reference = [], None, []
    for name, runs in arms.items():
        if not reference or runs[0].get("base") != base:
            base = runs[0].get("base")
            reference = [run["correct"] for run in runs]
        rows.append(row(name, runs, reference))
    head = "variant,seeds,correct,lost,difference,verdict".split(",")
    for line in [head, ["---"] * len(head), *rows]:
        print("|", " | ".join(line), "|")


if __name__ == "__main__":
    run_program(main, __doc__)
