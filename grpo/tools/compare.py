"""Runs side by side: the settings that differ, their last figures, and their curves.

    python -m grpo.tools.compare out-a out-b ...

What the figures are: grpo/README.md.
"""

import json
from pathlib import Path

from data.mistake import Mistake
from grpo.evaluation.evaluate import COLUMNS, aligned
from grpo.plumbing.config import Parser, exit_on_mistake
from grpo.plumbing.log import CURVES, curves, read_metrics


def load(folder):
    """-> a run's settings, its metrics (a dict a line), its table (empty until it has finished)."""
    path = Path(folder)
    file = path / "metrics.jsonl"
    metrics = read_metrics(file) if file.exists() else []
    if not metrics:
        raise Mistake(
            f"{folder} holds no run that has begun; name folders that train_grpo.py wrote to"
        )
    settings = json.loads((path / "config.json").read_text())
    table = path / "evaluation.json"
    return settings, metrics, json.loads(table.read_text()) if table.exists() else {}


def cell(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def named(columns, wanted):
    """Which of the `wanted` figures there are, and all parts of the reward."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [name for name in names if name in wanted or name.startswith("reward_")]


def side_by_side(folders, settings, metrics, tables):
    """A line for each setting that differs and for each figure, a column for each run."""
    different = [
        name
        for name, value in settings[0].items()
        if name != "out_dir" and any(run.get(name) != value for run in settings)
    ]
    last = [lines[-1] for lines in metrics]
    parts = {
        "settings that differ": (different, settings),
        "training, the last step logged": (named(last, ["iteration", *CURVES, "step_ms"]), last),
    }
    for when in ("before", "after"):
        rows = [table.get(f"{when}_sample", {}) for table in tables]
        parts[f"held-out inputs, {when}, sampled"] = (named(rows, COLUMNS), rows)
    lines = [["", *folders]]
    for title, (names, columns) in parts.items():
        lines.append([title, *("" for _ in columns)])
        for name in names:
            lines.append([f"  {name}", *(cell(column.get(name, "-")) for column in columns)])
    return "\n".join(aligned(lines))


def main(arguments=None):
    parser = Parser(
        prog="python -m grpo.tools.compare",
        description="Print the settings in which runs differ, their last figures, their curves.",
    )
    parser.add_argument("folders", nargs="+", metavar="out_dir", help="a run's folder")
    with exit_on_mistake("compare"):
        args = parser.parse_args(arguments)
        settings, metrics, tables = zip(*map(load, args.folders))
        print(side_by_side(args.folders, settings, metrics, tables))
        print(curves(dict(zip(args.folders, metrics))))


if __name__ == "__main__":
    main()
