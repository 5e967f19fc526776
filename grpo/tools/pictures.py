"""Draw .github/learning.svg, the README's moving picture of a run.

    python -m grpo.tools.pictures out

It shows how the policy fills three held-out texts after each step, always with the same random
numbers. The brighter the ground of a letter, the likelier the letter was.

Shapes: n blanks of all texts in the run's replay.jsonl, V vocabulary.
"""

import sys
from pathlib import Path

import numpy as np

from grpo.tools import replay

SHOWN = range(2, 5)  # which of the texts in replay.jsonl
LEFT, TOP = 16, 80  # pixels to the first letter of the first text
CELL, LINE = 12, 44  # pixels from one letter to the next, and from one text to the next
SECONDS = {"first": 1.5, "each": 0.15, "last": 3.0}  # for which a step is shown
PICTURE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 200">
<style>
text {{ font: 20px monospace; fill: #eceff1 }}
rect {{ width: 11px; height: 30px; fill: #1f66b8 }}
g {{ visibility: hidden; animation-timing-function: step-end; animation-iteration-count: infinite }}
{rules}
@media (prefers-reduced-motion) {{ .each {{ animation: none }} }}
</style>
<path d="M0 0h800v200H0z" fill="#15181b"/>
{content}
</svg>
"""


def height(row):
    """Return how far below the picture's upper edge text number `row` stands."""
    return TOP + LINE * SHOWN.index(row)


def write_letters(letters, row):
    """Write {place: letter} into text number `row`: -> SVG."""
    x = " ".join(str(LEFT + CELL * place) for place in letters)
    return f'<text x="{x}" y="{height(row)}">{"".join(letters.values())}</text>'


def write_step(header, line, uniforms):
    """Draw a letter for each blank after a step, and write them all: -> SVG."""
    vocabulary = header["vocabulary"]
    p = replay.unpack(line["probabilities"], len(vocabulary)).astype(float)  # (n,V)
    p /= p.sum(axis=1, keepdims=True)
    drawn = (p.cumsum(axis=1) < uniforms[: len(p), None]).sum(axis=1)  # (n,)
    blanks = zip(drawn, p)
    shapes = [f'<text x="{LEFT}" y="36">step {line["iteration"] + 1}</text>']
    for row, text in enumerate(header["masked"]):
        places = [place for place, c in enumerate(text) if c == vocabulary[-1]]
        fills = {place: next(blanks) for place in places}
        if row in SHOWN:
            for place, (v, chances) in fills.items():
                at = f'x="{LEFT + CELL * place}" y="{height(row) - 22}"'
                shapes.append(f'<rect {at} fill-opacity="{chances[v]:.2f}"/>')
            letters = {place: vocabulary[v] for place, (v, _) in fills.items()}
            shapes.append(write_letters(letters, row))
    return "".join(shapes)


def draw(folder):
    """Draw the run in `folder`: -> SVG."""
    (header, *lines), _ = replay.load(folder)
    uniforms = np.random.default_rng(2).random(1000)
    hidden = header["vocabulary"][-1]
    content = []
    for row in SHOWN:
        text = enumerate(header["masked"][row])
        content.append(
            write_letters({place: c for place, c in text if c not in (" ", hidden)}, row)
        )
    kinds = ["first", *["each"] * (len(lines) - 1), "last"]
    begins = 0.0
    for kind, line in zip(kinds, (header, *lines)):
        step = write_step(header, line, uniforms)
        content.append(f'<g class="{kind}" style="animation-delay: {begins:.2f}s">{step}</g>')
        begins += SECONDS[kind]
    rules = []
    for kind, seconds in SECONDS.items():  # show a step, then hide it until all begins anew
        rules.append(f"@keyframes {kind} {{ 0% {{ visibility: visible }}")
        rules.append(f"{100 * seconds / begins:.3f}% {{ visibility: hidden }} }}")
        rules.append(f".{kind} {{ animation-name: {kind}; animation-duration: {begins:.2f}s }}")
    return PICTURE.format(rules="\n".join(rules), content="\n".join(content))


if __name__ == "__main__":
    Path(".github/learning.svg").write_text(draw(sys.argv[1]))
