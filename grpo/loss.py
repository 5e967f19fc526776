"""The loss of GRPO, in many published forms, from advantages and log-probabilities.

    loss = Σ_{b,g,t} weight[b,t] · ( policy_loss[b,g,t] + β · KL[b,t] − entropy_coef · H[b,t] )

The forms of `loss_type` differ in the weights alone. These (but for `bnpo`) count over the whole
update, so the losses of its micro-batches, on any number of processes, add up to its loss exactly.
Everything here is plain PyTorch, and autograd differentiates it.

Letters: B masked inputs, T characters, G completions of each. logp, old_logp, ref_logp, advantages
are (B,G,T); kl, entropy, mask, words and weights are (B,T).
"""

import math
from dataclasses import dataclass

import torch

from grpo.distributed import n_processes


def loss_weights(mask, blanks, config):
    """Weigh the blanks of one update: mask (B,T) of this process -> (B,T), 0 where no blank is.

    `blanks` counts those of all processes.

    grpo      a mean over completions of the mean over their blanks (2402.03300, equation 3)
    dapo      a mean over all blanks of the update (2503.14476, equation 8: of the group)
    bnpo      a mean over all blanks of the micro-batch, then over micro-batches (TRL's name)
    dr_grpo   a constant normaliser, the length of an input (2503.20783)
    sum       a mean over completions of the sum over their blanks: the policy-gradient theorem
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


def log_ratio(logp, old_logp, mask, importance_sampling_level):
    """Compute log π(y)/π_old(y), of each blank or of the whole completion: -> (B,G,T).

    With `sequence` it is the mean over a completion's blanks, as in GSPO (2507.18071, equation 7).
    Its gradient is that of each blank's own (GSPO-token, equations 13 and 14), which is the same
    where a completion has one advantage.
    """
    difference = logp - old_logp  # (B,G,T)
    if importance_sampling_level == "sequence":
        blanks = mask.sum(dim=-1)[:, None, None].clamp(min=1)  # (B,1,1)
        mean = difference.sum(dim=-1, keepdim=True) / blanks  # (B,G,1)
        return mean.detach() + (logp - logp.detach())
    return difference


def policy_loss(logp, old_logp, advantages, mask, config):
    """Compute the loss of each blank (B,G,T), and whether the clip stopped its gradient, bool.

    −min(ρ·A, clip(ρ, 1 − clip_eps, 1 + clip_eps_high)·A) is PPO's clip (1707.06347, equation 7)
    with DAPO's separate upper bound. clip_delta > 0 bounds the first ρ too, min(ρ, clip_delta)·A,
    because with A < 0 it would grow without limit (2505.07291, two-sided clip).
    importance_sampling_level=none has neither ratio nor clip: −logp·A is REINFORCE.
    """
    if config.importance_sampling_level == "none":
        return -logp * advantages, torch.zeros_like(logp, dtype=torch.bool)
    # In the first update after a rollout ρ is 1, and its gradient is that of logp.
    ratio = log_ratio(logp, old_logp, mask, config.importance_sampling_level).exp()  # (B,G,T)
    clipped = ratio.clamp(1 - config.clip_eps, 1 + config.clip_eps_high)
    bounded = ratio.clamp(max=config.clip_delta or math.inf)
    objective = torch.minimum(bounded * advantages, clipped * advantages)
    stopped = (bounded < ratio) | (clipped * advantages < bounded * advantages)  # flat: no gradient
    return -objective, stopped


def kl_estimate(logp, ref_logp, kl, kl_estimator):
    """Take KL(π‖π_ref) of each blank, `exact` (B,1,T), or one sample's estimate of it (B,G,T).

    The estimators are Schulman's ("Approximating KL divergence"). As a loss, on-policy, the
    expected gradient of k1 is 0, so it restrains nothing. That of k2 is the gradient of
    KL(π‖π_ref). That of k3, the papers' choice, is the gradient of KL(π_ref‖π). They see the set S
    only; `exact` sees the whole vocabulary.
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
    """What a loss is made of. All of these add up over micro-batches."""

    loss: torch.Tensor  # ()
    pg_loss: torch.Tensor  # () the policy gradient's part
    kl_penalty: torch.Tensor  # () β·KL
    clipped: torch.Tensor  # () how many drawn characters the clip stopped


def grpo_loss(now, old, advantages, mask, weights, config):
    """Compute the loss of one micro-batch: -> a scalar, and its `Terms`.

    `now` and `old` are the `Scores` of its fills under the policy as it is and as it was when it
    drew them. The weights (B,T) come from `loss_weights`.
    """
    losses, stopped = policy_loss(now.logp, old.logp, advantages, mask, config)  # (B,G,T) twice
    kl = kl_estimate(now.logp, now.ref_logp, now.kl, config.kl_estimator)  # (B,G,T) or (B,1,T)

    def total(x):
        """Add up over all draws: (B,G,T), or (B,1,T) of what the G draws of a blank share."""
        return (weights[:, None] * x.expand_as(losses)).sum()

    pg_loss = total(losses)
    kl_penalty = config.kl_beta * total(kl)
    loss = pg_loss + kl_penalty - config.entropy_coef * total(now.entropy[:, None])
    return loss, Terms(loss, pg_loss, kl_penalty, stopped.sum())
