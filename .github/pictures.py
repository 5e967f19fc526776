"""Draws the pictures of the READMEs, from a run of the default experiment.

    PYTHONPATH=. python .github/pictures.py out

Needs matplotlib and Pillow.
"""

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib import get_data_path, rcParams
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from grpo.plumbing.recorder import unpack
from grpo.tools import replay, toy

GREY = "#808890"  # readable on light ground and on dark
for name in ("text.", "axes.edge", "axes.label", "xtick.", "ytick."):
    rcParams[f"{name}color"] = GREY
rcParams["savefig.transparent"] = True
rcParams["font.size"] = 11


def new_figure(width, height):
    """In inches, of 100 pixels."""
    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def tables():
    """What is drawn of h_l_: by chance, after GRPO, and by whoever chooses a word first."""
    chosen = {"help": 0.5, "half": 0.5, "helf": 0, "halp": 0}
    titles = {
        "each blank by itself": toy.train(0),
        "GRPO: commit to one": toy.train(100),
        "choose a word, then spell it": chosen,
    }
    figure = new_figure(9, 3.2)
    for axes, (title, p) in zip(figure.subplots(1, 3), titles.items()):
        grid = [[p["help"], p["helf"]], [p["halp"], p["half"]]]  # e, a; p, f
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


BEFORE = {  # rows of evaluation.json, from one pass to one for each blank
    "before_sample": "before, one pass",
    "reference_steps_4": "in four",
    "reference_sequential_random": "blank by blank",
}
ONE_PASS = {  # row: title, marker
    "before_argmax": ("before, the likeliest letters", "s"),
    "before_best_of_16": ("before, the judge's best of 16", "D"),
    "after_sample": ("after GRPO", "*"),
}


def passes(folder):
    """Valid words against forward passes, variety as colour: what is one pass worth?"""
    table = json.loads((Path(folder) / "evaluation.json").read_text())
    figure = new_figure(9, 5)
    axes = figure.subplots()
    points = [(name, (title, "o")) for name, title in BEFORE.items()] + [*ONE_PASS.items()]
    for name, (title, marker) in points:
        row = table[name]
        at = (row["forward_passes"], row["valid_words"])
        shown = {"c": row["distinct_words"], "vmin": 0, "vmax": 0.8, "edgecolors": GREY}
        colours = axes.scatter(*at, marker=marker, s=400 if marker == "*" else 130, **shown)
        axes.annotate(title, at, xytext=(13, -4), textcoords="offset points")
    path = [(table[name]["forward_passes"], table[name]["valid_words"]) for name in BEFORE]
    axes.plot(*zip(*path), color=GREY, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.9, 14.5)
    axes.set_xticks([1, 2, 4, 8], labels=["1", "2", "4", "8"])
    axes.set_xlabel("forward passes")
    axes.set_ylabel("hidden words filled with a word")
    figure.colorbar(colours, label="variety: different words ÷ hidden words")
    return figure


GROUND, INK, BLUE = (21, 24, 27), (236, 239, 241), (31, 102, 184)
CELL, LEFT = (12, 44), 16  # pixels
LOSSLESS = {"lossless": True, "quality": 100, "method": 4}  # smaller here than what loses


def learning(folder):
    """Frames: the first three texts after each step, drawn with the same random numbers."""
    (header, *lines), _ = replay.load(folder)
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSansMono.ttf", 20)
    uniforms = np.random.default_rng(2).random(10_000)
    frames = []
    for line in (header, *lines):
        image = Image.new("RGB", (64 * CELL[0] + 2 * LEFT, 200), GROUND)
        draw = ImageDraw.Draw(image)
        p = unpack(line["probabilities"], "u1", len(header["vocabulary"])).astype(float)  # (n,V)
        p /= p.sum(axis=1, keepdims=True)
        drawn = (p.cumsum(axis=1) < uniforms[: len(p), None]).sum(axis=1)  # (n,)
        draw.text((LEFT, 12), f"step {line['iteration'] + 1}", font=font, fill=INK)
        letters = iter([(header["vocabulary"][v], p[n, v]) for n, v in enumerate(drawn)])
        for i, text in enumerate(header["masked"][:3]):
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
    folder = sys.argv[1]
    passes(folder).savefig(Path(__file__).with_name("passes.png"))
    tables().savefig(Path(__file__).with_name("tables.png"))
    first, *frames = learning(folder)
    each = [1500] + [120] * (len(frames) - 1) + [3000]  # milliseconds
    file = Path(__file__).with_name("learning.webp")
    first.save(file, save_all=True, append_images=frames, duration=each, loop=0, **LOSSLESS)
