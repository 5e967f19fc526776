"""Draw the pictures of the README, one of them from the default run.

    python -m grpo.tools.pictures out

This needs matplotlib and Pillow.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib import get_data_path, rcParams
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from grpo.tools import replay, toy
from grpo.tools.replay import unpack

GREY = "#4a5058"  # for text and axes, on a background that is always white
for name in ("text.", "axes.edge", "axes.label", "xtick.", "ytick."):
    rcParams[f"{name}color"] = GREY
rcParams["font.size"] = 11


def new_figure(width, height):
    """Make an empty figure. The sizes are in inches, and an inch has 100 pixels."""
    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def tables():
    """Draw three tables of the probabilities of help, half, helf and halp.

    They show the toy before GRPO, the toy after it, and a policy that chooses a whole word first.
    """
    chosen = {"help": 0.5, "half": 0.5, "helf": 0, "halp": 0}
    titles = {
        "each blank by itself": toy.train()[0],
        "GRPO: commit to one": toy.train()[100],
        "choose a word, then spell it": chosen,
    }
    figure = new_figure(9, 3.2)
    for axes, (title, p) in zip(figure.subplots(1, 3), titles.items()):
        grid = [[p["help"], p["helf"]], [p["halp"], p["half"]]]  # rows e, a; columns p, f
        axes.imshow(grid, cmap="Blues", vmin=0, vmax=1.2)
        axes.set_xticks([0, 1], labels=["p", "f"])
        axes.set_yticks([0, 1], labels=["e", "a"])
        axes.set_xlabel("second blank")
        axes.set_ylabel("first blank")
        axes.set_title(title, fontsize=11)
        for word, (x, y) in {
            "help": (0, 0),
            "helf": (1, 0),
            "halp": (0, 1),
            "half": (1, 1),
        }.items():
            ink = "white" if p[word] > 0.6 else "#20262c"
            axes.text(x, y, f"{word}\n{p[word]:.2f}", ha="center", va="center", color=ink)
    return figure


def pushes():
    """Draw how hard each of the four words pushes each logit in the step by hand, and their sum."""
    rewards = torch.tensor([*toy.WORDS.values()])  # (4,)
    advantages = (rewards - rewards.mean()) * 4 / 3  # minus the mean of the others
    figure = new_figure(9, 3.6)
    for axes, (place, likes, other) in zip(figure.subplots(1, 2), [(1, "e", "a"), (3, "p", "f")]):
        total = 0
        for row, (word, A) in enumerate(zip(toy.WORDS, advantages.tolist())):
            push = A * (0.5 if word[place] == likes else -0.5)
            total += push
            arrow(axes, 4 - row, push, "#1f66b8" if A > 0 else "#c96a00", f"{word}  {A:+.1f}")
        arrow(axes, -0.3, total, GREY, "sum", width=5)
        axes.axvline(0, color=GREY, linewidth=0.8)
        axes.axhline(0.4, color=GREY, linewidth=0.5)
        axes.set_title(f"the logit of {likes}, against {other}", fontsize=11)
        axes.set_xlim(-3.6, 2.4)
        axes.set_ylim(-1, 4.7)
        axes.set_yticks([])
        axes.set_xlabel(f"← {other}        push        {likes} →")
    return figure


def arrow(axes, y, length, colour, label, width=2.5):
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": width, "mutation_scale": 18}
    axes.annotate("", (length, y), (0, y), arrowprops=style)
    axes.text(-3.5, y, label, va="center", family="monospace", color=colour)
    axes.text(2.35, y, f"{length:+.2f}", va="center", ha="right", color=colour)


GROUND, INK, BLUE = (21, 24, 27), (236, 239, 241), (31, 102, 184)
CELL, LEFT = (12, 44), 16  # pixels of a letter's cell, and of the left margin
LOSSLESS = {"lossless": True, "quality": 100, "method": 4}  # lossy files of these frames are larger


def learning(folder):
    """Make one picture for each step.

    It shows how the policy of that step fills three texts. All pictures use the same random
    numbers.
    """
    (header, *lines), _ = replay.load(folder)
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSansMono.ttf", 20)
    uniforms = np.random.default_rng(2).random(10_000)
    frames = []
    for line in (header, *lines):
        image = Image.new("RGB", (64 * CELL[0] + 2 * LEFT, 200), GROUND)
        draw = ImageDraw.Draw(image)
        p = unpack(line["probabilities"], len(header["vocabulary"])).astype(float)  # (n,V)
        p /= p.sum(axis=1, keepdims=True)
        drawn = (p.cumsum(axis=1) < uniforms[: len(p), None]).sum(axis=1)  # (n,)
        draw.text((LEFT, 12), f"step {line['iteration'] + 1}", font=font, fill=INK)
        letters = [(header["vocabulary"][v], p[n, v]) for n, v in enumerate(drawn)]
        skipped = "".join(header["masked"][:2]).count(header["vocabulary"][-1])
        letters = iter(letters[skipped:])
        for i, text in enumerate(header["masked"][2:5]):
            for t, letter in enumerate(text):
                x, y = LEFT + t * CELL[0], 58 + i * CELL[1]
                if letter == header["vocabulary"][-1]:
                    letter, share = next(letters)
                    colour = tuple(int(g + share * (b - g)) for g, b in zip(GROUND, BLUE))
                    draw.rectangle((x, y - 2, x + CELL[0] - 1, y + 28), fill=colour)
                    draw.line((x, y + 28, x + CELL[0] - 1, y + 28), fill=BLUE, width=2)
                draw.text((x, y), letter, font=font, fill=INK)
        frames.append(image)
    return frames


if __name__ == "__main__":
    here = Path(".github")
    tables().savefig(here / "tables.png")
    pushes().savefig(here / "pushes.png")
    first, *frames = learning(sys.argv[1])
    each = [1500] + [120] * (len(frames) - 1) + [3000]  # milliseconds of each frame
    how = {"save_all": True, "append_images": frames, "duration": each, "loop": 0}
    first.save(here / "learning.webp", **how, **LOSSLESS)
