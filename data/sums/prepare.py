"""Write sums such as `41+47=88` into train.txt, choose.txt and val.txt, one in a line.

A run makes the datasets that ship if they're missing. We hold out results, not pairs of summands: a
held-out result never occurs in train.txt. They come in two halves: choose.txt has the one to choose
settings with, and val.txt the one to report on.
"""

from pathlib import Path

import numpy as np

from data.files import write_whole

TRAIN, VAL = 200_000, 4_000  # lines


def split_results(digits: int) -> dict[str, list[int]]:
    """Decide which results are for what: {"train": [...], "choose": [...], "report": [...]}.

    With two digits there are 80 results, from 20 to 99, and with three there are 800. Each of the
    held-out halves gets one in eight of them, or one in twenty, equally many for each last digit.
    """
    least = 10 ** (digits - 1)
    results = np.arange(2 * least, 10 * least)
    n = 1 if digits == 2 else 4  # in each half, of each last digit
    rng = np.random.default_rng(0)
    split = {"train": [], "choose": [], "report": []}
    for last in range(10):
        shuffled = rng.permutation(results[results % 10 == last])
        split["choose"] += shuffled[:n].tolist()
        split["report"] += shuffled[n : 2 * n].tolist()
        split["train"] += shuffled[2 * n :].tolist()
    return {name: sorted(part) for name, part in split.items()}


def draw_sums(results: list[int], digits: int, size: int, seed: int) -> list[str]:
    """Draw sums as texts: the result uniformly, then the first summand from what's possible."""
    rng = np.random.default_rng(seed)
    least = 10 ** (digits - 1)
    result = rng.choice(results, size)  # (size,)
    first = rng.integers(least, result - least + 1)  # (size,)
    return [f"{a}+{c - a}={c}" for a, c in zip(first, result)]


def prepare(out_dir: str | Path, digits: int) -> None:
    """Write choose.txt, val.txt and train.txt into `out_dir`.

    train.txt goes last. Without it there's no dataset, so a kill can't leave half of one.
    """
    split = split_results(digits)
    files = ("choose", "choose", VAL, 2), ("val", "report", VAL, 2), ("train", "train", TRAIN, 1)
    for name, part, size, seed in files:
        lines = draw_sums(split[part], digits, size, seed)
        write_whole(Path(out_dir, f"{name}.txt"), "\n".join([*lines, ""]).encode())
