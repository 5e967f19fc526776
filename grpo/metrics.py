"""Compute the metrics of one step.

`rollout_metrics` looks at what was drawn, and at what it earned. `UpdateMetrics` collects what the
updates give, as tensors, and never makes the CPU wait for a GPU. To add a metric of your own, add a
line to either. It then appears in metrics.jsonl. If you want to see it in the progress bar, too,
add it to SHOWN in grpo/run/log.py.

Shapes: B inputs, T characters, G completions of each input.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from data.per_word import distinct, mean_over_blanks
from data.rules import Rule, check_gaps
from grpo.advantage import all_equal
from grpo.batch import Batch, Rows
from grpo.distributed import gather, total_over_processes
from grpo.policy import LogProbs, Sample
from grpo.reward import judge_metrics

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
    reward: Tensor  # (B,G,T)
    parts: dict[str, Tensor]  # {name: (B,G,T)} what the reward is the weighted sum of
    advantages: Tensor  # (B,G,T)


def mean_number_of_different(which: Tensor) -> Tensor:
    """Count the different texts in each group, and average: which (B,G) from `distinct` -> ().

    What's negative doesn't count.
    """
    ordered = F.pad(which, (1, 0), value=-1).sort(dim=1).values  # (B,1+G)
    is_new = ordered.diff(dim=1) > 0  # (B,G) each text's first copy
    return is_new.sum(dim=1).double().mean()


def to_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Turn scalars into numbers, all at once: each time the CPU would have to wait for a GPU."""
    numbers = torch.stack([x.double() for x in metrics.values()])
    return dict(zip(metrics, numbers.tolist()))


class UpdateMetrics:
    """Collect the metrics of a step's updates: append what each gives, average at the end.

    The metrics in PER_BLANK are means over the blanks of all updates, in whichever micro-batch and
    process those are. The losses of micro-batches add up, and are averaged over the updates.
    """

    def __init__(self):
        self.micro_batches = []  # of the update at hand, {name: sum}
        self.updates = []  # {name: mean}

    @torch.no_grad()
    def add(
        self,
        now: LogProbs,
        old: LogProbs,
        losses: dict[str, Tensor],
        bounded: Tensor,  # (B,G,T) bool, where a bound is in force
        mask: Tensor,  # (B,T) True at a blank
    ) -> None:
        """Add the sums of one micro-batch over its blanks."""
        G = now.logp.shape[1]
        moved = now.logp - old.logp  # (B,G,T)
        sums = {
            "blanks": mask.sum(),
            "entropy": now.entropy.sum(),
            "mean_log_prob": now.logp.sum() / G,
            "mean_kl": now.kl.sum(),
            "approx_kl": (moved.exp() - 1 - moved).sum() / G,  # k3, of the policy that drew and now
            "clip_ratio": bounded.sum() / G,
            **losses,
        }
        self.micro_batches.append({name: x.detach().float() for name, x in sums.items()})

    def end_update(self, grad_norm: Tensor) -> None:
        """Close an update, whose gradient had this norm before it was clipped."""
        names = self.micro_batches[0]
        sums = [sum(each[name] for each in self.micro_batches) for name in names]
        totals = dict(zip(names, total_over_processes(torch.stack(sums))))
        blanks = totals["blanks"] = totals["blanks"].clamp(min=1)
        means = {name: x / blanks if name in PER_BLANK else x for name, x in totals.items()}
        self.updates.append(means | {"grad_norm": grad_norm})
        self.micro_batches = []

    def result(self) -> dict[str, Tensor]:
        """Average over the updates. In PER_BLANK an update counts as often as it has blanks."""
        names = self.updates[0]
        means = {name: torch.stack([each[name] for each in self.updates]) for name in names}
        blanks = means.pop("blanks")  # (updates,) like each of the means
        for name in PER_BLANK:
            means[name] = means[name] * (len(blanks) * blanks / blanks.sum())
        return {name: x.mean() for name, x in means.items()}


def rollout_metrics(rollout: Rollout, rule: Rule | None) -> dict[str, Tensor]:
    """Compute what a step's completions earned, and what the rule and the judge say about them.

    The share of gaps that are filled well has the rule's name (data/rules.py). `accepts` and
    `fooled` need the judge to be a part of the reward.
    """
    rollout = rollout.map(gather)  # of all processes
    batch, groups, mask = rollout.batch, rollout.sample.completions, rollout.batch.mask
    parts = rollout.parts
    reward = mean_over_blanks(rollout.reward, mask)  # (B,G)
    metrics = {f"reward_{name}": mean_over_blanks(x, mask).mean() for name, x in parts.items()}
    metrics["mean_reward"] = reward.mean()
    metrics["std_reward"] = reward.std(dim=1, correction=0).mean()
    metrics["frac_reward_zero_std"] = all_equal(reward).float().mean()
    texts, which = distinct(groups)  # (D,T), (B,G)
    metrics["different_completions"] = mean_number_of_different(which)
    # with a baseline this is near 0, unless blanks are left out
    advantages = rollout.advantages * mask[:, None]  # (B,G,T)
    metrics["mean_advantage"] = advantages.sum() / (mask.sum() * reward.shape[1]).clamp(min=1)
    good, gaps = check_gaps(rule, texts, which, batch.tokens, mask)  # (B,G,T), (B,T)
    if rule:
        metrics[rule.name] = good.sum() / (gaps.amax(dim=1).sum() * good.shape[1]).clamp(min=1)
    if "judge" in parts:
        metrics |= judge_metrics(parts["judge"], batch.words, good, gaps)
    return metrics
