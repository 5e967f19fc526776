"""Rewards of a group -> advantages: how much better than the rest of its group was each completion?

Letters: B masked inputs, G group size. Rewards are (B,G), or (B,G,T) where every blank is credited on its own.
"""

import torch

EPSILON = 1e-4  # added to the standard deviation
INDISTINCT = 1e-6  # rewards that span less than this are equal but for rounding


def advantages(rewards, baseline="mean", scale_rewards="group", mask=None):
    """A = (reward − baseline) / scale, over the group: rewards (B,G) or (B,G,T) of the whole step -> the same shape.

    mask            (B,1,T)        which of (B,G,T) are blanks; the rest does not count
    baseline        mean           of the group, GRPO (2402.03300, section 4.1.2)
                    leave_one_out  mean of the others, RLOO (2402.14740): unbiased, G/(G−1) times the above
    scale_rewards   group          the group's population standard deviation + 1e-4, GRPO
                    batch          that of all rewards of the step, all micro-batches (2508.08221)
                    none           1, Dr. GRPO (2503.20783)

    A group whose rewards are all equal to within 1e-6 gives exactly 0: a standard deviation of rounding noise must not be
    scaled up to advantages of size one.
    """
    G = rewards.shape[1]
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    if baseline == "leave_one_out":
        centred = centred * (G / max(1, G - 1))
    if scale_rewards == "group":
        centred = centred / (rewards.std(dim=1, keepdim=True, correction=0) + EPSILON)
    elif scale_rewards == "batch":
        count = (
            torch.ones_like(rewards) if mask is None else mask.expand_as(rewards).to(rewards.dtype)
        )
        mean = (count * rewards).sum() / count.sum()
        centred = centred / (
            (count * (rewards - mean) ** 2).sum().div(count.sum()).sqrt() + EPSILON
        )
    span = rewards.amax(dim=1, keepdim=True) - rewards.amin(dim=1, keepdim=True)
    return torch.where(span <= INDISTINCT, 0, centred)  # so written, NaN stays NaN, and is found
