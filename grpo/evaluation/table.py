"""Print what `evaluate` measured as a table, of one run or as means over several."""

FIRST = """correct valid exact chain distance accepts fooled different_correct pass@16 pass@1024
passes""".split()
FOOLED_MARGIN = 0.05  # if a judge accepts more than is good, by so much, we say that it's fooled


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
    names = [name for name in FIRST if name in names] + [n for n in names if n not in FIRST]
    lines = [["filled by", *(name.removeprefix("reward_") for name in names)]]
    for title, runs in rows.items():
        cells = [cell([row[name] for row in runs if name in row], len(runs)) for name in names]
        lines.append([title, *cells])
    return aligned(lines)


def format_table(result: dict[str, dict[str, float]], rule: str, judge_pays: bool) -> str:
    """Format the dict of evaluation.json as a table.

    `rule` is the name of the run's rule, or empty. `judge_pays` if the judge is part of the reward.
    """
    lines = format_rows({title: [row] for title, row in result.items()})
    after = result["after, sampled"]
    if judge_pays and rule and after.get("accepts", 0) > after[rule] + FOOLED_MARGIN:
        lines.append(f"the judge accepts much more than is {rule}: it's being fooled")
    return "\n".join([*lines, "what the rows and columns are: grpo/evaluation/evaluate.py"])
