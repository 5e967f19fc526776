"""Advantages and log-probabilities -> the loss, in many published forms.

Letters: B masked inputs, T characters, G group size. logp, old_logp, ref_logp are (B,G,T); kl,
entropy and mask are (B,T); advantages are (B,G,1), or (B,G,T) where every blank is credited on its
own. A *batch* is what one update takes; a *micro*-batch is a piece of it that fits in memory.

    loss = Σ_{b,g,t} weight[b,t] · ( policy_loss[b,g,t] + β · KL[b,t] − entropy_coef · H[b,t] )

The forms of `loss_type` differ in the weights alone, which (but for `bnpo`) count over the whole
batch: the losses of its micro-batches, on any number of processes, add up to its loss exactly.
What leads from log-probabilities to the loss is plain PyTorch, differentiated by autograd.
"""

import math

import torch

from grpo.plumbing.distributed import gather, world


def loss_weights(mask, batch, config):
    """The weight of each blank: mask (B,T) of one micro-batch -> (B,T) float, 0 where no blank is.

    grpo      a mean over completions of the mean over their blanks (2402.03300, equation 3)
    dapo      a mean over all blanks of the batch (2503.14476, equation 8: of the group)
    bnpo      a mean over all blanks of the micro-batch, then over micro-batches (TRL's name)
    dr_grpo   a constant normaliser, the length of an input (2503.20783)
    sum       a mean over completions of the sum over their blanks: the policy-gradient theorem
    """
    processes = world()[0]
    B, G, _ = batch.advantages.shape  # of this process
    m = mask.float()
    per_completion = m / (B * processes * G)
    if config.loss_type == "grpo":
        return per_completion / m.sum(dim=1, keepdim=True).clamp(min=1)
    if config.loss_type == "dapo":
        return m / (batch.blanks * G)
    if config.loss_type == "bnpo":
        micro_batches = math.ceil(B / config.batch_size) * processes
        return m / m.sum().clamp(min=1) / (micro_batches * G)
    if config.loss_type == "dr_grpo":
        return per_completion / mask.shape[1]
    return per_completion


def log_ratio(logp, old_logp, mask, importance_sampling_level):
    """log of π(y)/π_old(y), per blank (`token`) or of the whole completion (`sequence`): (B,G,T).

    The latter is the mean over its blanks, GSPO's (2507.18071, equation 7), with the gradient of
    each blank's own (GSPO-token, section 4.3): the same where a completion has one advantage.
    """
    difference = logp - old_logp  # (B,G,T)
    if importance_sampling_level == "sequence":
        blanks = mask.sum(dim=-1)[:, None, None].clamp(min=1)  # (B,1,1)
        mean = difference.sum(dim=-1, keepdim=True) / blanks  # (B,G,1)
        return mean.detach() + (logp - logp.detach())
    return difference


def most_uncertain(micro, batch, top_entropy_quantile):
    """That share of the batch's blanks, the ones of highest entropy when drawn, ties kept: (B,T).

    They alone carry policy gradient: "Beyond the 80/20 rule" (2506.01939).
    """
    mask = micro.fills.mask  # (B,T)
    if top_entropy_quantile == 1:
        return mask
    every = gather(batch.old.entropy)  # (B,T) of the batch, all processes
    of_blanks = every.where(gather(batch.fills.mask), torch.nan)
    threshold = torch.nanquantile(of_blanks, 1 - top_entropy_quantile)  # ()
    return mask & (micro.old.entropy >= threshold)


def policy_loss(logp, old_logp, advantages, mask, config):
    """-> the loss of each blank (B,G,T), and whether the clip stopped its gradient (B,G,T) bool.

    −min(ρ·A, clip(ρ, 1 − clip_eps, 1 + clip_eps_high)·A), PPO's clip (1707.06347, equation 7) with
    DAPO's separate upper bound. clip_delta > 0 bounds the first ρ too, min(ρ, clip_delta)·A, where
    A < 0 lets it grow without limit (2505.07291, two-sided clip). importance_sampling_level `none`
    has neither ratio nor clip: −logp·A, REINFORCE.
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
    return d.exp() - 1 - d


def grpo_loss(now, micro, batch, config):
    """The loss of one micro-batch and its terms: a scalar, {name: scalar}.

    `now` holds the `LogProbs` of the policy; `micro` and `batch` are `Rollout`s. Losses and terms
    add up over micro-batches; `clipped` counts drawn characters.
    """
    mask = micro.fills.mask  # (B,T)
    losses, stopped = policy_loss(now.logp, micro.old.logp, micro.advantages, mask, config)
    kl = kl_estimate(now.logp, now.ref_logp, now.kl, config.kl_estimator)  # (B,G,T) or (B,1,T)
    weights = loss_weights(mask, batch, config)  # (B,T)
    learning = most_uncertain(micro, batch, config.top_entropy_quantile)  # (B,T) bool

    def total(x):
        """Over all draws: (B,G,T), or (B,1,T) of what the G draws of a blank share."""
        return (weights[:, None] * x.expand_as(losses)).sum()

    pg_loss = total(learning[:, None] * losses)
    kl_penalty = config.kl_beta * total(kl)
    loss = pg_loss + kl_penalty - config.entropy_coef * total(now.entropy[:, None])
    clipped = (stopped & learning[:, None]).sum()
    return loss, {"loss": loss, "pg_loss": pg_loss, "kl_penalty": kl_penalty, "clipped": clipped}
