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
from grpo.table import COLUMNS, ROWS

CURVES = ("mean_reward", "valid_words", "mean_kl", "entropy", "frac_reward_zero_std", "grad_norm")
EIGHTHS = "▁▂▃▄▅▆▇█"
ASCII = "_.-:=+*#"  # where the terminal has no eighths
WIDTH = 40  # characters of a curve
GREY = "#808890"  # readable on light ground and on dark
SEVERAL_PASSES = [
    "before_sample",
    *(name for name in ROWS if name.startswith("reference_steps")),
    "reference_sequential_random",
]
# What decides which held-out inputs a run is evaluated on.
HELD_OUT = ("dataset", "block_size", "masking", "mask_ratio", "hidden_words", "eval_inputs")


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

    def held_out(self):
        """Equal for runs with the same held-out inputs."""
        return [self.settings.get(name) for name in HELD_OUT], self.table.get("held_out")


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
        same = all(run.settings.get(name) == first[name] for run in runs)
        if name != "out_dir" and not same:
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
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for title, *values in rows:
        right = [value.rjust(width) for value, width in zip(values, widths[1:])]
        lines.append("  ".join([title.ljust(widths[0]), *right]).rstrip())
    return "\n".join(lines)


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
        values = {run: numbers for run, numbers in values.items() if numbers}
        every = [number for numbers in values.values() for number in numbers]
        for run, numbers in values.items():
            drawn = line_of_eighths(numbers, min(every), max(every))
            ends = f"{numbers[0]:8.3f} {drawn} {numbers[-1]:.3f}"
            lines.append(f"{name:20s}  {run.ljust(width)}{ends}")
    return "\n".join(lines)


def new_figure(flag, file, size):
    """A matplotlib figure, with all text in grey. ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            f"{flag}={file}: matplotlib is not installed;"
            f" pip install matplotlib, or leave out --{flag}"
        ) from None
    return Figure(figsize=size, layout="constrained")


def in_grey(axes):
    axes.tick_params(colors=GREY)
    for side in axes.spines.values():
        side.set_color(GREY)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(GREY)


def groups(runs):
    """Runs that differ in their seed alone, together: lists of runs."""
    together = {}
    for run in runs:
        shared = {k: v for k, v in run.settings.items() if k not in ("seed", "out_dir")}
        together.setdefault(json.dumps(shared, sort_keys=True), []).append(run)
    return list(together.values())


def plot(file, runs):
    """A panel for each curve; in it a line for each run, or a band for runs of several seeds."""
    figure = new_figure("plot", file, (12, 6))
    for axes, name in zip(figure.subplots(2, 3).flat, CURVES):
        for group in groups(runs):
            series = [{x["iteration"]: x.get(name, np.nan) for x in run.metrics} for run in group]
            steps = sorted(set.intersection(*map(set, series)))
            values = np.array([[each[step] for step in steps] for each in series], dtype=float)
            label = ", ".join(run.folder for run in group)
            (line,) = axes.plot(steps, values.mean(axis=0), label=label)
            if len(group) > 1:
                low = values.min(axis=0)
                high = values.max(axis=0)
                axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.25)
        axes.set_title(name)
        in_grey(axes)
    axes.legend(labelcolor=GREY, framealpha=0)
    figure.savefig(file, transparent=True)


def plot_passes(file, runs):
    """Valid words against forward passes, variety as colour: how many passes is one step worth?"""
    figure = new_figure("passes", file, (8, 5))
    axes = figure.subplots()
    drawn = []
    for run in runs:
        points = []  # (row, marker, size, title)
        before = run.finished("before_sample")
        if before not in drawn:  # runs from one generator, on the same inputs, share it
            drawn.append(before)
            reference = [run.table[name] for name in SEVERAL_PASSES if name in run.table]
            best = run.table.get("before_best_of_16")
            points += [(row, "o", 60, "") for row in reference]
            if best:
                points.append((best, "D", 60, f"{run.folder} before: best of 16 by the judge"))
            passes = [row["forward_passes"] for row in reference]
            valid = [row["valid_words"] for row in reference]
            axes.plot(passes, valid, color=GREY, linewidth=1, zorder=1)
            axes.annotate(f"{run.folder} before", (passes[0], valid[0]), **LABEL)
        points.append((run.table["after_sample"], "*", 220, f"{run.folder} after GRPO"))
        for row, marker, size, title in points:
            at = (row["forward_passes"], row["valid_words"])
            variety = row["distinct_words"]
            colours = axes.scatter(
                *at, c=variety, marker=marker, s=size, edgecolors=GREY, vmin=0, vmax=0.8
            )
            axes.annotate(title, at, **LABEL)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 3, 4, 6, 8], labels=["1", "2", "3", "4", "6", "8"])
    axes.set_xlabel("forward passes")
    axes.set_ylabel("valid words")
    in_grey(axes)
    bar = figure.colorbar(colours)
    bar.set_label("variety: distinct words", color=GREY)
    in_grey(bar.ax)
    figure.savefig(file, transparent=True, dpi=150)


def plot_frontier(file, runs):
    """Valid words against variety: the runs of each K as a line, and what they began with."""
    figure = new_figure("frontier", file, (8, 5))
    axes = figure.subplots()
    lines = {}  # title: {point's name: its row}
    for run in runs:
        K = run.finished("n_latent")
        by_temperature = run.finished("before_at_temperatures")
        title = f"before, K = {K}, by temperature"
        lines[title] = {f"{row['temperature']}": row for row in by_temperature}
        after = lines.setdefault(f"after GRPO, K = {K}", {})
        after[run.folder] = run.table["after_sample"]
    for title, rows in lines.items():
        across = [row["different_valid_words"] for row in rows.values()]
        up = [row["valid_words"] for row in rows.values()]
        axes.plot(across, up, marker="o", label=title)
        for name, *at in zip(rows, across, up):
            axes.annotate(name, at, **LABEL)
    axes.set_xlabel("different valid words in 16 fills of a hidden word")
    axes.set_ylabel("valid words")
    in_grey(axes)
    axes.legend(labelcolor=GREY, framealpha=0)
    figure.savefig(file, transparent=True, dpi=150)


LABEL = {"xytext": (9, -4), "textcoords": "offset points", "color": GREY}


def main(argv=None):
    parser = Parser(
        prog="python -m grpo.compare",
        description="Print the settings in which runs differ, their last figures, their curves.",
    )
    parser.add_argument("folders", nargs="+", metavar="out_dir", help="a run's folder")
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw the curves, a band where runs differ in their seed alone; needs matplotlib",
    )
    parser.add_argument(
        "--passes",
        metavar="FILE.png",
        help="draw valid words against forward passes, variety as colour; needs matplotlib",
    )
    parser.add_argument(
        "--frontier",
        metavar="FILE.png",
        help="draw valid words against different ones in 16 fills, runs of one K joined in the"
        " order given, and what they began with at temperatures from 0.2 to 1; needs matplotlib",
    )
    with exit_on_mistake("compare"):
        args = parser.parse_args(argv)
        runs = [load(folder) for folder in args.folders]
        if args.plot:
            plot(args.plot, runs)
        if args.passes:
            plot_passes(args.passes, runs)
        if args.frontier:
            plot_frontier(args.frontier, runs)
    print(side_by_side(runs))
    if any(run.held_out() != runs[0].held_out() for run in runs):
        print("the held-out inputs differ between these runs: do not compare their figures")
    print(curves({run.folder: run.metrics for run in runs}))


if __name__ == "__main__":
    main()
