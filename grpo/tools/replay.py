"""Watch it learn: `python -m grpo.tools.replay out` writes out/replay.html, for any browser.

A push is A · (1 − q(y)): the advantage of a drawn character times the derivative of log q(y) by its
own logit over the temperature, in the step's first update. With a latent, q(y) is what the policy
gives the letter after those before it in its word. Letters: G completions, n blanks of one.
"""

import json
from pathlib import Path

import numpy as np

from data.mistake import refuse
from grpo.plumbing.checkpoint import write
from grpo.plumbing.config import Parser, exit_on_mistake
from grpo.plumbing.log import read_metrics
from grpo.plumbing.recorder import FILE, FORMAT, unpack

PAGE = Path(__file__).with_suffix(".html")
CURVES = ("mean_reward", "valid_words", "mean_kl", "entropy")
STRONG = 90  # percentile of a run's pushes from which on the colour is full


def load(folder):
    """-> the lines of replay.jsonl and of metrics.jsonl. ValueError where there is no replay."""
    path = Path(folder) / FILE
    lines = read_metrics(path) if path.exists() else []
    fix = "name the out_dir of a run, made without --replay=false"
    refuse(len(lines) < 2, f"{path} is missing or holds no step; {fix}")
    found = lines[0].get("format")
    refuse(found != FORMAT, f"{path} has format {found}, not {FORMAT}; make the run again")
    return lines, read_metrics(path.with_name("metrics.jsonl"))


def group(line):
    """A step's completions, the best first: of each its numbers, (n,), and their means."""
    draws = {}  # (G,n) each
    for name in ("rewards", "advantages", "logp"):
        draws[name] = unpack(line[name], "f2", len(line["fills"][0])).astype(float)
    draws["push"] = draws["advantages"] * (1 - np.exp(draws["logp"]))  # (G,n)
    rows = []
    for i in np.argsort(-draws["rewards"].mean(axis=1), kind="stable"):
        row = {name: values[i].round(3).tolist() for name, values in draws.items()}
        reward, advantage = (draws[name][i].mean().round(3) for name in ("rewards", "advantages"))
        rows.append(row | {"fill": line["fills"][i], "reward": reward, "advantage": advantage})
    return rows


def curve(metrics, name, lines):
    """One figure of these steps: its values, and its line in a box of 100 x 40."""
    logged = {figures["iteration"]: figures[name] for figures in metrics}
    y = np.array([logged[line["iteration"]] for line in lines])
    heights = 38 - 36 * (y - y.min()) / (np.ptp(y) or 1)
    across = 100 * np.arange(1, 1 + len(y)) / len(y)
    points = " ".join(f"{x:.2f},{y:.2f}" for x, y in zip(across, heights))
    return {"name": name, "values": dict(enumerate(y.round(3).tolist(), 1)), "points": points}


def page(folder):
    """The page, with all that it shows."""
    (header, *lines), metrics = load(folder)
    groups = [group(line) for line in lines]
    pushes = [row["push"] for rows in groups for row in rows]
    every = (header, *lines)
    shown = {name: header[name] for name in ("vocabulary", "texts", "masked")}
    shown |= {
        "run": str(folder),
        "steps": [line["iteration"] + 1 for line in every],
        "guesses": [line["guess"] for line in every],
        "probabilities": [line["probabilities"] for line in every],
        "inputs": [line["masked"] for line in lines],
        "groups": groups,
        "strong": np.percentile(np.abs(np.concatenate(pushes)), STRONG) or 1,
        "curves": [curve(metrics, name, lines) for name in CURVES],
    }
    content = json.dumps(shown).replace("<", "\\u003c")  # no text ends the script
    return PAGE.read_text().replace("DATA", content, 1)


def main(arguments=None):
    with exit_on_mistake("replay"):
        parser = Parser(prog="python -m grpo.tools.replay", description="Make a page of a run.")
        parser.add_argument("folder", metavar="out_dir", help="a run's folder")
        folder = parser.parse_args(arguments).folder
        write(Path(folder) / "replay.html", page(folder).encode())
        print(f"open in a browser: {folder}/replay.html")


if __name__ == "__main__":
    main()
