"""Advantages and log-probabilities -> the loss, in many published forms.

Letters: B masked inputs, T characters, G group size. With a latent of K values the B here are rows
and the G are G/K: nothing else changes. logp, old_logp, ref_logp are (B,G,T); kl, entropy and mask
are (B,T); advantages are (B,G,1), or (B,G,T) where every blank is credited on its own.

    loss = Σ_{b,g,t} weight[b,t] · ( policy_loss[b,g,t] + β · KL[b,t] − entropy_coef · H[b,t] )

The forms of `loss_type` differ in the weights alone, which (but for `bnpo`) count over the whole
update: the losses of its micro-batches, on any number of processes, add up to its loss exactly.
What leads from log-probabilities to the loss is plain PyTorch, differentiated by autograd.
"""

from typing import NamedTuple

import torch

from grpo.plumbing.distributed import gather, world

STIFFNESS = 4  # of `kl_weight`


class Totals(NamedTuple):
    """What one update counts, over all its micro-batches and processes."""

    rows: int
    blanks: torch.Tensor  # scalar
    micro_batches: int


def count(mask, micro_batches):
    """The totals of an update: mask (B,T) and number of micro-batches of this process's part."""
    processes = world()[0]
    blanks = gather(mask).sum().clamp(min=1)
    return Totals(len(mask) * processes, blanks, micro_batches * processes)


def loss_weights(mask, loss_type, group_size, totals):
    """The weight of each blank: mask (B,T) of one micro-batch -> (B,T) float, 0 where no blank is.

    grpo      a mean over completions of the mean over their blanks (2402.03300, equation 3)
    dapo      a mean over all blanks of the update (2503.14476, equation 8, has the group's)
    bnpo      a mean over all blanks of the micro-batch, then over micro-batches (TRL's name)
    dr_grpo   a constant normaliser, the length of an input (2503.20783)
    sum       a mean over completions of the sum over their blanks: the policy-gradient theorem
    """
    m = mask.float()
    per_completion = m / (totals.rows * group_size)
    if loss_type == "grpo":
        return per_completion / m.sum(dim=1, keepdim=True).clamp(min=1)
    if loss_type == "dapo":
        return m / (totals.blanks * group_size)
    if loss_type == "bnpo":
        return m / m.sum().clamp(min=1) / (totals.micro_batches * group_size)
    if loss_type == "dr_grpo":
        return per_completion / mask.shape[1]
    assert loss_type == "sum"
    return per_completion


def log_ratio(logp, old_logp, mask, importance_sampling_level):
    """log of π(y)/π_old(y), per blank (`token`) or for a whole completion (`sequence`).

    The latter is the mean over its blanks: GSPO's (2507.18071, equation 7).
    """
    difference = logp - old_logp  # (B,G,T)
    if importance_sampling_level == "sequence":
        blanks = mask.sum(dim=-1)[:, None, None].clamp(min=1)  # (B,1,1)
        return difference.sum(dim=-1, keepdim=True) / blanks  # (B,G,1)
    return difference


def most_uncertain(entropy, mask, top_entropy_quantile):
    """That share of the blanks, the ones of highest entropy, ties kept: (B,T) -> (B,T) bool.

    "Beyond the 80/20 rule" (2506.01939).
    """
    if top_entropy_quantile == 1:
        return mask
    of_blanks = entropy.float().where(mask, torch.nan)  # (B,T)
    return mask & (entropy >= torch.nanquantile(of_blanks, 1 - top_entropy_quantile))


def policy_loss(logp, old_logp, advantages, mask, config):
    """-> the loss of each blank (B,G,T), and whether the clip stopped its gradient (B,G,T) bool.

    −min(ρ·A, clip(ρ, 1 − clip_eps, 1 + clip_eps_high)·A), PPO's clip (1707.06347, equation 7) with
    DAPO's separate upper bound. clip_delta > 0 bounds the first ρ too, min(ρ, clip_delta)·A, where
    A < 0 lets it grow without limit (2505.07291, two-sided clip). importance_sampling_level `none`
    has neither ratio nor clip: −logp·A, REINFORCE.
    """
    if config.importance_sampling_level == "none":
        return -logp * advantages, torch.zeros_like(logp, dtype=torch.bool)
    # In the first update after a rollout ρ is exactly 1, and its gradient is that of logp.
    ratio = log_ratio(logp, old_logp, mask, config.importance_sampling_level).exp()  # (B,G,T|1)
    clipped = ratio.clamp(1 - config.clip_eps, 1 + config.clip_eps_high)
    bounded = ratio.clamp(max=config.clip_delta) if config.clip_delta else ratio
    objective = torch.minimum(bounded * advantages, clipped * advantages)
    stopped = (bounded < ratio) | (clipped * advantages < bounded * advantages)  # flat: no gradient
    return -objective.expand_as(logp), stopped.expand_as(logp)


def kl_estimate(logp, ref_logp, kl, kl_estimator):
    """KL(π‖π_ref) of each blank: `exact` (B,1,T), or one sample's estimate of it (B,G,T).

    The estimators are Schulman's ("Approximating KL divergence"). As a loss, on-policy: the
    expected gradient of k1 is 0, it restrains nothing; that of k2 is the gradient of KL(π‖π_ref);
    that of k3 (the papers' choice) is the gradient of KL(π_ref‖π). They see the kept set only,
    `exact` the whole vocabulary.
    """
    if kl_estimator == "exact":
        return kl[:, None]
    d = ref_logp - logp  # (B,G,T)
    if kl_estimator == "k1":
        return -d
    if kl_estimator == "k2":
        return d * d / 2
    assert kl_estimator == "k3"
    return d.exp() - 1 - d


def kl_weight(kl, mask, config):
    """β, the weight of the KL: kl_beta, or with a kl_target kl_beta · (KL / kl_target)^STIFFNESS.

    kl, mask (B,T) of the whole step, as it was drawn: its mean KL per blank, in nats. So the KL of
    a run ends near the target, and depends less on kl_beta. (1909.08593 steers the weight by
    feedback, over many steps; this acts at once, and has no state.)
    """
    if not config.kl_target:
        return torch.tensor(config.kl_beta)
    mean_kl = kl.sum() / mask.sum().clamp(min=1)
    return config.kl_beta * (mean_kl / config.kl_target) ** STIFFNESS


def grpo_loss(now, batch, weights, beta, config):
    """The loss of one micro-batch and its parts: a scalar, {name: scalar without gradient}.

    `now` holds the `Stats` of the policy; `batch` its `mask`, `old_logp`, `advantages` and
    `learning` (B,T) bool, the blanks that carry policy gradient; `weights` (B,T) are those of
    `loss_weights`. Losses and parts add up over micro-batches; `clipped` counts blanks.
    """
    losses, stopped = policy_loss(now.logp, batch.old_logp, batch.advantages, batch.mask, config)
    kl = kl_estimate(now.logp, now.ref_logp, now.kl, config.kl_estimator)  # (B,G,T) or (B,1,T)
    G = losses.shape[1]  # weights hold 1/G: what all G draws share, KL and entropy, counts G times

    pg_loss = ((weights * batch.learning)[:, None] * losses).sum()
    kl_penalty = beta * (weights[:, None] * kl.expand_as(losses)).sum()
    entropy = G * (weights * now.entropy).sum()
    loss = pg_loss + kl_penalty - config.entropy_coef * entropy

    clipped = (stopped & batch.mask[:, None]).sum()
    parts = {"loss": loss, "pg_loss": pg_loss, "kl_penalty": kl_penalty, "clipped": clipped}
    return loss, {name: value.detach() for name, value in parts.items()}
