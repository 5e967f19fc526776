"""Compute the metrics of one step.

`StepMetrics` computes metrics as tensors, and never makes the CPU wait for a GPU. `text_metrics`
reads the fills as text when a line is logged. If a metric of your own needs the words, add it to
`text_metrics`.

Shapes: B inputs, T characters, G completions of each input.
"""

import math
from dataclasses import dataclass

import torch

from grpo.advantage import INDISTINCT
from grpo.batch import Batch, Rows
from grpo.distributed import gather, total_over_processes
from grpo.logprobs import Scores
from grpo.reward import valid_share
from grpo.sampling import Fills


def check_finite(metrics, step):
    """Turn {metric: scalar tensor} into {metric: number}, and wait for the device only once.

    Raises FloatingPointError for the first metric that is not finite. A metric that others are
    computed from comes before them, so this is where the trouble began.
    """
    numbers = dict(zip(metrics, torch.stack(list(metrics.values())).tolist()))
    for name, number in numbers.items():
        if not math.isfinite(number):
            line = f"step {step}: {name} is {number}, so the update was skipped"
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
        self.figures = {
            "mean_reward": total.mean(),
            "std_reward": total.std(),
            "frac_reward_zero_std": (span <= INDISTINCT).float().mean(),
        }
        self.figures |= {name: values.mean() for name, values in parts.items()}
        self.sums = {}
        self.norms = []

    @torch.no_grad()
    def add(self, now, old, terms, blanks):
        """Add the metrics of one micro-batch.

        `now` and `old` are its `Scores`, and `terms` is its `Terms`. `blanks` is the number of
        blanks in the whole update, on all processes.
        """
        draws = now.logp.shape[1] * blanks
        d = now.logp - old.logp  # (B,G,T)
        drift = d.exp() - 1 - d  # (B,G,T) the k3 estimate of KL(old‖now)
        figures = {  # causes before effects, see `check_finite`
            "entropy": now.entropy.sum() / blanks,
            "mean_log_prob": now.logp.sum() / draws,
            "mean_kl": now.kl.sum() / blanks,
            "approx_kl": drift.sum() / draws,
            "clip_ratio": terms.clipped / draws,
            "loss": terms.loss,
            "pg_loss": terms.pg_loss,
            "kl_penalty": terms.kl_penalty,
        }
        for name, value in figures.items():
            self.sums[name] = self.sums.get(name, 0) + value.float()

    def updated(self, grad_norm):
        """Count an update, and keep the norm of its gradient, a scalar tensor."""
        self.norms.append(grad_norm)

    def result(self):
        """Return the metrics of the whole step, {name: scalar tensor}."""
        sums = torch.stack(list(self.sums.values())) / len(self.norms)
        of_updates = dict(zip(self.sums, total_over_processes(sums)))
        return self.figures | of_updates | {"grad_norm": torch.stack(self.norms).mean()}


def text_metrics(rollout, lexicon, cut):
    """Return {metric: number} of the whole step. `valid_share` explains lexicon and cut."""
    completions = rollout.fills.completions  # (B,G,T)
    shares = valid_share(lexicon, completions, rollout.batch, cut)  # (B,G)
    return {"valid_words": gather(shares).mean().item()}
