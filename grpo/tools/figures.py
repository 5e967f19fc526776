"""Make the runs behind the READMEs' tables, and keep their figures in .github/figures.json.

    python -m grpo.tools.figures run                 # takes hours, skips the runs that it has
    python -m grpo.tools.figures run --kl_beta=0     # makes the runs of this row only
    python -m grpo.tools.figures table               # prints all rows in Markdown
    python -m grpo.tools.figures keep NAME SEED OUT  # adds a run that you made yourself

A printed figure is a mean over seeds, ± half the gap between the largest and the smallest value.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from grpo.evaluation.__main__ import main as evaluation
from grpo.evaluation.evaluate import COLUMNS
from train_grpo import main as train

FILE = Path(".github/figures.json")
COLUMNS = COLUMNS | {"entropy": ("entropy", 2), "mean_kl": ("KL", 2)}
WHOLE = ("none", "config/latent.py")  # we keep their whole tables, and the rows after of others
SEEDS = ("1", "2", "3")
FOUR = "--num_iterations=4"  # objectives differ only from the second update on
ROWS = [  # what each row adds to config/grpo_config.py
    *WHOLE,
    "config/latent.py config/forward.py",
    "config/latent.py config/forward.py --batch_size=64",
    "--kl_beta=0",
    "config/fooled.py",
    "config/fooled.py --kl_beta=0.65",
    "--baseline=mean --scale_rewards=group",
    "--num_iterations=1",
    "--clip_eps=1 --clip_eps_high=100",
    "--kl_estimator=k1",
    "--kl_estimator=k3",
    "--group_size=2",
    f"{FOUR} --objective=clip",
    f"{FOUR} --objective=cispo --clip_eps_high=4",
    f"{FOUR} --objective=sapo",
    f"{FOUR} --objective=gmpo --clip_eps=0.4 --clip_eps_high=0.4",
    f"{FOUR} --objective=dppo --clip_eps=0.15 --clip_eps_high=0.15",
    f"{FOUR} --importance_sampling_level=sequence",
    f"{FOUR} --loss_type=dapo --clip_eps_high=0.28",
]


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
    figures.setdefault(name, {})[str(seed)] = table
    FILE.write_text(json.dumps(figures, indent=0))


def run_all(rows):
    """Make the runs of these rows, each with every seed, but for those that are stored."""
    for seed in SEEDS:
        for row in rows:
            if seed in stored().get(row, {}):
                continue
            out = f"out-figures/{ROWS.index(row)}-{seed}"
            flags = [] if row == "none" else row.split()
            train(["config/grpo_config.py", *flags, f"--seed={seed}", f"--out_dir={out}"])
            if row in WHOLE:
                evaluation([out, "--again"])  # adds the target
            keep(row, seed, out)


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
    parser.add_argument("what", choices=["run", "table", "keep"])
    parser.add_argument(
        "names", nargs=argparse.REMAINDER, help="a row; or a name, a seed, a folder"
    )
    args = parser.parse_args(arguments)
    if args.what == "run":
        run_all([" ".join(args.names)] if args.names else ROWS)
    elif args.what == "keep":
        keep(*args.names)
    else:
        print_table()


if __name__ == "__main__":
    main()
