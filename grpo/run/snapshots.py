"""Record how a few held-out inputs are filled over a run, for the page of grpo.tools.replay.

snapshots.jsonl begins with the inputs and what the base model makes of them. Then it's one line per
step: the completion of each input, and whether the rule calls it good.

    {"iteration": -1, "texts": [...], "masked": [...], "completions": [...], "good": [...]}
    {"iteration": 0, "completions": ["437+451=888", ...], "good": [true, ...]}

Shapes: N inputs, T characters.
"""

from pathlib import Path

import torch

from data.vocabulary import decode
from grpo.policy import Policy
from grpo.run.config import Config
from grpo.run.load import HeldOut
from grpo.run.log import SNAPSHOTS, append, read_lines
from grpo.run.network import uncompiled

INPUTS = 8


@torch.no_grad()
@uncompiled()
def take_snapshot(policy: Policy, held_out: HeldOut) -> dict[str, list]:
    """Draw one completion of each input, and check it, if there's a rule.

    The random numbers are the batch's own, the same at every step. So if a completion changes from
    one step to the next, that's the policy and not the luck of the draw.
    """
    batch = held_out.batch[:INPUTS]
    completions = decode(policy(batch.masked).sample(batch).completions[:, 0])  # from (N,T)
    snapshot = {"completions": completions}
    if held_out.rule:
        pairs = zip(completions, decode(batch.masked))
        snapshot["good"] = [held_out.rule.is_good(text, masked) for text, masked in pairs]
    return snapshot


def record_snapshot(policy: Policy, held_out: HeldOut, config: Config, step: int) -> None:
    """Append how the policy fills the inputs after this step, and before them the inputs."""
    path = Path(config.out_dir) / SNAPSHOTS
    line = {"iteration": step, **take_snapshot(policy, held_out)}
    append(path, line)


def begin_snapshots(base: Policy, held_out: HeldOut, config: Config) -> None:
    """Write the first line, unless the run is resumed with the same inputs."""
    path = Path(config.out_dir) / SNAPSHOTS
    batch = held_out.batch[:INPUTS]
    inputs = {"texts": decode(batch.tokens), "masked": decode(batch.masked)}
    old = read_lines(path)
    if not old or old[0]["masked"] != inputs["masked"]:
        path.unlink(missing_ok=True)
        append(path, {"iteration": -1, **inputs, **take_snapshot(base, held_out)})
