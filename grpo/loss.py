"""Advantages and log-probabilities -> the loss, in every published form. Plain tensors and numbers, differentiated by autograd.

Letters: B masked inputs, T characters, G group size. logp, old_logp, ref_logp are (B,G,T); kl, entropy and mask are (B,T);
advantages are (B,G,1), or (B,G,T) where every blank is credited on its own.

    loss = Σ_{b,g,t} weight[b,t] · ( policy_loss[b,g,t] + kl_beta · KL[b,t] − entropy_coef · H[b,t] )

The forms of `loss_type` differ in the weights alone, which count over the whole step: the losses of its micro-batches, on
any number of processes, add up to the step's loss exactly.
"""

import torch

STIFFNESS = 4  # of `kl_weight`


def loss_weights(mask, loss_type, group_size, inputs, blanks, micro_batches):
    """The weight of each blank: mask (B,T) of one micro-batch -> (B,T) float, 0 where there is no blank.

    `inputs`, `blanks`, `micro_batches` count over the whole step, all micro-batches and processes.
    grpo      a mean over completions of the mean over their blanks (2402.03300, equation 3)
    dapo      a mean over all blanks of the step (2503.14476, equation 8)
    bnpo      a mean over all blanks of the micro-batch, then over micro-batches (TRL's name)
    dr_grpo   a constant normaliser, the length of an input (2503.20783)
    sum       a mean over completions of the sum over their blanks: the policy-gradient theorem as it is written
    """
    m = mask.float()
    per_input = m.sum(dim=1, keepdim=True).clamp(min=1)  # (B,1)
    return {
        "grpo": lambda: m / per_input / (inputs * group_size),
        "dapo": lambda: m / (blanks * group_size),
        "bnpo": lambda: m / m.sum().clamp(min=1) / (micro_batches * group_size),
        "dr_grpo": lambda: m / mask.shape[1] / (inputs * group_size),
        "sum": lambda: m / (inputs * group_size),
    }[loss_type]()


def log_ratio(logp, old_logp, mask, importance_sampling_level):
    """log of π(y)/π_old(y): per blank (`token`), or its mean over a completion's blanks (`sequence`: GSPO, 2507.18071, equation 7)."""
    difference = logp - old_logp  # (B,G,T)
    if importance_sampling_level == "sequence":
        return difference.sum(dim=-1, keepdim=True) / mask.sum(dim=-1)[:, None, None].clamp(
            min=1
        )  # (B,G,1)
    return difference


def most_uncertain(entropy, mask, top_entropy_quantile):
    """The blanks with the highest entropy (2506.01939): entropy, mask (N,T) of the whole step -> (N,T) bool, that share of the blanks (ties are kept)."""
    return mask & (
        entropy
        >= torch.nanquantile(entropy.float().where(mask, torch.nan), 1 - top_entropy_quantile)
    )


def policy_loss(
    logp,
    old_logp,
    advantages,
    mask,
    importance_sampling_level="token",
    clip_eps=0.2,
    clip_eps_high=0.2,
    clip_delta=0.0,
):
    """-> the loss of each blank (B,G,T), and whether the clip stopped its gradient (B,G,T) bool.

    −min(ρ·A, clip(ρ, 1 − clip_eps, 1 + clip_eps_high)·A), PPO's clip (1707.06347, equation 7) with DAPO's separate upper bound;
    clip_delta > 0 bounds the first ρ too, min(ρ, clip_delta)·A, where A < 0 lets it grow without limit (2505.07291, two-sided clip);
    with importance_sampling_level `none` there is neither ratio nor clip: −logp·A, REINFORCE.
    """
    if importance_sampling_level == "none":
        return -logp * advantages, torch.zeros_like(logp, dtype=torch.bool)
    ratio = log_ratio(logp, old_logp, mask, importance_sampling_level).exp()  # (B,G,T) or (B,G,1)
    clipped, bounded = (
        ratio.clamp(1 - clip_eps, 1 + clip_eps_high),
        ratio.clamp(max=clip_delta) if clip_delta else ratio,
    )
    stopped = (bounded * advantages > clipped * advantages) | (bounded < ratio)
    return -torch.minimum(bounded * advantages, clipped * advantages).expand_as(
        logp
    ), stopped.expand_as(logp)


def kl_estimate(logp, ref_logp, kl, kl_estimator):
    """KL(π‖π_ref) of each blank: `exact` (B,1,T), or one sample's estimate of it (B,G,T) (Schulman, "Approximating KL divergence").

    As a loss, on-policy: the expected gradient of k1 is 0, it restrains nothing; that of k2 is the gradient of KL(π‖π_ref), that of
    k3 (the papers' choice) is the gradient of KL(π_ref‖π). The estimators see the kept set only, `exact` the whole vocabulary.
    """
    d = ref_logp - logp  # (B,G,T)
    return {
        "exact": lambda: kl[:, None],
        "k1": lambda: -d,
        "k2": lambda: d * d / 2,
        "k3": lambda: d.exp() - 1 - d,
    }[kl_estimator]()


def kl_weight(kl_beta, kl_target, kl):
    """The weight of the KL, where it is to end near a target: kl_beta · (KL / kl_target)^STIFFNESS, of the step's mean KL per blank, in nats.

    So how far a run goes depends less on kl_beta: tests/test_train.py compares it with a constant weight.
    (1909.08593 steers the weight by feedback, over many steps; this acts at once, and has no state.)
    """
    return kl_beta * (kl / kl_target) ** STIFFNESS


def grpo_loss(
    logp,
    old_logp,
    ref_logp,
    kl,
    entropy,
    advantages,
    mask,
    weights,
    kl_beta=0.1,
    kl_estimator="exact",
    entropy_coef=0.0,
    importance_sampling_level="token",
    clip_eps=0.2,
    clip_eps_high=0.2,
    clip_delta=0.0,
    learning=None,
):
    """The loss of one micro-batch, and its parts: a scalar, {name: scalar without gradient}. Both add up over micro-batches.

    `weights` (B,T) are those of `loss_weights`; `learning` (B,T) bool limits the policy gradient to some blanks, KL and entropy to none.
    """
    weights = weights[:, None]  # (B,1,T)
    losses, stopped = policy_loss(
        logp,
        old_logp,
        advantages,
        mask,
        importance_sampling_level,
        clip_eps,
        clip_eps_high,
        clip_delta,
    )  # (B,G,T)
    G = logp.shape[1]
    pg_loss = ((weights if learning is None else weights * learning[:, None]) * losses).sum()
    kl_penalty = (
        kl_beta * (weights * kl_estimate(logp, ref_logp, kl, kl_estimator).expand_as(logp)).sum()
    )
    loss = pg_loss + kl_penalty - entropy_coef * G * (weights[:, 0] * entropy).sum()
    parts = {
        "loss": loss,
        "pg_loss": pg_loss,
        "kl_penalty": kl_penalty,
        "clip_ratio": (stopped & mask[:, None]).sum() / G,
        "approx_kl": kl_estimate(old_logp, logp.detach(), None, "k3").sum() / G,
    }  # the last two are per blank: divide by the step's blanks
    return loss, {name: value.detach() for name, value in parts.items()}
