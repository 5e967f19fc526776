"""Compute advantages: how much better than the rest of its group was each completion?

Shapes: B masked inputs, T characters, G completions of each.
"""

from grpo.variants import advantages as published

INDISTINCT = 1e-6  # if the rewards of a group span no more than this, we call them equal


def minus_mean(reward):
    """r − the mean of the group, as in GRPO (2402.03300, section 4.1.2): (B,G,T) -> (B,G,T)."""
    return reward - reward.mean(dim=1, keepdim=True)


def minus_mean_of_others(reward):
    """r − the mean of the other rewards of the group, as in RLOO (2402.14740): (B,G,T) -> (B,G,T).

    It is G/(G−1) times as large as `minus_mean`.
    """
    G = reward.shape[1]
    return minus_mean(reward) * (G / (G - 1))


def deviation_of_group(reward, mask):
    """The population standard deviation of each group + 1e-4, as in GRPO: (B,G,T) -> (B,1,T)."""
    return reward.std(dim=1, keepdim=True, correction=0) + published.EPSILON


def undivided(reward, mask):
    """Divide by 1, which leaves advantages in the unit of the reward."""
    return 1


BASELINES = {"mean": minus_mean, "leave_one_out": minus_mean_of_others} | published.BASELINES
SCALES = {"none": undivided, "group": deviation_of_group} | published.SCALES


def group_advantages(reward, old, batch, config):
    """Compare each reward with its group, A = (r − baseline) / scale: (B,G,T) -> (B,G,T).

    The setting `baseline` names one of BASELINES, and scale_rewards one of SCALES: `none` divides
    by 1, as in Dr. GRPO (2503.20783), `group` by the group's standard deviation, as in GRPO.

    If the rewards of a group differ by 1e-6 at most, we call them equal, and its advantages become
    exactly 0. Otherwise the rounding of the mean would be a tiny advantage.
    """
    centred = BASELINES[config.baseline](reward)  # (B,G,T)
    scaled = centred / SCALES[config.scale_rewards](reward, batch.mask)  # (B,G,T)

    span = reward.amax(dim=1, keepdim=True) - reward.amin(dim=1, keepdim=True)
    equal = span <= INDISTINCT  # NaN <= x is False, so a NaN stays, and ends the run
    return scaled.masked_fill(equal, 0)


DIRECTIONS = {"reverse": group_advantages} | published.DIRECTIONS


def compute_advantages(reward, old, batch, config):
    """Compute the advantage of each drawn letter, as the settings say: (B,G,T) -> (B,G,T).

    `old` holds the `Scores` of the fills. The default is `group_advantages`, for every blank.
    """
    advantages = DIRECTIONS[config.direction](reward, old, batch, config)
    for setting, (off, limit) in published.LIMITS.items():
        if getattr(config, setting) != off:
            advantages = limit(advantages, old, batch.mask, config)
    return advantages
