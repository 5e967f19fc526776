"""Record how a few held-out inputs are filled over a run, for the page of grpo.tools.replay.

snapshots.jsonl begins with the inputs and what the base model makes of them. Then it's one line per
step: the completion of each input, and whether the rule calls it good.

    {"iteration": -1, "texts": [...], "masked": [...], "completions": [...], "good": [...]}
    {"iteration": 0, "completions": ["437+451=888", ...], "good": [true, ...]}

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

FILE = "snapshots.jsonl"
INPUTS = 8


@torch.no_grad()
@uncompiled()
def take_snapshot(policy: Policy, batch: Batch, rule) -> dict[str, list]:
    """Draw one completion of each input, and check it, if there's a rule.

    The random numbers are the batch's own, the same at every step. So if a completion changes from
    one step to the next, that's the policy and not the luck of the draw.
    """
    completions = decode(policy(batch).sample().completions[:, 0])  # from (N,T)
    snapshot = {"completions": completions}
    if rule:
        pairs = zip(completions, decode(batch.masked))
        snapshot["good"] = [rule.is_good(completion, masked) for completion, masked in pairs]
    return snapshot


def begin_snapshots(base: Policy, held_out: HeldOut, config: Config, start: int) -> None:
    """Write the first line. A resumed run with the same inputs keeps its file, up to `start`."""
    path = Path(config.out_dir) / FILE
    batch = held_out.batch[:INPUTS]
    inputs = {"texts": decode(batch.tokens), "masked": decode(batch.masked)}
    old = read_lines(path) if start and path.exists() else []
    if old and old[0].get("masked") == inputs["masked"]:
        cut_back(path, start)
    else:
        header = {"iteration": -1, **inputs, **take_snapshot(base, batch, held_out.rule)}
        path.write_text(json.dumps(header) + "\n", encoding="utf-8")


def record_snapshot(policy: Policy, held_out: HeldOut, config: Config, step: int) -> None:
    """Append how the policy fills the inputs after this step."""
    line = {"iteration": step, **take_snapshot(policy, held_out.batch[:INPUTS], held_out.rule)}
    with open(Path(config.out_dir) / FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
