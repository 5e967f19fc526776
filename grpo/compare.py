"""Runs side by side: the settings that differ, and their last figures.

python -m grpo.compare out-a out-b ... [--plot=curves.png]      # and their curves, where matplotlib is installed
"""

import json
from pathlib import Path

from grpo.evaluate import COLUMNS
from grpo.plumbing.config import Config, Parser, exit_on_mistake
from grpo.plumbing.log import read_metrics

CURVES = ("mean_reward", "valid_words", "mean_kl", "entropy", "frac_reward_zero_std", "grad_norm")


def load(folder):
    """-> settings, lines of metrics.jsonl, {figure of the table: after GRPO}, empty until a run has finished. ValueError if `folder` holds no run."""
    try:
        settings, lines = (
            vars(Config()) | json.loads((Path(folder) / "config.json").read_text()),
            read_metrics(Path(folder) / "metrics.jsonl"),
        )
        finished = (
            lines[-1]["iteration"] + 1 == settings["max_iters"]
        )  # else the table is that of an earlier run
        file = Path(folder) / "evaluation.json"
        table = json.loads(file.read_text()) if finished and file.exists() else {"after_sample": {}}
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        raise ValueError(
            f"{folder} holds no run, or none that has begun; name folders that train_grpo.py has written, its out_dir"
        ) from None
    return (
        settings | {"out_dir": folder},
        lines,
        {"gap_closed": table.get("gap_closed")} | table["after_sample"],
    )


def side_by_side(settings, metrics, after):
    """A line for each setting that differs and for each figure, a column for each run."""
    differing = [
        name
        for name in settings[0]
        if name != "out_dir" and any(column.get(name) != settings[0][name] for column in settings)
    ]
    rows = [["", *(column["out_dir"] for column in settings)]]
    for title, names, columns in (
        ("settings that differ", differing, settings),
        ("the last step's inputs", ("iteration", *CURVES, "step_ms"), [x[-1] for x in metrics]),
        ("held-out inputs, one step, sampled", ("gap_closed", *COLUMNS), after),
    ):
        rows.append([title, *("" for _ in columns)])
        for name in names:
            values = (column.get(name) for column in columns)
            rows.append(
                [
                    f"  {name}",
                    *(
                        "-"
                        if value is None
                        else f"{value:.4g}"
                        if isinstance(value, float)
                        else str(value)
                        for value in values
                    ),
                ]
            )
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    )


def plot(file, folders, metrics):
    """A panel for each curve, a line in it for each run. ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            f"plot={file}: matplotlib is not installed; pip install matplotlib, or leave out --plot"
        ) from None
    figure = Figure(figsize=(12, 6), layout="constrained")
    for axes, name in zip(figure.subplots(2, 3).flat, CURVES):
        for folder, lines in zip(folders, metrics):
            axes.plot(
                [line["iteration"] for line in lines],
                [line.get(name) for line in lines],
                label=folder,
            )
        axes.set_title(name)
    axes.legend()
    figure.savefig(file)


def main(argv=None):
    parser = Parser(
        prog="python -m grpo.compare",
        description="Print the settings in which runs differ, and their last figures.",
    )
    parser.add_argument("folders", nargs="+", metavar="out_dir", help="a run's folder")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the curves too; needs matplotlib")
    with exit_on_mistake("compare"):
        args = parser.parse_args(argv)
        settings, metrics, after = zip(*map(load, args.folders))
        if args.plot:
            plot(args.plot, args.folders, metrics)
    print(side_by_side(settings, metrics, after))


if __name__ == "__main__":
    main()
