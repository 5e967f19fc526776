"""Draw the pictures of the pages from finished runs.

    python -m grpo.experiments.figures moving out                          # sums, over the steps
    python -m grpo.experiments.figures judge out-1,out-2 out-f-1,out-f-2   # accepted and correct
    python -m grpo.experiments.figures habit out-text-weak   # text, with favorite as a reward
    python -m grpo.experiments.figures coverage   # pass@k, from claims.jsonl
    python -m grpo.experiments.figures dots rungs        # a dot a run, from rungs.jsonl
    python -m grpo.experiments.figures dots claims lucky loose  # some variants of claims.jsonl
    python -m grpo.experiments.figures dots tokens       # a language model, from tokens.jsonl
    python -m grpo.experiments.figures tuning     # four settings, from tuning.jsonl
    python -m grpo.experiments.figures grid       # what scores mean, from grid.jsonl

Each command writes results/NAME.svg. config/README.md has the commands that make the runs, and
claims.md and README.md those behind the .jsonl files, which have a line a run.
"""

import json
import sys
from pathlib import Path

from grpo.experiments.grid import METHODS, REWARDS

FOLDER = Path(__file__).parent / "results"
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
.band { fill-opacity: .2; }
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

    height, top = 240, 45

    def __init__(self, left: float, width: float, x_range: tuple, title: str):
        self.left, self.width = left, width
        self.low, self.high = x_range
        self.body = [text(left, self.top - 21, title, "bold")]
        for i in range(5):
            y = self.y(i / 4)
            self.body.append(path([(left, y), (left + width, y)], "grid"))
            self.body.append(text(left - 8, y + 5, f"{i / 4:g}", "faint", "end"))

    def x(self, value: float) -> float:
        return self.left + self.width * (value - self.low) / (self.high - self.low)

    def y(self, share: float) -> float:
        return self.top + self.height * (1 - share)

    def ticks(self, labels: dict[float, str], title: str) -> None:
        for value, label in labels.items():
            self.body.append(text(self.x(value), self.y(0) + 22, label, "faint", "middle"))
        middle = self.left + self.width / 2
        self.body.append(text(middle, self.y(0) + 44, title, "faint", "middle"))

    def line(self, points: list[tuple], kind: str) -> None:
        self.body.append(path([(self.x(x), self.y(y)) for x, y in points], kind))

    def band(self, x: list[float], runs: list[list[float]], kind: str) -> None:
        """Shade the range of several runs, and draw their mean."""
        lowest = [*zip(x, map(min, zip(*runs)))]
        highest = [*zip(x, map(max, zip(*runs)))]
        around = [*lowest, *highest[::-1]]
        points = " ".join(f"{self.x(a):.1f},{self.y(b):.1f}" for a, b in around)
        self.body.append(f'<polygon class="band {kind}" points="{points}"/>')
        self.line([*zip(x, (sum(values) / len(values) for values in zip(*runs)))], kind)

    def dot(self, x: float, y: float, kind: str) -> None:
        x, y = self.x(x), self.y(y)
        self.body.append(f'<circle cx="{x:.0f}" cy="{y:.0f}" r="4" class="dot {kind}"/>')

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
            good = line["good"][i]
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
        # a negative delay: without animation, only the last frame is to be seen
        body.append(f'<g class="{kind}" style="animation-delay:{frame - seconds}s">')
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
.last {{ visibility: visible; animation-name: last; }}
@keyframes frame {{ 0% {{ visibility: visible; }} {100 / seconds:.3f}% {{ visibility: hidden; }} }}
@keyframes last {{ 0% {{ visibility: visible; }} {400 / seconds:.3f}% {{ visibility: hidden; }} }}
@media (prefers-reduced-motion: reduce) {{
  .frame {{ animation: none; }}
}}
"""
    write("moving", 370, body, style)


def curves(panel: Panel, runs: str, names: dict[str, tuple[str, str, int]]) -> None:
    """Plot metrics over the steps of runs A,B,...: `names` is {metric: (label, kind, dy)}."""
    metrics = [read_lines(run, "metrics.jsonl") for run in runs.split(",")]
    for name, (label, kind, dy) in names.items():
        points = []
        for i in range(0, len(metrics[0]), 5):  # means of five steps
            values = [step[name] for run in metrics for step in run[i : i + 5]]
            points.append((i + 2, sum(values) / len(values)))
        panel.line(points, kind)
        panel.label(*points[-1], label, kind.removesuffix(" wide"), 12, dy)


def judge(good: str, weak: str) -> None:
    """Plot what the judge accepts and what's correct, over the steps: means over runs A,B,..."""
    body = []
    for left, runs, title, apart in (
        (50, good, "a good judge", 10),
        (460, weak, "a weak judge", 0),
    ):
        panel = Panel(left, 250, (0, 200), title)
        panel.ticks({0: "0", 200: "200"}, "step")
        # wide, so that it shows where the other one covers it
        names = {"accepts": ("judge accepts", "b wide", 5 - apart)}
        names["correct"] = ("correct", "a", 5 + apart)
        curves(panel, runs, names)
        body += panel.body
    write("judge", 345, body)


def habit(run: str) -> None:
    """Plot how a judge of text gets fooled, over the steps."""
    panel = Panel(50, 600, (0, 150), "GRPO on text, with the old judge")
    panel.ticks({0: "0", 150: "150"}, "step")
    names = {
        "accepts": ("judge accepts", "b", 0),
        "fooled": ("accepted of the invalid", "d", 14),
        "valid": ("valid words", "a", -4),
        "reward_favorite": ("favorite ending", "c", 5),
    }
    curves(panel, run, names)
    write("habit", 345, panel.body)


def coverage() -> None:
    """Plot exact pass@k over k: the base model, GRPO with the judge, and a supervised policy."""
    arms = reported("claims")
    panel = Panel(50, 670, (0, 12), "pass@k, exact")
    panel.ticks({i: f"{2**i:,}" for i in range(0, 13, 2)}, "k")
    drawn = {
        "base": ("c", "base model", 4, 12, 14),
        "judge, config/grpo_config.py": ("a", "after GRPO", 4, 0, 24),
        "smallest-100000": ("d", "supervised", 12, 6, -4),
    }
    for arm, (kind, label, at, dx, dy) in drawn.items():
        runs = [run["pass"] for run in arms[arm]]
        panel.band([*range(13)], runs, kind)
        panel.label(at, runs[0][at], label, kind, dx, dy)
    write("coverage", 345, panel.body)


def reported(name: str) -> dict[str, list[dict]]:
    """Read results/NAME.jsonl: -> {variant: its runs that are reported}."""
    found = {}
    for run in read_lines(FOLDER, f"{name}.jsonl"):
        if run["half"] == "report":
            found.setdefault(run["arm"], []).append(run)
    return found


def dots(name: str, *variants: str) -> None:
    """Plot what's correct after each run of results/NAME.jsonl: a row a variant, a dot a seed."""
    arms = reported(name)
    arms = {variant: arms[variant] for variant in variants or arms}
    bottom = 40 + 26 * len(arms)
    body = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = 270 + 520 * share
        body.append(path([(x, 30), (x, bottom)], "grid"))
        body.append(text(x, bottom + 20, f"{share:g}", "faint", "middle"))
    for i, (arm, runs) in enumerate(arms.items()):
        y = 50 + 26 * i
        body.append(text(255, y + 5, arm, "", "end"))
        for run in runs:
            x = 270 + 520 * run["correct"]
            body.append(f'<circle cx="{x:.1f}" cy="{y}" r="4" class="dot {"c" if i else "a"}"/>')
    write(name, bottom + 35, body)


def tuning() -> None:
    """Plot what's correct over four settings of config/rule.py: a dot a run of tuning.jsonl."""
    runs = read_lines(FOLDER, "tuning.jsonl")
    body = []
    for i, setting in enumerate(dict.fromkeys(run["setting"] for run in runs)):
        found = {}
        for run in runs:
            if run["setting"] == setting:
                found.setdefault(run["value"], []).append(run["correct"])
        panel = Panel(45 + 205 * i, 165, (-0.3, len(found) - 0.7), setting)
        values = [*found]
        panel.ticks({n: f"{values[n]:g}".lstrip("0") or "0" for n in (0, 2, 4)}, "")
        panel.line([(n, sum(x) / len(x)) for n, x in enumerate(found.values())], "a")
        for n, some in enumerate(found.values()):
            for correct in some:
                panel.dot(n, correct, "a")
        body += panel.body
    write("tuning", 320, body)


def grid() -> None:
    """Plot what's correct for each method (down) and meaning of the scores (across), a dot a run.

    What a reward can't change is drawn where it was measured, in gray.
    """
    runs = [run for run in read_lines(FOLDER, "grid.jsonl") if run["half"] == "report"]
    body, bottom = [], 65 + 30 * len(METHODS)
    for column, reward in enumerate(REWARDS):
        left = 275 + 140 * column
        body.append(text(left, 25, reward, "bold"))
        for share in (0, 0.5, 1):
            x = left + 110 * share
            body.append(path([(x, 40), (x, bottom)], "grid"))
            body.append(text(x, bottom + 20, f"{share:g}", "faint", "middle"))
        for row, (method, (_, same)) in enumerate(METHODS.items()):
            y = 62 + 30 * row
            if not column:
                body.append(text(255, y + 5, method, "", "end"))
            source = same.get(reward, reward)
            for run in runs:
                if (run["method"], run["reward"]) == (method, source):
                    kind = "c" if source == reward else "d"
                    x = left + 110 * run["correct"]
                    body.append(f'<circle cx="{x:.1f}" cy="{y}" r="4" class="dot {kind}"/>')
    write("grid", bottom + 35, body)


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    drawings = [moving, judge, habit, coverage, dots, tuning, grid]
    {drawing.__name__: drawing for drawing in drawings}[name](*given)
