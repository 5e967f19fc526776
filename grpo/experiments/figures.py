"""Draw the pictures of the pages from finished runs.

    python -m grpo.experiments.figures moving out      # sums, over the steps
    python -m grpo.experiments.figures curves judge accepts,correct \\
        "a good judge=out-1,out-2" "a weak judge=out-f-1,out-f-2"    # a panel each, a line a run
    python -m grpo.experiments.figures curves habit fooled,accepts,valid "the old judge=out-weak"
    python -m grpo.experiments.figures coverage        # pass@k, from claims.jsonl
    python -m grpo.experiments.figures ladder          # a dot a run, from ladder.jsonl
    python -m grpo.experiments.figures grid            # what scores mean, from grid.jsonl
    python -m grpo.experiments.figures strengths       # claims from seven base models, likewise

Each command writes results/NAME.svg. config/README.md has the commands that make the runs, and
claims.md and README.md those behind the .jsonl files, which have a line a run.
"""

from pathlib import Path
from statistics import mean

import numpy as np

from data.user_mistake import Mistake, run_program
from grpo.experiments.compare import TUNING, difference, interval, read_arms
from grpo.experiments.fair import Variant
from grpo.experiments.grid import METHODS
from grpo.experiments.strengths import VARIANTS, averages
from grpo.run.log import METRICS, SNAPSHOTS, read_lines

FOLDER = Path(__file__).parent / "results"
MEANINGS = {"as it is": "as it is", "constant": "plus a constant", "both": "and times a unit"}
SHARES = {"eighth": "⅛", "quarter": "¼", "half": "½", "all": "1"}  # of the pretraining
STYLE = """
text { font: 15px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.mono { font: 22px ui-monospace, Menlo, Consolas, monospace; }
.big { font-size: 40px; font-weight: 600; } .bold { font-weight: 600; } .faint { fill: #59636e; }
.grid { stroke: #d1d9e0; fill: none; }
.a { fill: #1a7f37; } .b { fill: #bc4c00; } .c { fill: #0969da; } .d { fill: #59636e; }
path.a, path.b, path.c, path.d { fill: none; stroke-width: 2.5; } .dot { fill-opacity: .75; }
path.a { stroke: #1a7f37; } path.b { stroke: #bc4c00; stroke-width: 7; stroke-opacity: .55; }
path.c { stroke: #0969da; } path.d { stroke: #59636e; }
path.hollow { stroke-width: 1.5; } .hollow { stroke-width: 1.5; fill: #fff; }
.hollow.c { stroke: #0969da; } .hollow.d { stroke: #59636e; }
.frame { visibility: hidden; animation: frame 14s infinite step-end; }
.last { visibility: visible; animation-name: last; }
@keyframes frame { 0% { visibility: visible; } 7.14% { visibility: hidden; } }
@keyframes last { 0% { visibility: visible; } 28.57% { visibility: hidden; } }
@media (prefers-reduced-motion: reduce) { .frame { animation: none; } }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .faint, .d { fill: #9da7b1; } .grid { stroke: #30363d; }
  .a { fill: #3fb950; } .b { fill: #f0883e; } .c { fill: #58a6ff; } .hollow { fill: #0d1117; }
  path.a { stroke: #3fb950; } path.b { stroke: #f0883e; } path.c { stroke: #58a6ff; }
  path.d, .hollow.d { stroke: #9da7b1; } .hollow.c { stroke: #58a6ff; }
}
"""


def write(name: str, height: int, body: list[str]) -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 830 {height}" role="img">'
    lines = "\n".join([head, f"<style>{STYLE}</style>", *body, "</svg>", ""])
    (FOLDER / f"{name}.svg").write_text(lines, encoding="utf-8")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def path(points: list[tuple], kind: str) -> str:
    return f'<path class="{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


def panel(
    left: float, width: float, title: str, ticks: list[str], lines: dict[str, list[list[float]]]
) -> list[str]:
    """Plot shares over evenly spaced steps: `lines` has the runs of each label, `ticks` names x."""
    body = [text(left, 24, title, "bold")]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = 285 - 240 * share
        body.append(path([(left, y), (left + width, y)], "grid"))
        body.append(text(left - 8, y + 5, f"{share:g}", "faint", "end"))
    for x, tick in zip(np.linspace(left, left + width, len(ticks)), ticks):
        body.append(text(x, 307, tick, "faint", "middle"))
    ends = []
    kinds = "cba"[-len(lines) :]  # b is wide, to show below a
    for kind, (label, runs) in zip(kinds, lines.items()):
        for values in runs:
            x = np.linspace(left, left + width, len(values))
            body.append(path([*zip(x, 285 - 240 * np.array(values))], kind))
        ends.append((290 - 240 * mean(values[-1] for values in runs), label, kind))
    y = 0
    for end, label, kind in sorted(ends):
        y = max(end, y + 18)  # below the label before
        body.append(text(left + width + 10, y, label, kind))
    return body


def strip(left: float, width: float, title: str, rows: list[tuple[str, list[float]]]) -> list[str]:
    """Plot shares as dots, with their mean and its interval: a row for each kind and its values."""
    body, bottom = [text(left, 20, title, "bold")], 40 + 26 * len(rows)
    for x, share in zip(np.linspace(left, left + width, 5), ("0", "", ".5", "", "1")):
        body.append(path([(x, 30), (x, bottom)], "grid"))
        body.append(text(x, bottom + 20, share, "faint", "middle"))
    for i, (kind, values) in enumerate(rows):
        y = 50 + 26 * i
        for value in values:
            x = left + width * value
            body.append(f'<circle cx="{x:.1f}" cy="{y}" r="4" class="dot {kind}"/>')
        words = f"{mean(values):.3f} ± {interval(values):.3f}"
        body.append(text(left + width + 10, y + 5, words, "faint" if kind == "d" else ""))
    return body


def names(rows: list[str]) -> list[str]:
    return [text(255, 55 + 26 * i, name, "", "end") for i, name in enumerate(rows)]


def moving(run: str) -> None:
    """Show six sums: the truth, and what base model and policy make of them, step by step."""
    first, *steps = read_lines(Path(run, SNAPSHOTS))
    correct = [line["correct"] for line in read_lines(Path(run, METRICS))]
    last = len(steps) - 1

    def sums(x: float, completions: list[str], good: list[bool]) -> list[str]:
        cells = []
        for k in range(6):
            letters = "".join(
                f'<tspan class="{"a" if good[k] else "b"} bold">{c}</tspan>' if m == "_" else c
                for c, m in zip(completions[k], first["masked"][k])
            )
            cells.append(text(x, 120 + 38 * k, letters, "mono"))
        return cells

    body = [text(60, 40, "Every blank is filled in one forward pass.", "bold")]
    body += [text(x, 80, t, "faint") for x, t in ((60, "truth"), (260, "before"), (460, "now"))]
    body += [text(60, 120 + 38 * k, first["texts"][k], "mono") for k in range(6)]
    body += sums(260, first["completions"], first["good"])
    for frame in range(11):  # a second each; the last one stays for four
        step = last * frame // 10
        kind = "frame last" if step == last else "frame"
        # a negative delay: without animation, only the last frame is to be seen
        body.append(f'<g class="{kind}" style="animation-delay:{frame - 14}s">')
        body += sums(460, steps[step]["completions"], steps[step]["good"])
        share = mean(correct[max(0, step - 2) : step + 3])
        body.append(text(670, 150, f"{share:.0%}", "big"))
        body.append(text(670, 180, "correct"))
        body.append(text(670, 204, f"step {step + 1} of {last + 1}", "faint"))
        body.append("</g>")
    legend = "Filled digits are green in a correct sum and orange in a wrong one."
    write("moving", 370, [*body, text(60, 352, legend, "faint")])


def curves(name: str, metrics: str, *panels: str) -> None:
    """Plot metrics over the steps, as means of five: a panel for each TITLE=RUN,RUN,..."""
    body = []
    for i, words in enumerate(panels):
        title, _, runs = words.partition("=")
        lines = {metric: [] for metric in metrics.split(",")}
        for run in runs.split(","):
            steps = read_lines(Path(run, METRICS))
            for metric in lines:
                values = [step[metric] for step in steps]
                lines[metric].append([mean(values[k : k + 5]) for k in range(0, len(values), 5)])
        ticks = ["step 1", f"{len(steps)}"]
        body += panel(50 + 410 * i, 660 - 410 * (len(panels) - 1), title, ticks, lines)
    write(name, 320, body)


def coverage() -> None:
    """Plot exact pass@k over k: the base model, GRPO with the judge, and a supervised policy."""
    arms = read_arms(FOLDER / "claims.jsonl")
    found = {"supervised": "smallest-100000", "base model": "base"}
    found["after GRPO"] = "judge, config/grpo_config.py"
    lines = {label: [run["pass"] for run in arms[f"all: {arm}"]] for label, arm in found.items()}
    ticks = [f"k = {2**i:,}" for i in range(0, 13, 2)]
    write("coverage", 320, panel(50, 670, "pass@k, exact", ticks, lines))


def ladder() -> None:
    """Plot what's correct on each rung, next to its mean, what's lost, and its updates."""
    arms = read_arms(FOLDER / "ladder.jsonl")
    rows = [("c", [run["correct"] for run in runs]) for runs in arms.values()]
    body = names([*arms]) + strip(270, 250, "", rows)
    columns = {532: "correct", 670: "lost", 720: "updates"}
    body += [text(x, 20, word, "bold") for x, word in columns.items()]
    for i, runs in enumerate(arms.values()):
        y = 55 + 26 * i
        lost = mean(run["lost"] for run in runs)
        made = Variant(FOLDER, runs[0]["flags"].split(), {})
        if made.kind == "supervised":
            updates = made.settings.updates
        else:
            updates = made.config.max_iters * made.config.num_iterations
        body.append(text(670, y, f"{lost:.3f}", "faint"))
        body.append(text(780, y, f"{updates:,}", "faint", "end"))
    write("ladder", 75 + 26 * len(rows), body)


def grid() -> None:
    """Plot what's correct for each method (down) and meaning of the scores (across), a dot a run.

    What a reward can't change is drawn where it was measured, in gray. A unit alone, which hurts
    nobody by much, has only its runs.
    """
    arms = read_arms(FOLDER / "grid.jsonl")
    body = names(METHODS)
    for column, (reward, title) in enumerate(MEANINGS.items()):
        rows = []
        for method, (_, same) in METHODS.items():
            source = same.get(reward, reward)
            correct = [run["correct"] for run in arms[f"{method}, {source}"]]
            rows.append(("c" if source == reward else "d", correct))
        body += strip(270 + 185 * column, 60, title, rows)
    write("grid", 75 + 26 * len(METHODS), body)


def strengths() -> None:
    """Plot what each claim changes, from the weakest base model to the strongest.

    Hollow: from their twins. Below: averages over weak and strong base models, and their gap.
    """
    arms = read_arms(FOLDER / "strengths.jsonl")

    def height(value: float) -> float:
        return 30 + 240 * (0.2 - value) / 0.7

    body = []
    for value, words in ((0.2, "+0.2"), (0, "0"), (-0.2, "−0.2"), (-0.4, "−0.4")):
        body.append(text(48, height(value) + 5, words, "faint", "end"))
    for column, claim in enumerate([*VARIANTS][1:]):
        left = 60 + 130 * column
        body.append(text(left, 20, claim, "bold"))
        body.append(path([(left, height(0)), (left + 112, height(0))], "grid"))
        for i, (base, share) in enumerate(SHARES.items()):
            x = left + 10 + 29 * i
            body.append(text(x + 4, 295, share, "faint", "middle"))
            body += effect(x, height, arms, base, claim, "")
            if base != "all":
                body += effect(x + 11, height, arms, f"twin {base}", claim, "hollow")
        (weak, strong), ratios = averages(claim)
        rows = [(mean(x), interval(x)) for x in (weak, strong)] + [difference(strong, weak)]
        for i, (found, half) in enumerate(rows):
            words = f"{found:+.3f} ± {half:.3f}".replace("0.", ".").replace("-", "−")
            body.append(text(left, 330 + 22 * i, words, "c bold" if abs(found) > half else ""))
        body.append(text(left, 396, " and ".join(f"×{ratio:.1f}" for ratio in ratios)))
    for i, word in enumerate(("weak", "strong", "gap", "wrong")):
        body.append(text(54, 330 + 22 * i, word, "faint", "end"))
    write("strengths", 410, body)


def effect(x: float, height, arms: dict, base: str, claim: str, kind: str) -> list[str]:
    """Plot a difference and its interval."""
    pair = [[run["correct"] for run in arms[f"{base}: {name}"]] for name in ("default", claim)]
    found, half = difference(*pair)
    kind = f"{'c' if abs(found) > max(half, TUNING) else 'd'} {kind}"
    bar = path([(x, height(found - half)), (x, height(found + half))], kind)
    return [bar, f'<circle cx="{x:.1f}" cy="{height(found):.1f}" r="4.5" class="{kind}"/>']


def main(arguments: list[str]) -> None:
    drawings = [moving, curves, coverage, ladder, grid, strengths]
    known = {drawing.__name__: drawing for drawing in drawings}
    if not arguments or arguments[0] not in known:
        raise Mistake(f"name one picture: {', '.join(known)}; --help says what each one takes")
    name, *given = arguments
    known[name](*given)


if __name__ == "__main__":
    run_program(main, __doc__)
