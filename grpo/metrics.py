"""Compute the metrics of one step.

`StepMetrics` computes metrics as tensors, and never makes the CPU wait for a GPU. METRICS holds
functions of the finished step: to add a metric of your own, write such a function and add a line.
It then stands in metrics.jsonl, and the page of curves offers it. If you want to see it in the
progress bar, too, add it to SHOWN in grpo/run/log.py.

Shapes: B inputs, T characters, G completions of each input.
"""

import math
from dataclasses import dataclass

import torch

from grpo.advantage import INDISTINCT
from grpo.batch import Batch, Rows
from grpo.distributed import gather, total_over_processes
from grpo.policy import Fills, Scores
from grpo.reward import count_good

# What the updates of a step are averaged to. Causes stand before effects, see `check_finite`.
NAMES = (
    *("entropy", "mean_log_prob", "mean_kl", "approx_kl", "clip_ratio"),  # means over the blanks
    *("loss", "pg_loss", "kl_penalty"),
)


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
class Rollout(Rows):
    """Keep the fills of a step, their scores and rewards, for the log and the replay."""

    batch: Batch
    fills: Fills
    old: Scores  # of the fills, under the policy that drew them
    reward: torch.Tensor  # (B,G,T)
    advantages: torch.Tensor  # (B,G,T)


class StepMetrics:
    """Collect the metrics of one step.

    It adds up the metrics of an update's micro-batches, and averages them over the updates.
    """

    def __init__(self, parts):
        """Compute the rollout's metrics from its rewards, {name: (B,G)}."""
        parts = {name: gather(values) for name, values in parts.items()}
        total = parts.pop("reward")  # (B,G)
        span = total.amax(dim=1) - total.amin(dim=1)  # (B,)
        self.figures = {name: values.mean() for name, values in parts.items()}
        self.figures |= {
            "mean_reward": total.mean(),
            "std_reward": total.std(dim=1, correction=0).mean(),
            "frac_reward_zero_std": (span <= INDISTINCT).float().mean(),
        }
        self.sums = 0  # of the update at hand, (9,)
        self.updates = []  # of each finished update
        self.norms = []

    @torch.no_grad()
    def add(self, now, old, terms, mask):
        """Add the metrics of one micro-batch, whose blanks are in `mask` (B,T).

        `now` and `old` are its `Scores`, and `terms` is its `Terms`.
        """
        G = now.logp.shape[1]
        d = now.logp - old.logp  # (B,G,T)
        drift = d.exp() - 1 - d  # (B,G,T) the k3 estimate of KL(old‖now)
        of_blanks = [  # in the order of NAMES
            now.entropy.sum(),
            now.logp.sum() / G,
            now.kl.sum(),
            drift.sum() / G,
            terms.clipped / G,
        ]
        of_loss = [terms.loss, terms.pg_loss, terms.kl_penalty]
        self.sums = self.sums + torch.stack([mask.sum(), *of_blanks, *of_loss]).float()

    def end_update(self, grad_norm):
        """Close an update, whose gradient had this norm, a scalar tensor."""
        self.updates.append(self.sums)
        self.sums = 0
        self.norms.append(grad_norm)

    def result(self):
        """Return the metrics of the whole step, {name: scalar tensor}."""
        sums = total_over_processes(torch.stack(self.updates))  # (updates,9)
        blanks, of_blanks, of_loss = sums.split([1, 5, 3], dim=1)
        means = torch.cat([of_blanks / blanks.clamp(min=1), of_loss], dim=1)  # (updates,8)
        of_updates = dict(zip(NAMES, sum(means) / len(means)))
        return self.figures | of_updates | {"grad_norm": torch.stack(self.norms).mean()}


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


def fill_metrics(rollout, rule):
    """Return {metric: number} of the step's fills: the METRICS, and the share that is good.

    `rule` says which fills are good (data/rules.py), and its name is that of the share.
    """
    good, gaps = count_good(rule, rollout.fills.completions, rollout.batch)  # (B,G), (B,)
    share = gather(good).sum() / (gather(gaps).sum() * good.shape[1]).clamp(min=1)
    return {rule.name: share.item()} | {name: float(f(rollout)) for name, f in METRICS.items()}
