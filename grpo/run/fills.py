"""Record how a few held-out inputs are filled over a run, for the page of grpo.tools.replay.

fills.jsonl begins with the inputs and what the base model makes of them. Then it's one line per
step: the text of each fill, and for each of its gaps the start, the end, and whether the rule calls
it good.

    {"iteration": -1, "texts": [...], "masked": [...], "fills": [...], "gaps": [...]}
    {"iteration": 0, "fills": ["437+451=888", ...], "gaps": [[[0, 11, true]], ...]}

Shapes: N inputs, T characters.
"""

import json
from pathlib import Path

import torch

from data.vocabulary import decode
from grpo.batch import Batch
from grpo.policy import Policy
from grpo.run.config import Config
from grpo.run.load import HeldOut
from grpo.run.log import cut_back, read_lines
from grpo.run.network import uncompiled

FILE = "fills.jsonl"
INPUTS = 8


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


def begin_fills(base: Policy, held_out: HeldOut, config: Config, start: int) -> None:
    """Write the first line. A resumed run with the same inputs keeps its file, up to `start`."""
    path = Path(config.out_dir) / FILE
    batch = held_out.batch[:INPUTS]
    inputs = {"texts": decode(batch.tokens), "masked": decode(batch.masked)}
    old = read_lines(path) if start and path.exists() else []
    if old and old[0]["masked"] == inputs["masked"]:
        cut_back(path, start)
    else:
        header = {"iteration": -1, **inputs, **fill_once(base, batch, held_out.rule)}
        path.write_text(json.dumps(header) + "\n", encoding="utf-8")


def record_fills(policy: Policy, held_out: HeldOut, config: Config, step: int) -> None:
    """Append how the policy fills the inputs after this step."""
    line = {"iteration": step, **fill_once(policy, held_out.batch[:INPUTS], held_out.rule)}
    with open(Path(config.out_dir) / FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
