"""Advantages: how much better than the rest of its group is each completion?

    A = (r − baseline) / scale

Each baseline is a function of the reward (B,G,T) and returns the reward minus the baseline,
(B,G,T). Each scale is a function of (reward, mask) and returns what to divide by. To add one of
your own, write such a function and a line in its table: the line's name is then a value of the
setting.

Shapes: B masked inputs, T characters, G completions of each.
"""

import torch
from torch import Tensor

from grpo.distributed import gather

EPSILON = 1e-4  # added to a standard deviation
INDISTINCT = 1e-6  # rewards that differ by less than this share of the largest count as equal


def all_equal(reward: Tensor) -> Tensor:
    """Tell for each group whether its rewards are equal, but for rounding: (B,G,...) -> (B,1,...).

    A NaN compares as False, stays in, and ends the run.
    """
    span = reward.amax(dim=1, keepdim=True) - reward.amin(dim=1, keepdim=True)
    largest = reward.abs().amax(dim=1, keepdim=True)
    return span <= INDISTINCT * largest


def minus_mean(reward: Tensor) -> Tensor:
    """r − the mean of the group, as in GRPO (2402.03300, section 4.1.2): (B,G,T) -> (B,G,T).

    If a group's rewards are all equal, that's exactly 0. The rounding error of the mean would be a
    tiny advantage, and dividing by a tiny deviation would blow it up.
    """
    centered = reward - reward.mean(dim=1, keepdim=True)  # (B,G,T)
    return centered.masked_fill(all_equal(reward), 0)


def minus_mean_of_others(reward: Tensor) -> Tensor:
    """r − the mean of the other G−1 rewards, as in RLOO (2402.14740): (B,G,T) -> (B,G,T).

    It's G/(G−1) times `minus_mean`, and the one whose expectation is the policy gradient itself.
    """
    G = reward.shape[1]
    return minus_mean(reward) * (G / (G - 1))


def minus_nothing(reward: Tensor) -> Tensor:
    """r itself. With rewards of 0 and 1 only correct completions teach: rejection sampling."""
    return reward


BASELINES = {"mean": minus_mean, "leave_one_out": minus_mean_of_others, "none": minus_nothing}


def deviation_of_group(reward: Tensor, mask: Tensor) -> Tensor:
    """The population standard deviation of each group + 1e-4, as in GRPO: -> (B,1,T)."""
    return reward.std(dim=1, keepdim=True, correction=0) + EPSILON


def deviation_of_batch(reward: Tensor, mask: Tensor) -> Tensor:
    """The standard deviation over all blanks of the step + 1e-4 (2508.08221): -> ()."""
    every = gather(reward)  # (B,G,T) of all processes
    counted = gather(mask)[:, None].expand(every.shape).to(every.dtype)  # (B,G,T)
    blanks = counted.sum().clamp(min=1)
    mean = (counted * every).sum() / blanks
    variance = (counted * (every - mean) ** 2).sum() / blanks
    return variance.sqrt() + EPSILON


SCALES = {
    "none": lambda reward, mask: 1,  # as in Dr. GRPO (2503.20783), so that β means what it says
    "group": deviation_of_group,
    "batch": deviation_of_batch,
}


def compute_advantages(reward: Tensor, entropy: Tensor, mask: Tensor, config) -> Tensor:
    """Compare each completion with its group: reward (B,G,T), entropy, mask (B,T) -> (B,G,T)."""
    centered = BASELINES[config.baseline](reward)  # (B,G,T)
    advantages = centered / SCALES[config.scale_rewards](reward, mask)  # (B,G,T)
    if config.top_entropy_quantile < 1:
        uncertain = most_uncertain(entropy, mask, config.top_entropy_quantile)  # (B,T)
        advantages = advantages * uncertain[:, None]
    return advantages


def most_uncertain(entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Find the share of the step's blanks with the largest entropy: (B,T) -> (B,T) bool.

    Only these learn from the reward ("Beyond the 80/20 rule", 2506.01939), plus any that tie with
    the last of them.
    """
    at_blanks = gather(entropy).where(gather(mask), torch.nan)  # (B,T) of all processes
    threshold = torch.nanquantile(at_blanks, 1 - share)  # ()
    return entropy >= threshold
