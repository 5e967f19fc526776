"""Compute the metrics of one step.

`rollout_metrics` looks at what was drawn, and at what it earned. `update_metrics` averages what the
updates gave. To add a metric of your own, add a line to the first. It then appears in
metrics.jsonl, and if you name it in BAR, in the progress bar, too.

    frac_reward_zero_std   the share of dead groups, whose completions all earned the same
    entropy, mean_kl       of the policy, and from the reference: exact, per blank, in nats
    clip_ratio             the share of drawn characters that the clip keeps from pushing
    approx_kl              how far the policy is from the one that drew
    loss                   pg_loss + kl_penalty - the entropy bonus
    grad_norm              of the gradient, before it's clipped

The last five lines are averaged over a step's updates. Names that the final table has, too, are
explained in grpo/evaluation/evaluate.py.

Shapes: B inputs, T characters, G completions of each input.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from data.rules import Rule, check
from grpo.advantage import all_equal
from grpo.batch import Batch, Rows
from grpo.distributed import gather, total_over_processes
from grpo.policy import LogProbs, Sample
from grpo.reward import distinct, judge_metrics

BAR = {"reward": "mean_reward", "accepts": "accepts", "kl": "mean_kl"}  # and the rule, if any
PER_BLANK = ("entropy", "mean_log_prob", "mean_kl", "approx_kl", "clip_ratio")


def check_finite(metrics: dict[str, float], step: int) -> None:
    """Raise FloatingPointError for the first metric that isn't finite.

    Metrics come after those they're computed from, so the first one is where the trouble began.
    """
    for name, number in metrics.items():
        if not math.isfinite(number):
            line = f"step {step}: {name} is {number}"
            raise FloatingPointError(f"{line}; lower learning_rate, or check models and reward")


@dataclass(frozen=True)
class Rollout(Rows):
    """Keep the completions of a step, their log-probabilities and rewards, for the log."""

    batch: Batch
    sample: Sample
    old: LogProbs  # of the sample, under the policy that drew it
    reward: Tensor  # (B,G)
    parts: dict[str, Tensor]  # {name: (B,G)} what the reward is the weighted sum of
    advantages: Tensor  # (B,G)


def mean_number_of_different(which: Tensor) -> Tensor:
    """Count the different texts in each group, and average: which (B,G) from `distinct` -> ().

    Negative numbers are ignored.
    """
    ordered = F.pad(which, (1, 0), value=-1).sort(dim=1).values  # (B,1+G)
    is_new = ordered.diff(dim=1) > 0  # (B,G) each text's first copy
    return is_new.sum(dim=1).double().mean()


def to_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Turn scalars into numbers, all at once: each time the CPU would have to wait for a GPU."""
    numbers = torch.stack([x.double() for x in metrics.values()])
    return dict(zip(metrics, numbers.tolist()))


def update_metrics(figures: list[dict[str, Tensor]], norms: list[Tensor]) -> dict[str, Tensor]:
    """Average what `grpo_loss` returned for each micro-batch, and the gradient norm of each update.

    The metrics in PER_BLANK are means over the blanks of all updates, in whichever micro-batch and
    process those are. The losses of micro-batches add up, and are averaged over the updates.
    """
    sums = torch.stack([sum(each[name] for each in figures) for name in figures[0]])
    totals = dict(zip(figures[0], total_over_processes(sums)))
    blanks = totals.pop("blanks").clamp(min=1)
    means = {}
    for name, total in totals.items():
        means[name] = total / (blanks if name in PER_BLANK else len(norms))
    means["grad_norm"] = torch.stack(norms).mean()  # last, because it comes from the loss
    return means


def rollout_metrics(rollout: Rollout, rule: Rule | None) -> dict[str, Tensor]:
    """Compute what a step's completions earned, and what the rule and the judge say about them.

    The share of good completions has the rule's name (data/rules.py). `accepts` and `fooled` need
    the judge to be a part of the reward.
    """
    rollout = rollout.map(gather)  # of all processes
    reward, completions = rollout.reward, rollout.sample.completions
    metrics = {f"reward_{name}": part.mean() for name, part in rollout.parts.items()}
    metrics["mean_reward"] = reward.mean()
    metrics["std_reward"] = reward.std(dim=1, correction=0).mean()
    metrics["frac_reward_zero_std"] = all_equal(reward).float().mean()
    _, which = distinct(completions)  # (B,G)
    metrics["different_completions"] = mean_number_of_different(which)
    metrics["mean_advantage"] = rollout.advantages.mean()  # with a baseline near 0
    good = check(rule, completions, rollout.batch.masked) if rule else None  # (B,G)
    if rule:
        metrics[rule.name] = good.float().mean()
    if "judge" in rollout.parts:
        metrics |= judge_metrics(rollout.parts["judge"], good)
    return metrics
