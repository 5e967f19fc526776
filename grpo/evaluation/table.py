"""Print what `evaluate` measured as a table, of one run or as means over several."""

import json
from pathlib import Path

from grpo.run.fingerprint import PLACES

# what may differ between runs that are averaged; the device is in the fingerprint
IGNORED = ("seed", "eval_interval", "device", *PLACES)


def aligned(rows: list[list[str]]) -> list[str]:
    """Pad the cells of each column to one width, and join each row into a line of text."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def cell(values: list[float], runs: int) -> str:
    """Format the mean of `values`, ± half of the gap between the largest and the smallest.

    No values give an empty cell. The ± is left out where it rounds to 0. If not all of the runs
    have a value, the cell says how many do.
    """
    if not values:
        return ""
    mean = f"{sum(values) / len(values):.3f}"
    half = f"{(max(values) - min(values)) / 2:.3f}"
    some = "" if len(values) == runs else f" ({len(values)} of {runs})"
    return (f"{mean} ± {half}" if float(half) else mean) + some


def format_rows(rows: dict[str, list[dict[str, float]]]) -> list[str]:
    """Format {title: [the row of each run]}, with a `cell` for each column: -> lines of text."""
    names = dict.fromkeys(name for runs in rows.values() for row in runs for name in row)
    lines = [["filled by", *(name.removeprefix("reward_") for name in names)]]
    for title, runs in rows.items():
        cells = [cell([row[name] for row in runs if name in row], len(runs)) for name in names]
        lines.append([title, *cells])
    return aligned(lines)


def format_table(result: dict[str, dict[str, float]]) -> str:
    """Format the dict of evaluation.json as a table."""
    lines = format_rows({title: [row] for title, row in result.items()})
    return "\n".join([*lines, "what the rows and columns are: grpo/evaluation/evaluate.py"])


def compare(folders: list[str]) -> str:
    """Format the table of one group of runs, or one row for each of several groups."""
    tables = {folder: read_json(folder, "evaluation.json") for folder in folders}
    first, *others = tables.values()
    if not others:
        return format_table(first)
    groups = group_runs(folders)  # {label: folders}
    if len(groups) == 1:
        rows = {title: [table[title] for table in tables.values()] for title in first}
    else:
        rows = {}
        for label, members in groups.items():
            title = f"{label} (runs: {len(members)})"
            rows[title] = [tables[folder]["after, sampled"] for folder in members]
    return "\n".join([*format_rows(rows), "mean ± half the range over the seeds"])


def group_runs(folders: list[str]) -> dict[str, list[str]]:
    """Group runs that differ in nothing but their seed: -> {label: folders}.

    A label lists what the groups differ in.
    """
    runs = {folder: read_json(folder, "config.json") for folder in folders}
    names = [name for name in runs[folders[0]] if name not in IGNORED]
    differ = [name for name in names if len({str(run.get(name)) for run in runs.values()}) > 1]
    groups = {}
    for folder, run in runs.items():
        label = ", ".join(f"{name}={run.get(name)}" for name in differ) or folders[0]
        groups.setdefault(label, []).append(folder)
    return groups


def read_json(folder: str, name: str) -> dict:
    """Read a file of a run's folder."""
    return json.loads(Path(folder, name).read_bytes())
