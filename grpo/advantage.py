"""Compute advantages: how much better than the rest of its group was each completion?

Shapes: B masked inputs, T characters, G group size.
"""

import torch

from data.per_word import sum_over_words
from grpo.distributed import gather

EPSILON = 1e-4  # added to the standard deviation
INDISTINCT = 1e-6  # if the rewards of a group span no more than this, we call them equal


def group_advantages(reward, mask, config):
    """Compare each reward with its group, A = (r − baseline) / scale: (B,G,T) -> (B,G,T).

    mask (B,T) says where the blanks are. Only scale_rewards=batch reads it.

    baseline        mean           the mean of the group, as in GRPO (2402.03300, section 4.1.2)
                    leave_one_out  the mean of the other rewards of the group, as in RLOO
                                   (2402.14740). It gives G/(G−1) times the A of `mean`.
    scale_rewards   group          the group's population standard deviation + 1e-4, as in GRPO
                    batch          the standard deviation over all blanks of the step + 1e-4
                                   (2508.08221)
                    none           1, as in Dr. GRPO (2503.20783)

    If the rewards of a group differ by 1e-6 at most, we take that for rounding, and set the group's
    advantages to 0. Dividing by a tiny standard deviation would only magnify the rounding.
    """
    G = reward.shape[1]
    centred = reward - reward.mean(dim=1, keepdim=True)
    if config.baseline == "leave_one_out":
        centred = centred * (G / (G - 1))

    if config.scale_rewards == "group":
        centred = centred / (reward.std(dim=1, keepdim=True, correction=0) + EPSILON)
    elif config.scale_rewards == "batch":
        every = gather(reward)  # (B,G,T) of all processes
        counted = gather(mask)[:, None].expand(every.shape).to(every.dtype)
        mean = (counted * every).sum() / counted.sum()
        variance = (counted * (every - mean) ** 2).sum() / counted.sum()
        centred = centred / (variance.sqrt() + EPSILON)

    span = reward.amax(dim=1, keepdim=True) - reward.amin(dim=1, keepdim=True)
    equal = span <= INDISTINCT  # NaN <= x is False, so a NaN stays, and ends the run
    return centred.masked_fill(equal, 0)


def forward_advantages(reward, old, words):
    """Weigh each fill by how likely the target writes it, A = G · w − 1: (B,G,T) -> (B,G,T).

    The target is q_ref · exp(reward), normalised: what the expected reward minus KL(q‖q_ref) is
    greatest at. That difference is −KL(q‖target) but for a constant, the reverse KL. Here we follow
    the forward one. Its gradient is the mean of ∇log q over draws of the target, and w makes such a
    mean from draws of q: a softmax over the group of log(target / q), which are self-normalised
    importance weights. `old` holds the `Scores` of the draws. The −1 is a baseline.
    """
    log_w = reward + sum_over_words(old.ref_logp - old.logp, words)  # (B,G,T), one for each word
    weights = log_w.softmax(dim=1)  # (B,G,T)
    return (reward.shape[1] * weights - 1) * (words > 0)[:, None]


def keep_uncertain(advantages, entropy, mask, top_entropy_quantile):
    """Let only the most uncertain blanks of the step learn from the reward: (B,G,T) -> (B,G,T).

    We rank the blanks by their entropy (B,T) at the time of the draw. With a `top_entropy_quantile`
    of 0.2 the most uncertain fifth keeps its advantages, and so do blanks that tie with the last
    blank of that fifth. All other blanks get 0 ("Beyond the 80/20 rule", 2506.01939).
    """
    if top_entropy_quantile == 1:
        return advantages
    # The entropy at the blanks of all processes. Visible text gets NaN.
    of_blanks = gather(entropy).where(gather(mask), torch.nan)  # (B,T)
    threshold = torch.nanquantile(of_blanks, 1 - top_entropy_quantile)  # ()
    return advantages * (entropy >= threshold)[:, None]
