"""Write sums such as `41+47=88` into train.txt and val.txt, one in a line.

    python -m data.sums.prepare
    python -m data.sums.prepare --digits=2 --held_out=choose --out_dir=data/sums2

We hold out results, and not pairs of summands: a result of val.txt never occurs in train.txt. The
held-out results have two halves. One is for choosing settings, the other for reporting what they
reach. `--held_out` says which of them val.txt holds, and no half is ever in train.txt.
"""

import argparse
from pathlib import Path

import numpy as np

from data.files import write_whole
from data.user_mistake import Mistake, exit_on_mistake, refuse

DIGITS = 3
TRAIN, VAL = 200_000, 4_000  # lines
HALVES = ("choose", "report")


def split_results(digits):
    """Decide which results are for what: -> {"train": [...], "choose": [...], "report": [...]}.

    Of two digits there are 80 results, from 20 to 99, and of three digits 800. Each half that is
    held out has one in eight of them, or one in twenty, and equally many for each last digit.
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


def draw_sums(results, digits, size, seed):
    """Draw sums as texts: the result uniformly, then the first summand from what is possible."""
    rng = np.random.default_rng(seed)
    least = 10 ** (digits - 1)
    result = rng.choice(results, size)  # (size,)
    first = rng.integers(least, result - least + 1)  # (size,)
    return [f"{a}+{c - a}={c}" for a, c in zip(first, result)]


def prepare(out_dir, digits=DIGITS, held_out="report"):
    """Write train.txt and val.txt into `out_dir`: -> {file: its number of lines}.

    Raises a Mistake if the folder cannot be written, or holds other sums.
    """
    split = split_results(digits)
    files = {
        "train.txt": draw_sums(split["train"], digits, TRAIN, seed=1),
        "val.txt": draw_sums(split[held_out], digits, VAL, seed=2),
    }
    contents = {Path(out_dir) / f: ("\n".join(files[f]) + "\n").encode() for f in files}
    try:
        for path, content in contents.items():
            refuse(
                path.exists() and path.read_bytes() != content,
                f"{path} holds other sums; remove it, or name another folder with --out_dir",
            )
        for path, content in contents.items():
            write_whole(path, content)
    except OSError as error:
        raise Mistake(f"{out_dir} cannot be written ({error}); name another folder") from None
    return {name: len(lines) for name, lines in files.items()}


def main(argv=None):
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--digits", type=int, choices=(2, 3), default=DIGITS, help="digits of each number")
    add("--held_out", choices=HALVES, default="report", help="the held-out results of val.txt")
    add("--out_dir", default=Path(__file__).parent, help="folder to write to; default: this one")
    args = parser.parse_args(argv)
    with exit_on_mistake("prepare"):
        print(prepare(args.out_dir, args.digits, args.held_out))


if __name__ == "__main__":
    main()
