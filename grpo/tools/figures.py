"""Make the runs behind the READMEs' tables, and keep their results in .github/figures.json.

    python -m grpo.tools.figures run                 # takes hours, skips finished runs
    python -m grpo.tools.figures run --only=latent   # only rows whose name has "latent"
    python -m grpo.tools.figures table               # prints the rows in Markdown
    python -m grpo.tools.figures keep NAME SEED OUT  # adds a run that you made yourself

A printed number is a mean over seeds, ± half the gap between the largest and the smallest value.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import numpy as np

from grpo.evaluation import evaluate

FILE = Path(".github/figures.json")
COLUMNS = {  # {key in a row of evaluation.json: (column title, decimal places)}
    "valid_words": ("valid", 3),
    "exact_words": ("exact", 3),
    "distinct_words": ("distinct", 3),
    "different_valid_words": ("words in 16", 2),
    "ngram_bits": ("bits", 2),
    "pass@16": ("pass@16", 3),
    "entropy": ("entropy", 2),
    "mean_kl": ("KL", 2),
}
# We keep the whole table of these runs. Of every other run we keep only the row after_sample.
WHOLE = ("none", "config/latent.py")
ROWS = [  # what each row adds to config/grpo_config.py
    "none",
    "config/latent.py",
    "--kl_beta=0",
    "config/fooled.py",
    "config/fooled.py --kl_beta=0.65",
    "--baseline=mean --scale_rewards=group",
    "--credit=input",
    "config/cispo.py",
    "config/sapo.py",
    "config/gmpo.py",
    "config/dppo.py",
    "config/gspo.py",
    "config/dapo.py",
    "config/dr_grpo.py",
    "config/rloo.py",
    "config/top_entropy.py",
    "config/moving_reference.py",
    "--importance_sampling_level=none --num_iterations=1",
    "--kl_estimator=k1",
    "--kl_estimator=k2",
    "--kl_estimator=k3",
    "--group_size=2",
    "--scale_rewards=batch",
    "--num_iterations=4",
    "--num_iterations=4 --minibatch_size=10",
    "--clip_eps_high=0.28 --clip_delta=4",
    "--loss_type=dapo",
    "--loss_type=sum",
    "--entropy_coef=0.1",
    "--temperature=0.7",
    "--top_k=5",
    "--top_p=0.9",
    "--min_p=0.05",
    "--xtc_probability=0.5",
    "--judge_score=probability --kl_beta=0.05",
    "--reward=judge:1,data/vowel_reward.py:vowels:2",
    "--reference_mode=periodic",
    "--masking=word --hidden_words=2",
    "--kl_beta=0.4",
    "--kl_beta=1",
    "--group_size=32",
]


def stored():
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def run(row, seed, folder):
    """Train in a new process: -> the table of the run, as `read_table` returns it."""
    name = "".join(c if c.isalnum() else "-" for c in row) + f"-{seed}"
    out = Path(folder) / name
    flags = [] if row == "none" else shlex.split(row)
    own = [f"--seed={seed}", f"--out_dir={out}", "--eval_interval=1000"]
    settings = ["config/grpo_config.py", *flags, *own]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "train_grpo.py", *settings], check=True, env=environment, **quiet
    )
    return read_table(out)


def read_table(out):
    """Read a run's evaluation.json, and add the KL of its last step to the row after_sample."""
    table = json.loads((out / "evaluation.json").read_text())
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    table["after_sample"]["mean_kl"] = last["mean_kl"]
    return table


def keep(row, seed, table):
    """Store a run's table in figures.json, under the name `row` and then under `seed`."""
    figures = stored()
    figures.setdefault(row, {})[seed] = (
        table if row in WHOLE else {"after_sample": table["after_sample"]}
    )
    FILE.write_text(json.dumps(figures, indent=0, sort_keys=True))
    print(row, seed, flush=True)


def run_all(args):
    only = args.only
    rows = [row for row in ROWS if row == only] or [row for row in ROWS if only in row]
    lock = Lock()

    def one(job):
        row, seed = job
        if seed in stored().get(row, {}):
            return
        table = run(row, seed, args.folder)
        with lock:
            keep(row, seed, table)

    jobs = [(row, seed) for seed in args.seeds.split(",") for row in rows]
    with ThreadPoolExecutor(args.workers) as pool:
        list(pool.map(one, jobs))


def cell(values, digits):
    """Format `values`, one for each seed, as their mean ± half of their range."""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if np.ptp(values) == 0 else f"{mean} ± {np.ptp(values) / 2:.{digits}f}"


def line(title, tables, row):
    """Make a line of Markdown from one row of the table, averaged over the tables of all seeds."""
    cells = []
    for name, (_, digits) in COLUMNS.items():
        values = [table[row][name] for table in tables if name in table[row]]
        cells.append(cell(values, digits) if values else "")
    return f"| {title} | {len(tables)} | " + " | ".join(cells) + " |"


def print_tables():
    """Print all rows of the two runs in WHOLE, then the row `after_sample` of all stored runs."""
    figures = stored()
    titles = " | ".join(title for title, _ in COLUMNS.values())
    for run_of in WHOLE:
        if run_of in figures:
            tables = list(figures[run_of].values())
            print(f"\n| {run_of} | seeds | {titles} |\n|" + "---|" * (len(COLUMNS) + 2))
            for name, title in evaluate.ROWS.items():
                if isinstance(tables[0][name], dict):
                    print(line(title, tables, name))
    print(f"\n| change | seeds | {titles} |\n|" + "---|" * (len(COLUMNS) + 2))
    for row in dict.fromkeys([*ROWS, *figures]):  # the ROWS, then the names that `keep` added
        if row in figures:
            print(line(f"`{row}`", list(figures[row].values()), "after_sample"))


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["keep"]:
        name, seed, out = argv[1:]
        return keep(name, seed, read_table(Path(out)))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--only", default="", help="a row, or what rows have in their names")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folder", default="out-figures", help="where the runs are kept")
    arguments = parser.parse_args(argv)
    run_all(arguments) if arguments.what == "run" else print_tables()


if __name__ == "__main__":
    main()
