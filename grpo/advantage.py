"""Rewards of a group -> advantages: how much better than the rest of its group was each completion?

Letters: B masked inputs, T characters, G group size.
"""

import torch

from grpo.plumbing.distributed import gather

EPSILON = 1e-4  # added to the standard deviation
INDISTINCT = 1e-6  # rewards that span less than this are equal but for rounding


def group_advantages(credits, mask, config):
    """A = (reward − baseline) / scale: credits (B,G,1) or (B,G,T) -> as credits.

    mask (B,T) says which of (B,G,T) are blanks; with `credit=run` the rest does not count.

    baseline        mean           of the group, GRPO (2402.03300, section 4.1.2)
                    leave_one_out  mean of the others, RLOO (2402.14740): A is G/(G−1) times that
    scale_rewards   group          the group's population standard deviation + 1e-4, GRPO
                    batch          that of all rewards of the step (2508.08221)
                    none           1, Dr. GRPO (2503.20783)

    A group whose rewards are all equal to within 1e-6 gives exactly 0: a standard deviation of
    rounding noise must not be scaled up to advantages of size one.
    """
    G = credits.shape[1]
    centred = credits - credits.mean(dim=1, keepdim=True)
    if config.baseline == "leave_one_out":
        centred = centred * (G / max(1, G - 1))

    if config.scale_rewards == "group":
        centred = centred / (credits.std(dim=1, keepdim=True, correction=0) + EPSILON)
    elif config.scale_rewards == "batch":
        every = gather(credits)  # of all processes
        counted = torch.ones_like(every)
        if config.credit == "run":
            counted = counted * gather(mask)[:, None]  # (B,G,T)
        mean = (counted * every).sum() / counted.sum()
        variance = (counted * (every - mean) ** 2).sum() / counted.sum()
        centred = centred / (variance.sqrt() + EPSILON)

    span = credits.amax(dim=1, keepdim=True) - credits.amin(dim=1, keepdim=True)
    equal = span <= INDISTINCT  # NaN <= x is False: a NaN stays, and is found
    return centred.masked_fill(equal, 0)
