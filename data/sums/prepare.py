"""Write sums such as `41+47=88` into train.txt and val.txt, one in a line.

    python -m data.sums.prepare
    python -m data.sums.prepare --digits=2 --held_out=choose --out_dir=data/sums2

We hold out results, not pairs of summands: a result in val.txt never occurs in train.txt. The
held-out results come in two halves, one to choose settings with and one to report on. `--held_out`
says which of them goes into val.txt. Neither is ever in train.txt.
"""

import argparse
from pathlib import Path

import numpy as np

from data.files import write_whole
from data.user_mistake import Mistake, exit_on_mistake

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


def prepare(out_dir: str | Path, digits: int = 3, held_out: str = "report") -> None:
    """Write train.txt and val.txt into `out_dir`. Raises a Mistake if it holds other sums.

    A kill leaves both files or no dataset. train.txt goes last, and a val.txt without it is what a
    killed program left behind.
    """
    split = split_results(digits)
    train = draw_sums(split["train"], digits, TRAIN, seed=1)
    val = draw_sums(split[held_out], digits, VAL, seed=2)
    train_file, val_file = (Path(out_dir, f"{name}.txt") for name in ("train", "val"))
    files = {val_file: val, train_file: train}
    files = {file: "\n".join([*lines, ""]).encode() for file, lines in files.items()}
    for file, content in files.items():
        if train_file.exists() and file.exists() and file.read_bytes() != content:
            raise Mistake(f"{file} holds other data; remove it, or name another --out_dir")
    for file, content in files.items():
        write_whole(file, content)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, description="Write a dataset of sums."
    )
    add = parser.add_argument
    add("--digits", type=int, choices=(2, 3), default=3, help="digits of each number")
    add(
        "--held_out",
        choices=("choose", "report"),
        default="report",
        help="the held-out results of val.txt",
    )
    add("--out_dir", help="the folder to write to; default: data/sums, or data/sums2 for 2 digits")
    args = parser.parse_args(argv)
    name = "sums" if args.digits == 3 else "sums2"
    out_dir = args.out_dir or Path(__file__).parents[1] / name
    with exit_on_mistake("prepare"):
        prepare(out_dir, args.digits, args.held_out)
        print(f"{out_dir} holds {TRAIN:,} sums to train on and {VAL:,} held-out ones")


if __name__ == "__main__":
    main()
