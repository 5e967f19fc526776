"""Watch runs learn: `python -m grpo.tools.replay out` writes a web page, out/replay.html.

Name several runs, as in `python -m grpo.tools.replay out-a out-b`, and one page compares them; it
goes to replay.html in the working directory. Curves are on top, from each run's metrics.jsonl. Runs
that differ only in their seed share a color. Below, a slider shows how a few held-out inputs were
filled over time, from fills.jsonl. A run records that file with `begin` and `record`:

    {"iteration": -1, "texts": [...], "masked": [...], "fills": [...], "gaps": [...]}
    {"iteration": 0, "fills": ["437+451=888", ...], "gaps": [[[0, 11, true]], ...]}

The first line has the inputs, and what the base model makes of them. Then it's one line per step:
the text of each fill, and for each of its gaps the start, the end, and whether the rule calls it
good. The page itself is the template next to this file, replay.html, with all of this as JSON.

Shapes: N inputs, T characters.
"""

import json
from pathlib import Path

import torch

from data.files import write_whole
from data.user_mistake import Mistake, exit_on_mistake
from data.vocabulary import decode
from grpo.batch import Batch
from grpo.policy import Policy
from grpo.run.config import Config, Parser
from grpo.run.load import HeldOut
from grpo.run.log import cut_back, read_lines
from grpo.run.network import uncompiled
from grpo.run.runs import group_runs

PAGE = Path(__file__).with_suffix(".html")
FILE = "fills.jsonl"
INPUTS = 8


def shown_inputs(held_out: HeldOut) -> Batch:
    """Pick the inputs to show. Those with a single blank go last: one blank can't clash."""
    single = held_out.batch.mask.sum(dim=1) == 1  # (N,)
    first = single.int().argsort(stable=True)[:INPUTS]
    return held_out.batch[first]


@torch.no_grad()
@uncompiled()
def fill_once(policy: Policy, batch: Batch, rule) -> dict[str, list]:
    """Draw one fill of each input, and check its gaps. Without a rule there are none to check.

    The random numbers are the batch's own, the same at every step. So if a fill changes from one
    step to the next, that's the policy and not the luck of the draw.
    """
    fills = decode(policy(batch).sample().completions[:, 0])  # from (N,T)
    gaps = []
    for text, mask, fill in zip(decode(batch.tokens), batch.mask.cpu().numpy(), fills):
        spans = rule.gaps(text, mask) if rule else []
        gaps.append([[start, end, rule.is_good(fill, start, end)] for start, end in spans])
    return {"fills": fills, "gaps": gaps}


def begin(base: Policy, held_out: HeldOut, config: Config, start: int) -> None:
    """Write the first line. A resumed run with the same inputs keeps its file, up to `start`."""
    path = Path(config.out_dir) / FILE
    batch = shown_inputs(held_out)
    inputs = {"texts": decode(batch.tokens), "masked": decode(batch.masked)}
    old = read_lines(path) if start and path.exists() else []
    if old and old[0]["masked"] == inputs["masked"]:
        cut_back(path, start)
    else:
        header = {"iteration": -1, **inputs, **fill_once(base, batch, held_out.rule)}
        path.write_text(json.dumps(header) + "\n", encoding="utf-8")


def record(policy: Policy, held_out: HeldOut, config: Config, step: int) -> None:
    """Append how the policy fills the inputs after this step."""
    line = {"iteration": step, **fill_once(policy, shown_inputs(held_out), held_out.rule)}
    with open(Path(config.out_dir) / FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_run(folder: str) -> dict:
    """Read a run's metrics and fills. Raises a Mistake if it hasn't finished a step."""
    metrics, fills = Path(folder) / "metrics.jsonl", Path(folder) / FILE
    steps = read_lines(metrics) if metrics.exists() else []
    if not steps:
        raise Mistake(f"{metrics} is missing or empty; name the out_dir of a run that took a step")
    return {
        "name": folder,
        "metrics": steps,
        "fills": read_lines(fills) if fills.exists() else [],
    }


def make_page(folders: list[str]) -> str:
    """Put runs into the template: -> HTML."""
    runs = {folder: read_run(folder) for folder in folders}
    groups = group_runs(folders)
    for number, members in enumerate(groups.values()):
        for folder in members:
            runs[folder]["group"] = number
    shown = [run for run in runs.values() if "group" in run]  # a seed counts once in its group
    content = json.dumps({"runs": shown, "labels": list(groups)})
    content = content.replace("<", "\\u003c")  # so that no text can close the <script>
    return PAGE.read_text(encoding="utf-8").replace("DATA", content, 1)


def main(arguments: list[str] | None = None) -> None:
    with exit_on_mistake("replay"):
        parser = Parser(
            prog="python -m grpo.tools.replay",
            description="Write a web page on how runs learned: curves, and fills over time.",
        )
        parser.add_argument(
            "folders", metavar="out_dir", nargs="+", help="a run's folder; name several to compare"
        )
        folders = parser.parse_args(arguments).folders
        path = Path(folders[0] if len(folders) == 1 else ".") / "replay.html"
        write_whole(path, make_page(folders).encode())
        print(f"open in a browser: {path}")


if __name__ == "__main__":
    main()
