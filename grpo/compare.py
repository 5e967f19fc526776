"""Runs side by side: the settings that differ, their last figures, and their curves.

    python -m grpo.compare out-a out-b ...
    python -m grpo.compare out-a out-b --plot=curves.png       # the curves as a picture
    python -m grpo.compare out-a out-b --passes=passes.png     # valid words against forward passes
    python -m grpo.compare out-a out-b --frontier=frontier.png # valid words against variety

Pictures need matplotlib, nothing else does.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from grpo.plumbing.config import Config, Parser, exit_on_mistake
from grpo.plumbing.log import read_metrics
from grpo.table import COLUMNS, ROWS, aligned

CURVES = ("mean_reward", "valid_words", "mean_kl", "entropy", "frac_reward_zero_std", "grad_norm")
EIGHTHS = "▁▂▃▄▅▆▇█"
ASCII = "_.-:=+*#"  # where the terminal has no eighths
WIDTH = 40  # characters of a curve
GREY = "#808890"  # readable on light ground and on dark
STYLE = {
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "legend.framealpha": 0,
    "savefig.transparent": True,
}
LABEL = {"xytext": (9, -4), "textcoords": "offset points"}
SEVERAL_PASSES = [
    "before_sample",
    *(name for name in ROWS if name.startswith("reference_steps")),
    "reference_sequential_random",
]


@dataclass
class Run:
    """What a folder holds."""

    folder: str
    settings: dict
    metrics: list  # a dict for each line of metrics.jsonl
    table: dict  # evaluation.json; empty until the run has finished

    def figures(self):
        """After GRPO, one step, sampled."""
        return {"gap_closed": self.table.get("gap_closed")} | self.table.get("after_sample", {})

    def finished(self, name):
        """What evaluation.json has under `name`; ValueError if it has not."""
        if name not in self.table:
            raise ValueError(
                f"{self.folder} has no {name} in an evaluation.json of its last step; finish the"
                f" run, or evaluate it anew: python -m grpo.evaluate {self.folder}"
            )
        return self.table[name]


def load(folder):
    """The run in `folder`; ValueError if it holds none."""
    folder_path = Path(folder)
    try:
        settings = json.loads((folder_path / "config.json").read_text())
        settings = vars(Config()) | settings | {"out_dir": folder}
        metrics = read_metrics(folder_path / "metrics.jsonl")
        # Of a run that has not finished, evaluation.json is that of an earlier one.
        finished = metrics[-1]["iteration"] + 1 == settings["max_iters"]
        file = folder_path / "evaluation.json"
        table = json.loads(file.read_text()) if finished and file.exists() else {}
        return Run(folder, settings, metrics, {} | table)  # TypeError if it is no object
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        raise ValueError(
            f"{folder} holds no run, or none that has begun;"
            " name folders that train_grpo.py has written, its out_dir"
        ) from None


def cell(value):
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def side_by_side(runs):
    """A line for each setting that differs and for each figure, a column for each run."""
    first = runs[0].settings
    differing = []
    for name in first:
        if name != "out_dir" and any(run.settings.get(name) != first[name] for run in runs):
            differing.append(name)
    parts = {
        "settings that differ": (differing, [run.settings for run in runs]),
        "the last step's inputs": (
            ["iteration", *CURVES, "step_ms"],
            [run.metrics[-1] for run in runs],
        ),
        "held-out inputs, one step, sampled": (
            ["gap_closed", *COLUMNS],
            [run.figures() for run in runs],
        ),
    }
    rows = [["", *(run.folder for run in runs)]]
    for title, (names, columns) in parts.items():
        rows.append([title, *("" for _ in columns)])
        for name in names:
            rows.append([f"  {name}", *(cell(column.get(name)) for column in columns)])
    return "\n".join(aligned(rows))


def line_of_eighths(values, low, high):
    """Numbers as one short line, from the lowest mark at `low` to the highest at `high`."""
    marks = EIGHTHS
    try:
        marks.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        marks = ASCII
    means = [part.mean() for part in np.array_split(values, min(WIDTH, len(values)))]
    step = (high - low) / (len(marks) - 1) or 1
    return "".join(marks[round((mean - low) / step)] for mean in means)


def curves(metrics):
    """Each curve as a line of eighths between its first and last number: {run: its metrics}.

    Curves of one name share a scale.
    """
    lines = []
    width = max(map(len, metrics))
    for name in CURVES:
        values = {
            run: [line[name] for line in rows if name in line] for run, rows in metrics.items()
        }
        every = sum(values.values(), [])
        for run, numbers in values.items():
            if not numbers:
                continue
            drawn = line_of_eighths(numbers, min(every), max(every))
            ends = f"{numbers[0]:8.3f} {drawn} {numbers[-1]:.3f}"
            lines.append(f"{name:20s}  {run.ljust(width)}{ends}")
    return "\n".join(lines)


def new_figure(flag, file, size):
    """A matplotlib figure, for light ground and for dark. ValueError without matplotlib."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            f"{flag}={file}: matplotlib is not installed;"
            f" pip install matplotlib, or leave out --{flag}"
        ) from None
    rcParams.update(STYLE)
    return Figure(figsize=size, layout="constrained")


def groups(runs):
    """Runs that differ in their seed alone, together: lists of runs."""
    together = {}
    for run in runs:
        shared = json.dumps(run.settings | {"seed": 0, "out_dir": ""}, sort_keys=True)
        together.setdefault(shared, []).append(run)
    return list(together.values())


def draw_curves(figure, runs):
    """Draw the curves, a band where runs differ in their seed alone."""
    for axes, name in zip(figure.subplots(2, 3).flat, CURVES):
        for group in groups(runs):
            steps = [line["iteration"] for line in group[0].metrics]
            series = [[line.get(name, np.nan) for line in run.metrics] for run in group]
            values = np.array([*zip(*series)])  # (steps, runs), as many steps as all have
            steps = steps[: len(values)]
            label = ", ".join(run.folder for run in group)
            (line,) = axes.plot(steps, values.mean(axis=1), label=label)
            if len(group) > 1:
                low = values.min(axis=1)
                high = values.max(axis=1)
                axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.25)
        axes.set_title(name)
    axes.legend()


def origins(runs):
    """{generator's file: a run that began with it}: what came before GRPO is drawn once."""
    return {run.settings["generator_checkpoint"]: run for run in runs}


def draw_passes(figure, runs):
    """Draw valid words against forward passes, variety as colour: what is one step worth?"""
    axes = figure.subplots()
    points = []  # (title, marker, row)
    for file, run in origins(runs).items():
        rows = [run.finished(name) for name in SEVERAL_PASSES]
        passes = [row["forward_passes"] for row in rows]
        valid = [row["valid_words"] for row in rows]
        axes.plot(passes, valid, zorder=1, label=f"{file} before GRPO")
        points += [("", "o", row) for row in rows]
        title = f"{Path(file).stem}, the judge's best of 16"
        points.append((title, "D", run.finished("before_best_of_16")))
    for run in runs:
        points.append((f"{run.folder} after GRPO", "*", run.finished("after_sample")))
    for title, marker, row in points:
        at = (row["forward_passes"], row["valid_words"])
        variety = row["distinct_words"]
        colours = axes.scatter(
            *at, c=variety, marker=marker, s=120, edgecolors=GREY, vmin=0, vmax=0.8
        )
        axes.annotate(title, at, **LABEL)
    axes.legend()
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 3, 4, 6, 8], labels=["1", "2", "3", "4", "6", "8"])
    axes.set_xlabel("forward passes")
    axes.set_ylabel("valid words")
    figure.colorbar(colours, label="variety: distinct words")


def draw_frontier(figure, runs):
    """Draw valid words against different ones in 16 fills, runs from one generator joined."""
    lines = {}  # title: {point's name: its row}
    for file, run in origins(runs).items():
        rows = run.finished("before_at_temperatures")
        lines[f"{file} at temperatures"] = {str(row["temperature"]): row for row in rows}
    for run in runs:
        after = lines.setdefault(f"{run.settings['generator_checkpoint']} after GRPO", {})
        after[run.folder] = run.finished("after_sample")
    axes = figure.subplots()
    for title, rows in lines.items():
        across = [row["different_valid_words"] for row in rows.values()]
        up = [row["valid_words"] for row in rows.values()]
        axes.plot(across, up, marker="o", label=title)
        for name, *at in zip(rows, across, up):
            axes.annotate(name, at, **LABEL)
    axes.set_xlabel("different valid words in 16 fills of a hidden word")
    axes.set_ylabel("valid words")
    axes.legend()


PICTURES = {  # flag: who draws it, and its size
    "plot": (draw_curves, (12, 6)),
    "passes": (draw_passes, (8, 5)),
    "frontier": (draw_frontier, (8, 5)),
}


def main(argv=None):
    parser = Parser(
        prog="python -m grpo.compare",
        description="Print the settings in which runs differ, their last figures, their curves.",
    )
    parser.add_argument("folders", nargs="+", metavar="out_dir", help="a run's folder")
    for flag, (draw, _) in PICTURES.items():
        about = f"{draw.__doc__} Needs matplotlib."
        parser.add_argument(f"--{flag}", metavar="FILE.png", help=about)
    with exit_on_mistake("compare"):
        args = vars(parser.parse_args(argv))
        runs = [load(folder) for folder in args["folders"]]
        for flag, (draw, size) in PICTURES.items():
            file = args[flag]
            if file:
                figure = new_figure(flag, file, size)
                draw(figure, runs)
                figure.savefig(file, dpi=1000 / size[0])  # 1000 pixels wide
    print(side_by_side(runs))
    if len({run.table["held_out"] for run in runs if "held_out" in run.table}) > 1:
        print("the held-out inputs differ between these runs: do not compare their figures")
    print(curves({run.folder: run.metrics for run in runs}))


if __name__ == "__main__":
    main()
