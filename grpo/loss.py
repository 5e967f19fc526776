"""Compute the loss of GRPO, in many published forms, from advantages and log-probabilities.

    loss = Σ_{b,g,t} weight[b,t] · ( −objective[b,g,t] + β · KL[b,t] − entropy_coef · H[b,t] )

The settings of `loss_type` differ only in the weights. Except with `bnpo`, the loss of an update
does not depend on how it is cut into micro-batches, because the weights are normalised over the
whole update. Everything here is plain PyTorch, and autograd differentiates it.

Shapes: B masked inputs, T characters, G completions of each. logp, old_logp, ref_logp, advantages
are (B,G,T); kl, entropy, mask, words and weights are (B,T).
"""

import math
from dataclasses import dataclass

import torch

from data.per_word import mean_over_words
from grpo.distributed import n_processes


def loss_weights(mask, blanks, config):
    """Weigh the blanks of one update: mask (B,T) of this process -> (B,T), 0 at visible text.

    `blanks` is the number of blanks in the update, on all processes.

    grpo      average the blanks of each completion, then the completions (2402.03300, equation 3)
    dapo      average all blanks of the update. In the paper it is all blanks of a group
              (2503.14476, equation 8).
    bnpo      average all blanks of each micro-batch, then the micro-batches (TRL's name)
    sum       add up the blanks of each completion, then average the completions. This is the
              estimate that follows from the policy gradient theorem.
    dr_grpo   divide `sum` by the constant T (2503.20783)
    """
    B, T = mask.shape
    G = config.group_size
    m = mask.float()
    per_completion = m / (B * n_processes() * G)
    if config.loss_type == "grpo":
        return per_completion / m.sum(dim=1, keepdim=True).clamp(min=1)
    if config.loss_type == "dapo":
        return m / (blanks * G)
    if config.loss_type == "bnpo":
        parts = m.split(config.batch_size)
        means = torch.cat([part / part.sum().clamp(min=1) for part in parts])  # (B,T)
        return means / (len(parts) * n_processes() * G)
    if config.loss_type == "dr_grpo":
        return per_completion / T
    if config.loss_type == "sum":
        return per_completion
    raise NotImplementedError(f"loss_type={config.loss_type} has no branch in loss_weights")


def log_ratio(logp, old_logp, words, importance_sampling_level):
    """Compute log ρ = log (π(y)/π_old(y)) of each letter, or of the whole completion: -> (B,G,T).

    With `token` each letter has its own log ρ. With `sequence` all letters of a completion have the
    same value, the mean of log ρ over its blanks, as in GSPO (2507.18071, equation 7). Only the
    value is shared. The gradient of a letter is still that of its own log π(y), as in GSPO-token
    (equations 13 and 14). If all letters of a completion have the same advantage, GSPO and
    GSPO-token make the same update.
    """
    difference = logp - old_logp  # (B,G,T)
    if importance_sampling_level == "sequence":
        blanks = (words > 0).sum(dim=-1)[:, None, None].clamp(min=1)  # (B,1,1)
        mean = difference.sum(dim=-1, keepdim=True) / blanks  # (B,G,1)
        return mean.detach() + (logp - logp.detach())
    return difference


def policy_objective(logp, old_logp, advantages, words, config):
    """Compute each letter's objective, and tell if a bound limits it: -> (B,G,T), bool (B,G,T).

    The setting `objective` chooses the formula. ρ is the ratio whose logarithm `log_ratio` returns.
    In the first update after a rollout ρ is 1, and all formulas have the gradient A ∇log π(y),
    where A is the advantage. They differ once the policy has changed since the draw. Most formulas
    set a bound on this change. If a letter is beyond its bound, cispo limits the ρ that multiplies
    the letter's gradient. The other formulas give the letter no gradient.
    """
    A = advantages
    if config.importance_sampling_level == "none":  # REINFORCE: no ratio and no bound
        return A * logp, torch.zeros_like(logp, dtype=torch.bool)
    log_rho = log_ratio(logp, old_logp, words, config.importance_sampling_level)  # (B,G,T)
    rho = log_rho.exp()
    eps, eps_high = config.clip_eps, config.clip_eps_high

    if config.objective == "clip":
        # min(ρA, clip(ρ, 1−ε, 1+ε_high)·A), as in PPO (1707.06347, equation 7), with a separate
        # upper bound as in DAPO (2503.14476, equation 8). Where A < 0, the ρ of the first term can
        # grow without limit, unless clip_delta bounds it (2505.07291).
        bounded = rho.clamp(max=config.clip_delta or math.inf)
        clipped = rho.clamp(1 - eps, 1 + eps_high)
        objective = torch.minimum(bounded * A, clipped * A)
        return objective, (bounded < rho) | (clipped * A < bounded * A)

    if config.objective == "cispo":
        # sg(min(ρ, 1+ε_high))·A·log π, with sg(x) for x.detach(). This is CISPO (2506.13585,
        # equations 4 and 5), in which every letter keeps its gradient. TRL's epsilon_high is the
        # whole bound, which is 1+ε_high here. verl also bounds ρ from below.
        bound = 1 + eps_high
        return rho.clamp(max=bound).detach() * A * logp, rho > bound

    if config.objective == "sapo":
        # A·(4/τ)·σ(τ(ρ−1)), as in SAPO (2511.20347, equations 5 and 6). This is a soft clip. τ has
        # another value where A is negative.
        tau = torch.where(A > 0, config.sapo_tau, config.sapo_tau_negative)
        return A * (4 / tau) * (tau * (rho - 1)).sigmoid(), torch.zeros_like(rho, dtype=torch.bool)

    if config.objective == "gmpo":
        # A·exp(mean of log ρ), as in GMPO (2507.20673, equation 4): a geometric mean of ρ over the
        # letters that share an advantage. We first clip each log ρ, from above where A is
        # positive, and from below elsewhere. With credit=word we take the mean over a word, also
        # for a reward (B,G), which gives all words of an input the same advantage.
        shares = words if config.credit == "word" else (words > 0).long()  # (B,T)
        limited = torch.where(A > 0, log_rho.clamp(max=eps_high), log_rho.clamp(min=-eps))
        return A * mean_over_words(limited, shares).exp(), limited != log_rho

    if config.objective == "dppo":
        # ρ·A·log π, with ρ detached. This is DPPO with the binary total variation (2602.04879,
        # equations 12, 13). If A is positive, a letter counts until its probability has risen by
        # ε_high. If A is negative, it counts until its probability has fallen by ε.
        moved = logp.detach().exp() - old_logp.exp()  # (B,G,T)
        stopped = ((A > 0) & (moved > eps_high)) | ((A < 0) & (moved < -eps))
        return torch.where(stopped, 0, rho.detach() * A * logp), stopped

    raise NotImplementedError(f"objective={config.objective} has no branch in policy_objective")


def kl_estimate(logp, ref_logp, kl, kl_estimator):
    """Return KL(π‖π_ref) of each blank: the exact KL (B,1,T), or one estimate per draw (B,G,T).

    The estimators are Schulman's ("Approximating KL divergence"). The expected gradient of each,
    while π is still the policy that drew the letters, is

    k1    0, so k1 restrains nothing
    k2    the gradient of KL(π‖π_ref)
    k3    the gradient of KL(π_ref‖π). The papers use k3.

    The estimators compare π and π_ref only on the characters that may be drawn. `exact` compares
    them on the whole vocabulary.
    """
    if kl_estimator == "exact":
        return kl[:, None]
    d = ref_logp - logp  # (B,G,T)
    if kl_estimator == "k1":
        return -d
    if kl_estimator == "k2":
        return d * d / 2
    if kl_estimator == "k3":
        return d.exp() - 1 - d
    raise NotImplementedError(f"kl_estimator={kl_estimator} has no branch in kl_estimate")


@dataclass
class Terms:
    """A micro-batch's loss, two of its terms, and the number of clipped letters."""

    loss: torch.Tensor  # ()
    pg_loss: torch.Tensor  # () the policy gradient's part
    kl_penalty: torch.Tensor  # () β·KL
    clipped: torch.Tensor  # () the number of letters where the clip or another bound acts


def grpo_loss(now, old, advantages, words, weights, config):
    """Compute the loss of one micro-batch: -> a scalar, and its `Terms`.

    `old` and `now` are `Scores` of the same fills: `old` under the policy that drew them, `now`
    under the current policy. words (B,T) is 1 in the first hidden word of an input, 2 in the
    second, and so on. weights (B,T) come from `loss_weights`.
    """
    objective, stopped = policy_objective(now.logp, old.logp, advantages, words, config)
    kl = kl_estimate(now.logp, now.ref_logp, now.kl, config.kl_estimator)  # (B,G,T) or (B,1,T)

    def total(x):
        """Sum weights · x over all draws. x is (B,G,T), or (B,1,T) if the G draws share it."""
        return (weights[:, None] * x.expand_as(objective)).sum()

    pg_loss = -total(objective)
    kl_penalty = config.kl_beta * total(kl)
    loss = pg_loss + kl_penalty - config.entropy_coef * total(now.entropy[:, None])
    # With importance_sampling_level=sequence, `stopped` can be True at visible text, too. We count
    # blanks only.
    clipped = (stopped & (words > 0)[:, None]).sum()
    return loss, Terms(loss, pg_loss, kl_penalty, clipped)
