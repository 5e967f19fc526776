"""Compute advantages: how much better than the rest of its group was each completion?

Shapes: B masked inputs, T characters, G completions of each.
"""

from grpo.variants.advantages import DIRECTIONS, EPSILON, LIMITS, SCALES

INDISTINCT = 1e-6  # if the rewards of a group span no more than this, we call them equal


def deviation_of_group(reward, mask):
    """The population standard deviation of each group + 1e-4, as in GRPO: (B,G,T) -> (B,1,T)."""
    return reward.std(dim=1, keepdim=True, correction=0) + EPSILON


def undivided(reward, mask):
    """Divide by 1, which leaves advantages in the unit of the reward."""
    return 1


SCALES = {"none": undivided, "group": deviation_of_group} | SCALES


def group_advantages(reward, old, batch, config):
    """Compare each reward with its group, A = (r − baseline) / scale: (B,G,T) -> (B,G,T).

    baseline        mean           the mean of the group, as in GRPO (2402.03300, section 4.1.2)
                    leave_one_out  the mean of the other rewards of the group, as in RLOO
                                   (2402.14740). It gives G/(G−1) times the A of `mean`.
    scale_rewards   group          the group's standard deviation, as in GRPO
                    none           1, as in Dr. GRPO (2503.20783)
                    and those of grpo/variants/advantages.py

    If the rewards of a group differ by 1e-6 at most, we take that for rounding, and set the group's
    advantages to 0. Dividing by a tiny standard deviation would only magnify the rounding.
    """
    G = reward.shape[1]
    centred = reward - reward.mean(dim=1, keepdim=True)
    if config.baseline == "leave_one_out":
        centred = centred * (G / (G - 1))
    scaled = centred / SCALES[config.scale_rewards](reward, batch.mask)

    span = reward.amax(dim=1, keepdim=True) - reward.amin(dim=1, keepdim=True)
    equal = span <= INDISTINCT  # NaN <= x is False, so a NaN stays, and ends the run
    return scaled.masked_fill(equal, 0)


DIRECTIONS = {"reverse": group_advantages} | DIRECTIONS


def compute_advantages(reward, old, batch, config):
    """Compute the advantage of each drawn letter, as the settings say: (B,G,T) -> (B,G,T).

    `old` holds the `Scores` of the fills. The default is `group_advantages`, for every blank.
    """
    advantages = DIRECTIONS[config.direction](reward, old, batch, config)
    for setting, (off, limit) in LIMITS.items():
        if getattr(config, setting) != off:
            advantages = limit(advantages, old, batch.mask, config)
    return advantages
