"""Show runs side by side: the settings that differ, their last figures, and their curves.

    python -m grpo.tools.compare out-a out-b ...

grpo/README.md says what the figures are.
"""

import json
from pathlib import Path

from data.user_mistake import refuse
from grpo.evaluation.evaluate import COLUMNS, aligned
from grpo.plumbing.command_line import Parser, exit_on_mistake
from grpo.plumbing.log import CURVES, curves, read_metrics

# If runs differ in one of these settings, you cannot compare their rewards. Then we draw the reward
# of each run on a scale of its own.
SCALES = {"reward", "judge_score", "judge_checkpoint"}


def load(folder):
    """Read a run's settings, its metrics (a dict for each step) and its table ({} if none)."""
    path = Path(folder)
    files = path / "config.json", path / "metrics.jsonl"
    metrics = read_metrics(files[1]) if all(file.exists() for file in files) else []
    refuse(
        not metrics,
        f"{folder} holds no run that has finished a step; name the out_dir of such a run",
    )
    table = path / "evaluation.json"
    result = json.loads(table.read_text()) if table.exists() else {}
    return json.loads(files[0].read_text()), metrics, result


def cell(value):
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def named(columns, wanted):
    """List the names in `columns` that are in `wanted` or that name a part of the reward."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [name for name in names if name in wanted or name.startswith("reward_")]


def difference(settings):
    """List the settings, other than out_dir, that are not the same in all runs."""
    values = {name: {str(run.get(name)) for run in settings} for name in settings[0]}
    return [name for name in values if name != "out_dir" and len(values[name]) > 1]


def side_by_side(folders, settings, metrics, tables):
    """Make a line for each setting that differs and for each metric, with a column for each run."""
    last = [lines[-1] for lines in metrics]
    parts = {
        "settings that differ": (difference(settings), settings),
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
        description="Print the settings that differ, and each run's last figures and curves.",
    )
    parser.add_argument("folders", nargs="+", metavar="out_dir", help="a run's folder")
    with exit_on_mistake("compare"):
        args = parser.parse_args(arguments)
        settings, metrics, tables = zip(*map(load, args.folders))
        print(side_by_side(args.folders, settings, metrics, tables))
        apart = ["mean_reward"] if SCALES & {*difference(settings)} else []
        print(curves(dict(zip(args.folders, metrics)), apart))


if __name__ == "__main__":
    main()
