"""Other advantages than GRPO's, and limits on who gets one.

DIRECTIONS holds functions of (reward, old, batch, config) that return the advantages (B,G,T), in
the place of `group_advantages`. `old` holds the `Scores` of the draws. BASELINES holds functions of
the reward (B,G,T) that subtract something from it. SCALES holds functions of (reward, mask) that
return what advantages are divided by. LIMITS holds functions of (advantages,
old, mask, config), each with the value of its setting that turns it off. To add one of your own,
write such a function and a line in its table.

Shapes: B masked inputs, T characters, G completions of each.
"""

import torch

from data.per_word import sum_over_words
from grpo.distributed import gather

EPSILON = 1e-4  # added to a standard deviation


def forward(reward, old, batch, config):
    """Weigh each fill by how likely the target writes it, A = G · w − 1.

    The target is q_ref · exp(reward), normalised: what the expected reward minus KL(q‖q_ref) is
    greatest at. That difference is −KL(q‖target) but for a constant, the reverse KL. Here we follow
    the forward one. Its gradient is the mean of ∇log q over draws of the target, and w makes such a
    mean from draws of q: a softmax over the group of log(target / q), which are self-normalised
    importance weights. The −1 is a baseline.
    """
    log_w = reward + sum_over_words(old.ref_logp - old.logp, batch.words)  # (B,G,T), one per word
    weights = log_w.softmax(dim=1)  # (B,G,T)
    return (reward.shape[1] * weights - 1) * batch.mask[:, None]


DIRECTIONS = {"forward": forward}


def minus_nothing(reward):
    """r itself. With rewards of 0 and 1 only good fills teach: rejection sampling fine-tuning."""
    return reward


BASELINES = {"none": minus_nothing}


def deviation_of_batch(reward, mask):
    """The standard deviation over all blanks of the step + 1e-4 (2508.08221): -> ()."""
    every = gather(reward)  # (B,G,T) of all processes
    counted = gather(mask)[:, None].expand(every.shape).to(every.dtype)
    mean = (counted * every).sum() / counted.sum()
    variance = (counted * (every - mean) ** 2).sum() / counted.sum()
    return variance.sqrt() + EPSILON


SCALES = {"batch": deviation_of_batch}


def keep_uncertain(advantages, old, mask, config):
    """Let only the most uncertain blanks of the step learn from the reward: (B,G,T) -> (B,G,T).

    We rank the blanks by their entropy (B,T) at the time of the draw. With a `top_entropy_quantile`
    of 0.2 the most uncertain fifth keeps its advantages, and so do blanks that tie with the last
    blank of that fifth. All other blanks get 0 ("Beyond the 80/20 rule", 2506.01939).
    """
    # The entropy at the blanks of all processes. Visible text gets NaN.
    of_blanks = gather(old.entropy).where(gather(mask), torch.nan)  # (B,T)
    threshold = torch.nanquantile(of_blanks, 1 - config.top_entropy_quantile)  # ()
    return advantages * (old.entropy >= threshold)[:, None]


LIMITS = {"top_entropy_quantile": (1, keep_uncertain)}  # {setting: (its value when off, function)}
