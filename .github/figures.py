"""Draw the pictures of the pages from finished runs.

    python .github/figures.py moving out                         # sums, filled over the steps
    python .github/figures.py passes out-1,out-2 out-even-measured  # correct, by forward passes
    python .github/figures.py judge out-1,out-2 out-fooled-1,out-fooled-2  # accepted, and correct
    python .github/figures.py dose                                # by training steps of the judge

Each command writes .github/NAME.svg. The first run of `passes` needs `grpo.evaluation OUT --again`
first. config/README.md has the commands that make all of these runs,
and judges.csv what those of `dose` ended with.
"""

import csv
import json
import math
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
STYLE = """
text { font: 15px -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
.mono { font: 22px ui-monospace, Menlo, Consolas, monospace; }
.big { font-size: 40px; font-weight: 600; } .bold { font-weight: 600; } .faint { fill: #59636e; }
.axis { stroke: #8c959f; fill: none; } .grid { stroke: #d1d9e0; fill: none; }
.a { fill: #1a7f37; } .b { fill: #bc4c00; } .c { fill: #0969da; } .d { fill: #59636e; }
path.a, path.b, path.c, path.d { fill: none; stroke-width: 2.5; } .dot { fill-opacity: .75; }
path.a { stroke: #1a7f37; } path.b { stroke: #bc4c00; } path.c { stroke: #0969da; }
path.d { stroke: #59636e; stroke-dasharray: 5 4; } path.thin { stroke-width: 1; }
path.wide { stroke-width: 7; stroke-opacity: .55; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .faint, .d { fill: #9da7b1; } .grid { stroke: #30363d; }
  .a { fill: #3fb950; } .b { fill: #f0883e; } .c { fill: #58a6ff; }
  path.a { stroke: #3fb950; } path.b { stroke: #f0883e; } path.c { stroke: #58a6ff; }
  path.d { stroke: #9da7b1; }
}
"""


def read_lines(folder: str, name: str) -> list[dict]:
    lines = Path(folder, name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def table(folder: str) -> dict:
    return json.loads(Path(folder, "evaluation.json").read_text(encoding="utf-8"))


def write(name: str, height: int, body: list[str], style: str = "") -> None:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 830 {height}" role="img">'
    text = "\n".join([head, f"<style>{STYLE}{style}</style>", *body, "</svg>", ""])
    (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def path(points: list[tuple], kind: str) -> str:
    return f'<path class="{kind}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>'


class Panel:
    """A plot whose y axis goes from 0 to 1."""

    def __init__(self, left: float, width: float, x_range: tuple, title: str, height: float = 240):
        self.left, self.width, self.height = left, width, height
        self.low, self.high = x_range
        self.body = [text(left, 24, title, "bold")]
        for share in (0, 0.25, 0.5, 0.75, 1):
            self.body.append(path([(left, self.y(share)), (left + width, self.y(share))], "grid"))
            self.body.append(text(left - 8, self.y(share) + 5, f"{share:g}", "faint", "end"))

    def x(self, value: float) -> float:
        return self.left + self.width * (value - self.low) / (self.high - self.low)

    def y(self, share: float) -> float:
        return 45 + self.height * (1 - share)

    def ticks(self, labels: dict[float, str], title: str) -> None:
        for value, label in labels.items():
            self.body.append(text(self.x(value), self.y(0) + 22, label, "faint", "middle"))
        middle = self.left + self.width / 2
        self.body.append(text(middle, self.y(0) + 44, title, "faint", "middle"))

    def line(self, points: list[tuple], kind: str) -> None:
        self.body.append(path([(self.x(x), self.y(y)) for x, y in points], kind))

    def dot(self, x: float, y: float, different: float, kind: str) -> None:
        """Draw a dot whose area grows with the number of different answers."""
        r = 4 + 3.2 * math.sqrt(different)
        self.body.append(
            f'<circle cx="{self.x(x):.0f}" cy="{self.y(y):.0f}" r="{r:.1f}" class="dot {kind}"/>'
        )

    def label(self, x: float, y: float, words: str, kind: str, dx=0, dy=5, anchor="start") -> None:
        self.body.append(text(self.x(x) + dx, self.y(y) + dy, words, kind, anchor))


def moving(run: str) -> None:
    """Show six sums: the truth, and what base model and policy make of them, step by step."""
    first, *steps = read_lines(run, "snapshots.jsonl")
    metrics = read_lines(run, "metrics.jsonl")
    last = len(steps) - 1
    shown = [0, *(round(last ** (i / 12)) for i in range(4, 13))]
    by_blanks = sorted(range(len(first["masked"])), key=lambda i: -first["masked"][i].count("_"))
    rows = sorted(by_blanks[:6])
    seconds = len(shown) + 3  # the last frame stays longer

    def sums(x: float, line: dict) -> list[str]:
        cells = []
        for k, i in enumerate(rows):
            good = all(gap[2] for gap in line["gaps"][i])
            letters = "".join(
                f'<tspan class="{"a" if good else "b"} bold">{c}</tspan>' if m == "_" else c
                for c, m in zip(line["completions"][i], first["masked"][i])
            )
            cells.append(text(x, 120 + 38 * k, letters, "mono"))
        return cells

    body = [text(x, 80, t, "faint") for x, t in ((60, "truth"), (260, "before"), (460, "now"))]
    body += [text(60, 120 + 38 * k, first["texts"][i], "mono") for k, i in enumerate(rows)]
    body += sums(260, first)
    for frame, step in enumerate(shown):
        near = [line["correct"] for line in metrics[max(0, step - 2) : step + 3]]
        share = sum(near) / len(near)
        kind = "frame last" if step == last else "frame"
        body.append(f'<g class="{kind}" style="animation-delay:{frame}s">')
        body += sums(460, steps[step])
        body.append(text(670, 150, f"{share:.0%}", "big"))
        body.append(text(670, 180, "correct", ""))
        body.append(text(670, 204, f"step {step + 1} of {last + 1}", "faint"))
        body.append("</g>")
    legend = "Filled digits are green in a correct sum and orange in a wrong one."
    body.append(text(60, 40, "Every blank is filled in one forward pass.", "bold"))
    body.append(text(60, 352, legend, "faint"))
    style = f"""
.frame {{ visibility: hidden; animation: frame {seconds}s infinite step-end; }}
.last {{ animation-name: last; }}
@keyframes frame {{ 0% {{ visibility: visible; }} {100 / seconds:.3f}% {{ visibility: hidden; }} }}
@keyframes last {{ 0% {{ visibility: visible; }} {400 / seconds:.3f}% {{ visibility: hidden; }} }}
@media (prefers-reduced-motion: reduce) {{
  .frame {{ animation: none; }} .last {{ visibility: visible; }}
}}
"""
    write("moving", 370, body, style)


def passes(runs: str, supervised: str) -> None:
    """Plot what's correct against forward passes. A dot's area is the different answers in 16.

    The base model's rows are those of the first of the runs A,B,... and GRPO's is their mean.
    """
    tables = [table(run) for run in runs.split(",")]
    rows = tables[0]
    panel = Panel(50, 660, (0.5, 4.5), "correct, by forward passes")
    panel.ticks({n: str(n) for n in range(1, 5)}, "forward passes (mean over the inputs)")

    def dot(row, label, kind, **where):
        panel.dot(row["passes"], row["correct"], row.get("different_correct", 1), kind)
        panel.label(row["passes"], row["correct"], label, kind, **where)

    ceiling = rows["exact marginals"]["correct"]
    panel.line([(0.5, ceiling), (4.5, ceiling)], "d")
    panel.label(4.5, ceiling, "perfect pretraining, one pass", "d", -4, -10, "end")
    by_confidence = [rows[f"by confidence, {n} passes"] for n in (2, 3, 4, 6)]
    points = [(row["passes"], row["correct"]) for row in (rows["before, sampled"], *by_confidence)]
    panel.line(points, "c thin")
    dot(rows["before, sampled"], "base", "c", dx=14, dy=22)
    for i, row in enumerate(by_confidence):
        dot(row, "base, surest blanks first" if i == 1 else "", "c", dx=20, dy=14)
    dot(rows["left to right, 2 passes"], "base, left number first", "c", dx=22, dy=14)
    one_by_one = rows["left to right, argmax"]
    dot(one_by_one, "base, one blank per pass, argmax", "c", dx=-16, dy=-2, anchor="end")
    dot(table(supervised)["before, sampled"], "supervised", "d", dx=14, dy=0)
    after = [each["after, sampled"] for each in tables]
    mean = {name: sum(row[name] for row in after) / len(after) for name in after[0]}
    dot(mean, "GRPO", "a", dy=28, anchor="middle")

    body = panel.body
    body.append(text(50, 370, "Area: different correct answers in 16 draws", "faint"))
    for x, n in ((360, 1), (420, 5), (490, 10)):
        r = 4 + 3.2 * math.sqrt(n)
        body.append(f'<circle cx="{x}" cy="365" r="{r:.1f}" class="dot d"/>')
        body.append(text(x + r + 5, 370, str(n), "faint"))
    write("passes", 390, body)


def judge(good: str, weak: str) -> None:
    """Plot what the judge accepts and what's correct, over the steps: means over runs A,B,..."""
    body = []
    for left, runs, title in ((50, good, "a good judge"), (460, weak, "a weak judge")):
        metrics = [read_lines(run, "metrics.jsonl") for run in runs.split(",")]
        last = len(metrics[0]) - 1
        panel = Panel(left, 250, (0, last), title)
        panel.ticks({0: "0", last: str(last + 1)}, "step")
        ends = {}
        for name, kind in (("accepts", "b"), ("correct", "a")):
            values = [sum(line[name] for line in step) / len(step) for step in zip(*metrics)]
            # wide, so that it shows where the other one covers it
            panel.line([*enumerate(values)], "b wide" if name == "accepts" else kind)
            ends[name] = values[-1]
        apart = 0 if abs(ends["accepts"] - ends["correct"]) > 0.08 else 10
        words = {"accepts": "judge accepts", "correct": "correct"}
        for name, kind, dy in (("accepts", "b", 5 - apart), ("correct", "a", 5 + apart)):
            panel.label(last, ends[name], words[name], kind, 8, dy)
        body += panel.body
    write("judge", 345, body)


def dose() -> None:
    """Plot what GRPO ends with, by the steps of the judge: a dot for each of judges.csv."""
    with open(FOLDER / "judges.csv", encoding="utf-8") as file:
        judges = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]
    steps = sorted({judge["steps"] for judge in judges})
    panel = Panel(50, 600, (math.log(steps[0]), math.log(steps[-1])), "after GRPO")
    panel.ticks({math.log(n): f"{n:,.0f}" for n in steps}, "training steps of the judge")
    labels = {"accepts": "judge accepts", "correct": "correct", "fooled": "accepted of the wrong"}
    for name, kind in (("fooled", "d"), ("accepts", "b"), ("correct", "a")):
        points = []
        for n in steps:
            values = [judge[name] for judge in judges if judge["steps"] == n]
            points.append((math.log(n), sum(values) / len(values)))
            for value in values:
                panel.dot(math.log(n), value, 0, kind)
        panel.line(points, kind)
        dy = {"accepts": -5, "correct": 15, "fooled": 5}[name]
        panel.label(*points[-1], labels[name], kind, 10, dy)
    write("dose", 345, panel.body)


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    {"moving": moving, "passes": passes, "judge": judge, "dose": dose}[name](*given)
