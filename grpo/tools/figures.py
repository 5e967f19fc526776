"""Keep the figures behind the READMEs' tables in .github/figures.json, and print them.

    python -m grpo.tools.figures keep NAME SEED OUT  # adds the run in the folder OUT
    python -m grpo.tools.figures table               # prints all rows in Markdown

The NAME of a row says what its runs change, such as "--kl_beta=0". A printed figure is a mean over
seeds, ± half the gap between the largest and the smallest value.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from grpo.evaluation.evaluate import COLUMNS

FILE = Path(".github/figures.json")
COLUMNS = COLUMNS | {"entropy": ("entropy", 2), "mean_kl": ("KL", 2)}
WHOLE = ("none", "config/latent.py")  # we keep their whole tables, and the rows after of others


def stored():
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def keep(name, seed, out):
    """Store the figures of the run in `out` in figures.json, under `name` and then under `seed`."""
    result = json.loads((Path(out) / "evaluation.json").read_text())
    last = (Path(out) / "metrics.jsonl").read_text().splitlines()[-1]
    result["after, sampled"]["mean_kl"] = json.loads(last)["mean_kl"]
    table = {}
    for title, row in result.items():
        if name in WHOLE or title.startswith("after"):
            table[title] = {column: round(row[column], 5) for column in COLUMNS if column in row}
    figures = stored()
    figures.setdefault(name, {})[seed] = table
    FILE.write_text(json.dumps(figures, indent=0))


def cell(values, digits):
    """Format `values`, one for each seed, as their mean ± half of their range."""
    mean, half = (f"{x:.{digits}f}" for x in (np.mean(values), np.ptp(values) / 2))
    return f"{mean} ± {half}" if float(half) else mean


def print_table():
    """Print all rows of all stored runs in Markdown."""
    print("| |", " | ".join(title for title, _ in COLUMNS.values()), "|")
    print("|" + "---|" * (len(COLUMNS) + 1))
    for name, seeds in stored().items():
        tables = [*seeds.values()]
        for title in tables[0]:
            rows = [table[title] for table in tables]
            cells = []
            for column, (_, digits) in COLUMNS.items():
                values = [row[column] for row in rows if column in row]
                cells.append(cell(values, digits) if values else "")
            print(f"| {name}: {title} |", " | ".join(cells), "|")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["keep", "table"])
    parser.add_argument("run", nargs=argparse.REMAINDER, help="with keep: NAME SEED OUT")
    args = parser.parse_args(arguments)
    if args.what == "keep":
        keep(*args.run)
    else:
        print_table()


if __name__ == "__main__":
    main()
