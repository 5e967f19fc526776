"""Watch runs learn: `python -m grpo.tools.replay out` writes a web page, out/replay.html.

Name several runs, as in `python -m grpo.tools.replay out-a out-b`, and one page compares them; it
goes to replay.html in the working directory. Curves are on top, from each run's metrics.jsonl. Runs
that differ only in their seed share a color. Below, a slider shows how a few held-out inputs were
filled over time, from snapshots.jsonl (grpo/run/log.py). The page itself is the template next
to this file, replay.html, with all of this as JSON.
"""

import json
from pathlib import Path

from data.files import write_whole
from data.user_mistake import Mistake, run_program
from grpo.evaluation.table import group_runs, read_json
from grpo.run.log import METRICS, SNAPSHOTS, read_lines

PAGE = Path(__file__).with_suffix(".html")


def read_run(folder: str) -> dict:
    """Read a run's metrics and snapshots."""
    return {
        "name": folder,
        "rule": read_json(folder, "config.json")["rule"],
        "metrics": read_lines(Path(folder) / METRICS),
        "snapshots": read_lines(Path(folder) / SNAPSHOTS),
    }


def make_page(folders: list[str]) -> str:
    """Put runs into the template: -> HTML."""
    runs = {folder: read_run(folder) for folder in folders}
    groups = group_runs(folders)
    for number, members in enumerate(groups.values()):
        for folder in members:
            runs[folder]["group"] = number
    content = json.dumps({"runs": [*runs.values()], "labels": [*groups]})
    content = content.replace("<", "\\u003c")  # so that no text can close the <script>
    return PAGE.read_text(encoding="utf-8").replace("DATA", content, 1)


def main(folders: list[str]) -> None:
    if not folders or folders[0].startswith("-"):
        raise Mistake("name the folder of a run: python -m grpo.tools.replay out")
    path = Path(folders[0] if len(folders) == 1 else ".") / "replay.html"
    write_whole(path, make_page(folders).encode())
    print(f"open in a browser: {path}")


if __name__ == "__main__":
    run_program(main, __doc__)
