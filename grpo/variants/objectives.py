"""Define what is maximised for each letter: the published alternatives to PPO's clip.

Each objective is a function

    objective(logp, old_logp, A, words, config) -> objective (B,G,T), stopped (B,G,T) bool

of the log-probabilities of the drawn letters now and when they were drawn, their advantages A,
each (B,G,T), and the number of each blank's word (B,T). `stopped` says where a bound acts, for the
metric clip_ratio. ρ = exp(logp − old_logp) is the importance ratio of a letter, and sg(x) is x
without its gradient, `x.detach()`.

In the first update after a rollout ρ is 1, and all of them have the gradient A ∇log q(y). They
differ once the policy has changed since the draw. To add one of your own, write such a function and
a line in OBJECTIVES. The name of the line is then a value of the setting `objective`.

Shapes: B masked inputs, T characters, G completions of each.
"""

import torch

from data.per_word import mean_over_words


def nowhere(x):
    """Return False everywhere, for an objective without a bound: -> bool, in the shape of x."""
    return torch.zeros_like(x, dtype=torch.bool)


def reinforce(logp, old_logp, A, words, config):
    """A·log π: no ratio and no bound (RLOO, 2402.14740, and "Back to basics" before it).

    It has the policy's gradient only in the first update of a rollout, so it takes one.
    """
    return A * logp, nowhere(logp)


def cispo(logp, old_logp, A, words, config):
    """sg(min(ρ, 1+ε_high))·A·log π: CISPO (2506.13585, equations 4 and 5).

    Every letter keeps its gradient. TRL's epsilon_high is the whole bound, which is 1+ε_high here.
    verl also bounds ρ from below.
    """
    ratio = (logp - old_logp).exp()  # (B,G,T)
    bound = 1 + config.clip_eps_high
    return ratio.clamp(max=bound).detach() * A * logp, ratio > bound


def sapo(logp, old_logp, A, words, config):
    """A·(4/τ)·σ(τ(ρ−1)): SAPO (2511.20347, equations 5 and 6), a soft clip.

    τ has another value where A is negative.
    """
    ratio = (logp - old_logp).exp()  # (B,G,T)
    tau = torch.where(A > 0, config.sapo_tau, config.sapo_tau_negative)
    return A * (4 / tau) * (tau * (ratio - 1)).sigmoid(), nowhere(logp)


def gmpo(logp, old_logp, A, words, config):
    """A·exp(mean of log ρ): GMPO (2507.20673, equation 4).

    This is a geometric mean of ρ over the letters that share an advantage. We first clip each
    log ρ, from above where A is positive, and from below elsewhere. With credit=word we take the
    mean over a word, also for a reward (B,G), which gives all words of an input the same advantage.
    """
    shares = words if config.credit == "word" else (words > 0).long()  # (B,T)
    log_ratio = logp - old_logp  # (B,G,T)
    above = log_ratio.clamp(max=config.clip_eps_high)
    below = log_ratio.clamp(min=-config.clip_eps)
    limited = torch.where(A > 0, above, below)
    return A * mean_over_words(limited, shares).exp(), limited != log_ratio


def dppo(logp, old_logp, A, words, config):
    """sg(ρ)·A·log π: DPPO with the binary total variation (2602.04879, equations 12 and 13).

    If A is positive, a letter counts until its probability has risen by ε_high. If A is negative,
    it counts until its probability has fallen by ε.
    """
    moved = logp.detach().exp() - old_logp.exp()  # (B,G,T)
    risen = (A > 0) & (moved > config.clip_eps_high)
    fallen = (A < 0) & (moved < -config.clip_eps)
    ratio = (logp - old_logp).exp().detach()  # (B,G,T)
    return torch.where(risen | fallen, 0, ratio * A * logp), risen | fallen


def gspo(logp, old_logp, A, words, config):
    """min(ρA, clip(ρ, 1−ε, 1+ε_high)·A), with one ρ for a completion: GSPO (2507.18071, eq. 7).

    log ρ is the mean over the blanks of the completion. Only its value is shared. The gradient of a
    letter is still that of its own log π(y), as in GSPO-token (equations 13 and 14). If all letters
    of a completion have the same advantage, GSPO and GSPO-token make the same update.
    """
    blanks = (words > 0).sum(dim=-1)[:, None, None].clamp(min=1)  # (B,1,1)
    mean = (logp - old_logp).sum(dim=-1, keepdim=True) / blanks  # (B,G,1)
    ratio = (mean.detach() + (logp - logp.detach())).exp()  # (B,G,T)
    clipped = ratio.clamp(1 - config.clip_eps, 1 + config.clip_eps_high)
    return torch.minimum(ratio * A, clipped * A), clipped * A < ratio * A


OBJECTIVES = {
    "reinforce": reinforce,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo": dppo,
    "gspo": gspo,
}
