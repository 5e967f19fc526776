"""Compute the metrics of one step.

`StepMetrics` computes metrics as tensors, and never makes the CPU wait for a GPU. METRICS holds
functions of the finished step: to add a metric of your own, write such a function and add a line.
It then appears in metrics.jsonl. If you want to see it in the
progress bar, too, add it to SHOWN in grpo/run/log.py.

Shapes: B inputs, T characters, G completions of each input.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from data.per_word import mean_over_blanks
from data.rules import check_gaps
from grpo.advantage import INDISTINCT
from grpo.batch import Batch
from grpo.distributed import gather, total_over_processes
from grpo.loss import Terms
from grpo.policy import Fills, Scores
from grpo.reward import accepts, fooled

PER_BLANK = ("entropy", "mean_log_prob", "mean_kl", "approx_kl", "clip_ratio")


def check_finite(metrics, step):
    """Turn {metric: scalar tensor} into {metric: number}, and wait for the device only once.

    Raises FloatingPointError for the first metric that is not finite. A metric that others are
    computed from comes before them, so this is where the trouble began.
    """
    numbers = dict(zip(metrics, torch.stack(list(metrics.values())).tolist()))
    for name, number in numbers.items():
        if not math.isfinite(number):
            line = f"step {step}: {name} is {number}, so an update was skipped"
            raise FloatingPointError(f"{line}; lower learning_rate, or check models and reward")
    return numbers


@dataclass(frozen=True)
class Rollout:
    """Keep the fills of a step, their scores and rewards, for the log."""

    batch: Batch
    fills: Fills
    old: Scores  # of the fills, under the policy that drew them
    reward: Tensor  # (B,G,T)
    parts: dict[str, Tensor]  # {name: (B,G,T)} what the reward is the weighted sum of
    advantages: Tensor  # (B,G,T)


class StepMetrics:
    """Collect the metrics of a step: append what each update gives, average at the end.

    Within an update the metrics in PER_BLANK are means over all of its blanks, in whichever
    micro-batch and process those are. The losses of its micro-batches add up.
    """

    def __init__(self, reward: Tensor, parts: dict[str, Tensor], mask: Tensor):
        """Compute the rollout's metrics from its rewards (B,G,T), and the mask (B,T)."""
        mask = gather(mask)
        total = mean_over_blanks(gather(reward), mask)  # (B,G)
        span = total.amax(dim=1) - total.amin(dim=1)  # (B,)
        self.rollout = {
            f"reward_{name}": mean_over_blanks(gather(part), mask).mean()
            for name, part in parts.items()
        }
        self.rollout |= {
            "mean_reward": total.mean(),
            "std_reward": total.std(dim=1, correction=0).mean(),
            "frac_reward_zero_std": (span <= INDISTINCT).float().mean(),
        }
        self.micro_batches = []  # of the update at hand, {name: sum}
        self.updates = []  # {name: mean}

    @torch.no_grad()
    def add(self, now: Scores, old: Scores, terms: Terms, mask: Tensor) -> None:
        """Add the sums of one micro-batch over its blanks, where mask (B,T) is True."""
        G = now.logp.shape[1]
        moved = now.logp - old.logp  # (B,G,T)
        sums = {
            "blanks": mask.sum(),
            "entropy": now.entropy.sum(),
            "mean_log_prob": now.logp.sum() / G,
            "mean_kl": now.kl.sum(),
            "approx_kl": (moved.exp() - 1 - moved).sum() / G,  # k3, of the policy that drew and now
            "clip_ratio": terms.clipped / G,
            "loss": terms.loss,
            "pg_loss": terms.pg_loss,
            "kl_penalty": terms.kl_penalty,
        }
        self.micro_batches.append({name: x.detach().float() for name, x in sums.items()})

    def end_update(self, grad_norm: Tensor) -> None:
        """Close an update, whose gradient had this norm before it was clipped."""
        names = self.micro_batches[0]
        sums = [sum(each[name] for each in self.micro_batches) for name in names]
        totals = dict(zip(names, total_over_processes(torch.stack(sums))))
        blanks = totals.pop("blanks").clamp(min=1)
        means = {name: x / blanks if name in PER_BLANK else x for name, x in totals.items()}
        self.updates.append(means | {"grad_norm": grad_norm})
        self.micro_batches = []

    def result(self) -> dict[str, Tensor]:
        """Average over the updates: -> {name: scalar tensor}."""
        n = len(self.updates)
        means = {name: sum(each[name] for each in self.updates) / n for name in self.updates[0]}
        return self.rollout | means


def different_fills(rollout):
    """Count the different completions of each group, and average the counts over the groups."""
    groups = gather(rollout.fills.completions).tolist()  # (B,G,T)
    return sum(len(set(map(tuple, group))) for group in groups) / len(groups)


def mean_advantage(rollout):
    """Average the advantages over all blanks. Far from 0, the baseline is off."""
    mask = gather(rollout.batch.mask)[:, None]  # (B,1,T)
    advantages = gather(rollout.advantages)  # (B,G,T)
    return (advantages * mask).sum() / (mask.sum() * advantages.shape[1]).clamp(min=1)


METRICS = {
    "different_fills": different_fills,
    "mean_advantage": mean_advantage,
}  # {name: function of a `Rollout`, to a number}


def fill_metrics(rollout: Rollout, rule) -> dict[str, float]:
    """Compute the METRICS of a step, and what the rule and the judge say about its completions.

    The share of gaps that are filled well has the rule's name (data/rules.py). `accepts` and
    `fooled` need the judge to be a part of the reward.
    """
    batch, completions = rollout.batch, rollout.fills.completions
    metrics = {}
    good, gaps = check_gaps(rule, completions, batch.tokens, batch.mask)  # (B,G,T), (B,T)
    good, gaps = gather(good), gather(gaps)
    if rule:
        metrics[rule.name] = good.sum() / (gaps.sum() * completions.shape[1]).clamp(min=1)
    if "judge" in rollout.parts:
        scores = gather(rollout.parts["judge"])  # (B,G,T)
        metrics["accepts"] = accepts(scores, gather(batch.words)).mean()
        share = fooled(scores, good, gaps)
        if share is not None:
            metrics["fooled"] = share
    metrics |= {name: function(rollout) for name, function in METRICS.items()}
    return {name: float(x) for name, x in metrics.items()}
