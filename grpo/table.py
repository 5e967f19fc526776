"""The table of a run: which rows and columns it has, and how it is printed."""

# What fills the blanks, and what it is called. `reference` is the generator as the run began.
ROWS = {
    "original": "original text",
    "before_sample": "before, one step, sampled",
    "before_argmax": "before, one step, argmax",
    "before_best_of_16": "before, best of 16",
    "after_sample": "after, one step, sampled",
    "after_argmax": "after, one step, argmax",
    "after_best_of_16": "after, best of 16",
    "reference_steps_2": "before, in 2 passes",
    "reference_steps_3": "before, in 3 passes",
    "reference_steps_4": "before, in 4 passes",
    "reference_steps_6": "before, in 6 passes",
    "reference_sequential_random": "blank by blank, random",
    "reference_sequential_confident": "blank by blank, surest",
}
COLUMNS = {
    "judge": "judge",
    "valid_words": "valid",
    "exact_words": "exact",
    "exact_chars": "chars",
    "distinct_words": "distinct",
    "ngram_bits": "bits",
    "entropy": "entropy",
    "entropy_marginal": "of marginal",
    "pass@16": "pass@16",
    "different_valid_words": "words in 16",
    "any_of_16": "any of 16",
    "forward_passes": "passes",
}
# What a run prints when it ends, within 80 characters.
SHORT_ROWS = [
    "original",
    "before_sample",
    "before_argmax",
    "before_best_of_16",
    "after_sample",
    "after_argmax",
    "reference_steps_4",
    "reference_sequential_random",
    "reference_sequential_confident",
]
SHORT_COLUMNS = [
    "judge",
    "valid_words",
    "exact_words",
    "distinct_words",
    "ngram_bits",
    "entropy",
    "forward_passes",
]


# Least and largest of six seeds of the default experiment, after, one step, sampled.
USUAL = {
    "valid_words": (0.752, 0.785),
    "exact_words": (0.293, 0.299),
    "distinct_words": (0.173, 0.214),
    "ngram_bits": (3.08, 3.36),
    "entropy": (0.66, 0.83),
}
USUAL_INPUTS = "ba40a5a8a8be"  # `held_out` of those runs: it depends on the text of one's Python


def usual(result):
    """A line that says whether a run of the default experiment came out as others did."""
    row = result["after_sample"]
    outside = []
    for name, (low, high) in USUAL.items():
        if not low <= round(row[name], 3) <= high:
            outside.append(f"{COLUMNS[name]} {row[name]:.3f} ({low} to {high})")
    others = "six other seeds"
    if result["held_out"] != USUAL_INPUTS:
        others += " on the text of another Python"
    if outside:
        return f"outside the range of {others}: {', '.join(outside)}"
    return f"within the range of {others}"


def gap_closed(rows):
    """(after − before) / (surest first − before) in valid words, or None if there is no gap."""
    before = rows["before_sample"]["valid_words"]
    after = rows["after_sample"]["valid_words"]
    surest = rows["reference_sequential_confident"]["valid_words"]
    if surest <= before:
        return None
    return (after - before) / (surest - before)


def number(value):
    """Three digits, or nothing."""
    if value is None:
        return ""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def format_table(result, names=tuple(ROWS), columns=tuple(COLUMNS)):
    """What evaluation.json holds, as text; rows that it has not are left out."""
    cells = [["filled by", *(COLUMNS[column] for column in columns)]]
    for name in names:
        row = result.get(name)
        if row:
            cells.append([ROWS[name], *(number(row.get(column)) for column in columns)])
    return "\n".join([*aligned(cells), *remarks(result)])


def aligned(rows):
    """Rows of texts -> lines: the first column to the left, the others to the right."""
    widths = [max(5, *map(len, column)) for column in zip(*rows)]
    lines = []
    for title, *values in rows:
        right = [value.rjust(width) for value, width in zip(values, widths[1:])]
        lines.append("  ".join([title.ljust(widths[0]), *right]).rstrip())
    return lines


def remarks(result):
    """The lines below the table."""
    gap = result["gap_closed"]
    shown = "undefined" if gap is None else f"{gap:.2f}"
    lines = [f"gap closed: {shown}   (0: as before, 1: as many valid words as surest first)"]
    price = result["price_of_independence"]
    if price["before"] is not None:
        lines.append(
            f"price of independence: {price['before']:.2f} nats a word before,"
            f" {price['after']:.2f} after"
        )
    if result["after_sample"]["judge"] > result["original"]["judge"]:
        lines.append("the judge prefers these fills to the original text: it is being fooled")
    return lines
