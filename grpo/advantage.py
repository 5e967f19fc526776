"""Advantages: how much better than the rest of its group is each completion?

    A = (r − baseline) / scale

A baseline is a function of the reward (B,G), and so is a scale. To add one of your own, write such
a function and a line in its table: the line's name is then a value of the setting.

Shapes: B masked inputs, G completions of each.
"""

import torch
from torch import Tensor

from grpo.distributed import gather

EPSILON = 1e-4  # added to a standard deviation
INDISTINCT = 1e-6  # rewards that differ by less than this share of the largest count as equal


def mean(reward: Tensor) -> Tensor:
    """The mean of the group, as in GRPO (2402.03300, section 4.1.2): (B,G) -> (B,1).

    It contains the completion's own reward. So the expected gradient is 1 − 1/G of the policy
    gradient.
    """
    return reward.mean(dim=1, keepdim=True)


def mean_of_others(reward: Tensor) -> Tensor:
    """The mean of the other G−1 rewards, as in RLOO (2402.14740): (B,G) -> (B,G).

    The expected gradient is the policy gradient itself.
    """
    return (reward.sum(dim=1, keepdim=True) - reward) / (reward.shape[1] - 1)


def nothing(reward: Tensor) -> Tensor:
    """0. With rewards of 0 and 1 only correct completions teach: rejection sampling."""
    return torch.zeros_like(reward)


BASELINES = {"mean": mean, "leave_one_out": mean_of_others, "none": nothing}


def deviation_of_group(reward: Tensor) -> Tensor:
    """The population standard deviation of each group + 1e-4, as in GRPO: (B,G) -> (B,1)."""
    return reward.std(dim=1, keepdim=True, correction=0) + EPSILON


def deviation_of_batch(reward: Tensor) -> Tensor:
    """The standard deviation over all completions of the step + 1e-4 (2508.08221): -> ()."""
    return gather(reward).std(correction=0) + EPSILON  # of all processes


def one(reward: Tensor) -> Tensor:
    """1, as in Dr. GRPO (2503.20783), so that β means what it says."""
    return torch.ones_like(reward)


SCALES = {"group": deviation_of_group, "batch": deviation_of_batch, "none": one}


def all_equal(reward: Tensor) -> Tensor:
    """Tell for each group whether its rewards are equal, but for rounding: (B,G) -> (B,1).

    A NaN compares as False, stays in, and ends the run.
    """
    span = reward.amax(dim=1, keepdim=True) - reward.amin(dim=1, keepdim=True)
    largest = reward.abs().amax(dim=1, keepdim=True)
    return span <= INDISTINCT * largest


def compute_advantages(reward: Tensor, config) -> Tensor:
    """Compare each completion with its group: reward (B,G) -> (B,G)."""
    centered = reward - BASELINES[config.baseline](reward)  # (B,G)
    if config.baseline != "none":
        # Equal rewards teach exactly nothing. Otherwise the rounding error of their mean would be
        # a tiny advantage, and dividing by a tiny deviation would blow it up.
        centered = centered.masked_fill(all_equal(reward), 0)
    return centered / SCALES[config.scale_rewards](reward)
