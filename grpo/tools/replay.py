"""Show how a run learns: `python -m grpo.tools.replay out` writes the web page out/replay.html.

The page shows step by step how the run fills held-out texts, and which of the letters drawn in a
step became likelier or less likely. The template beside this file, replay.html, draws the page.
This command puts data into the template: the run's metrics, its settings, and the lines that
grpo/plumbing/replay_recorder.py recorded.
"""

import json
from pathlib import Path

from data.exceptions import refuse
from grpo.plumbing.checkpoint import write
from grpo.plumbing.command_line import Parser, exit_on_mistake
from grpo.plumbing.log import read_metrics
from grpo.plumbing.replay_recorder import FILE, FORMAT

PAGE = Path(__file__).with_suffix(".html")
CURVES = ("mean_reward", "valid_words", "mean_kl", "entropy")


def load(folder):
    """Read the lines of replay.jsonl and metrics.jsonl. Raises a Mistake if there is no replay."""
    path = Path(folder) / FILE
    lines = read_metrics(path) if path.exists() else []
    fix = "name the out_dir of a run that was made with --replay=true, the default"
    refuse(len(lines) < 2, f"{path} is missing or holds no step; {fix}")
    found = lines[0].get("format")
    refuse(found != FORMAT, f"{path} has format {found}, not {FORMAT}; make the run again")
    return lines, read_metrics(path.with_name("metrics.jsonl"))


def page(folder):
    """Fill the template with a run's recorded lines, curves and settings: -> the page as HTML."""
    lines, metrics = load(folder)
    figures = {line["iteration"]: line for line in metrics}
    shown = {
        "run": str(folder),
        "lines": lines,
        "curves": {
            name: [figures[line["iteration"]][name] for line in lines[1:]] for name in CURVES
        },
        "config": json.loads((Path(folder) / "config.json").read_text()),
    }
    content = json.dumps(shown).replace("<", "\\u003c")  # no text can close the <script>
    return PAGE.read_text().replace("DATA", content, 1)


def main(arguments=None):
    with exit_on_mistake("replay"):
        parser = Parser(
            prog="python -m grpo.tools.replay",
            description="Write the web page replay.html, which shows how a run learned.",
        )
        parser.add_argument("folder", metavar="out_dir", help="a run's folder")
        folder = parser.parse_args(arguments).folder
        write(Path(folder) / "replay.html", page(folder).encode())
        print(f"open in a browser: {folder}/replay.html")


if __name__ == "__main__":
    main()
