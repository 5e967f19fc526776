"""The loss of GRPO: push up what beat its group, push down what lost, and don't stray too far.

    loss = 1/G · Σ_{b,g,t} weight[b,t] · ( −objective[b,g,t] + β · KL[b,t] − c · H[b,t] )

The default is the first function of each kind: `clip`, `exact_kl` and `mean_of_completions`. Read
those and `grpo_loss`, and you've read GRPO's loss. Variants from other papers follow, with the same
arguments. To add one of your own, write such a function and a line in the table below it: the
line's name is then a value of the setting. Everything here is plain PyTorch that autograd
differentiates, down to logp, kl and entropy. Their gradient is by hand (grpo/policy.py).

Shapes: B masked inputs, b inputs of an update, T characters, G completions of each input.
"""

import torch
from torch import Tensor

from grpo import distributed
from grpo.distributed import gather, total_over_processes
from grpo.policy import LogProbs

# Objectives: what to maximize for each drawn character. They take
#
#     logp, old_logp   (B,G,T) its log-probability now, and when it was drawn
#     A                (B,G,1) the advantage of its completion
#     mask             (B,T)   True at a blank (gspo averages over them)
#     config           the settings, for the bounds
#
# and return the objective (B,G,T), and where a bound decides it (B,G,T) bool, which is what the
# metric clip_ratio counts. ρ = q/q_old is the importance ratio. In the first update after a rollout
# ρ is 1, and all of them have the gradient A·∇log q(y).


def clip(logp, old_logp, A, mask, config) -> tuple[Tensor, Tensor]:
    """min(ρA, clip(ρ, 1−ε, 1+ε_high)·A): PPO (1707.06347, eq. 7), GRPO (2402.03300, eq. 3).

    The upper bound has a setting of its own, as in DAPO (2503.14476, eq. 8).
    """
    return clipped_objective((logp - old_logp).exp(), A, config)


def clipped_objective(ratio, A, config) -> tuple[Tensor, Tensor]:
    """Stop pushing where the ratio (B,G,T) has gone far enough in the direction of A (B,G,1)."""
    clipped = ratio.clamp(1 - config.clip_eps, 1 + config.clip_eps_high)  # (B,G,T)
    return torch.minimum(ratio * A, clipped * A), clipped * A < ratio * A


def gspo(logp, old_logp, A, mask, config) -> tuple[Tensor, Tensor]:
    """`clip` with one ρ for the whole completion: GSPO (2507.18071, eq. 7).

    log ρ is the mean over the completion's blanks. Only its value is shared: each character keeps
    the gradient of its own log q(y), as in GSPO-token (eq. 13 and 14).
    """
    blanks = mask.sum(dim=-1)[:, None, None].clamp(min=1)  # (B,1,1)
    mean = (logp - old_logp).sum(dim=-1, keepdim=True) / blanks  # (B,G,1)
    log_ratio = mean.detach() + (logp - logp.detach())  # (B,G,T)
    return clipped_objective(log_ratio.exp(), A, config)


def cispo(logp, old_logp, A, mask, config) -> tuple[Tensor, Tensor]:
    """sg(min(ρ, 1+ε_high))·A·log q: CISPO (2506.13585, eq. 4 and 5).

    The ratio is only a weight, so the bound never stops a gradient. TRL's epsilon_high is the whole
    bound, 1 + ε_high here.
    """
    ratio = (logp - old_logp).exp()  # (B,G,T)
    bound = 1 + config.clip_eps_high
    return ratio.clamp(max=bound).detach() * A * logp, ratio > bound


def reinforce(logp, old_logp, A, mask, config) -> tuple[Tensor, Tensor]:
    """A·log q: no ratio, no bound (RLOO, 2402.14740).

    This is the policy gradient only in the first update after a rollout, so there may be only one.
    """
    return A * logp, torch.zeros_like(logp, dtype=torch.bool)


OBJECTIVES = {"clip": clip, "gspo": gspo, "cispo": cispo, "reinforce": reinforce}


# KL(q‖q_ref): exact, or Schulman's estimates of it from the drawn characters ("Approximating KL
# divergence"). They take the `LogProbs` of an update, and return (B,1,T) or (B,G,T), in nats.


def exact_kl(now: LogProbs) -> Tensor:
    """Σ_v q(v)·(log q(v) − log q_ref(v)), the same for all G draws of a blank: -> (B,1,T)."""
    return now.kl[:, None]


def k1(now: LogProbs) -> Tensor:
    """log q(y) − log q_ref(y). As a loss its expected gradient is 0, so it holds nothing back."""
    return now.logp - now.ref_logp


def k2(now: LogProbs) -> Tensor:
    """Half of k1 squared. For independent blanks its expected gradient is that of KL(q‖q_ref)."""
    d = now.ref_logp - now.logp  # (B,G,T)
    return d * d / 2


def k3(now: LogProbs) -> Tensor:
    """r − 1 − log r with r = q_ref(y)/q(y): what the papers use.

    For independent blanks its expected gradient is that of KL(q_ref‖q), as long as q is still the
    policy that drew y.
    """
    d = now.ref_logp - now.logp  # (B,G,T)
    return d.exp() - 1 - d


KL_ESTIMATORS = {"exact": exact_kl, "k1": k1, "k2": k2, "k3": k3}


def blanks_that_learn(entropy: Tensor, mask: Tensor, config) -> Tensor:
    """Find the blanks of a rollout that learn from the reward: entropy, mask (B,T) -> (B,T) bool.

    By default that's all of them. With top_entropy_quantile it's that share of the step's blanks,
    those with the largest entropy ("Beyond the 80/20 rule", 2506.01939), and any that tie with the
    last of them. The KL holds back the others, too.
    """
    if config.top_entropy_quantile == 1:
        return mask
    at_blanks = gather(entropy).where(gather(mask), torch.nan)  # (B,T) of all processes
    threshold = torch.nanquantile(at_blanks, 1 - config.top_entropy_quantile)  # ()
    return mask & (entropy >= threshold)


# Averages: how much each blank weighs. They take the mask of an update (b,T), as float, and return
# the weight of each blank (b,T). They count the inputs of all processes. The G completions of an
# input weigh the same, so `grpo_loss` just averages over them.


def mean_of_completions(mask: Tensor) -> Tensor:
    """Average the blanks of each completion, then the completions (2402.03300, eq. 3)."""
    per_completion = mask / (len(mask) * distributed.PROCESSES)  # (b,T)
    return per_completion / mask.sum(dim=1, keepdim=True).clamp(min=1)


def dapo(mask: Tensor) -> Tensor:
    """Average all blanks of the update. In DAPO (2503.14476, eq. 8) it's those of a group."""
    return mask / total_over_processes(mask.sum()).clamp(min=1)


def total(mask: Tensor) -> Tensor:
    """Sum the blanks of each completion, then average completions: the policy gradient itself."""
    return mask / (len(mask) * distributed.PROCESSES)


def dr_grpo(mask: Tensor) -> Tensor:
    """Divide `sum` by the constant T: Dr. GRPO (2503.20783)."""
    return total(mask) / mask.shape[1]


LOSS_TYPES = {
    "grpo": mean_of_completions,
    "dapo": dapo,
    "sum": total,
    "dr_grpo": dr_grpo,
}


def loss_weights(mask: Tensor, config) -> Tensor:
    """Weigh the blanks of an update's inputs: mask (b,T) -> (b,T), 0 at visible text.

    The weights are normalized over the whole update, so that the losses of its micro-batches just
    add up.
    """
    return LOSS_TYPES[config.loss_type](mask.float())


def grpo_loss(
    now: LogProbs,  # of the completions under the current policy
    old: LogProbs,  # of the same completions under the policy that drew them
    advantages: Tensor,  # (B,G)
    learns: Tensor,  # (B,T) from `blanks_that_learn`
    mask: Tensor,  # (B,T)
    weights: Tensor,  # (B,T) from `loss_weights`
    config,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of one micro-batch: -> a scalar, and {name: scalar} for the metrics."""
    A = advantages[..., None]  # (B,G,1)
    objective, clipped = OBJECTIVES[config.objective](now.logp, old.logp, A, mask, config)
    learns = learns[:, None]  # (B,1,T)
    kl = KL_ESTIMATORS[config.kl_estimator](now).expand_as(objective)  # (B,G,T)
    entropy = now.entropy[:, None].expand_as(objective)  # (B,G,T) the G draws share it
    weights = weights[:, None]  # (B,1,T)
    G = objective.shape[1]

    pg_loss = -(weights * learns * objective).sum() / G
    kl_penalty = config.kl_beta * (weights * kl).sum() / G
    loss = pg_loss + kl_penalty - config.entropy_coef * (weights * entropy).sum() / G
    with torch.no_grad():
        moved = now.logp - old.logp  # (B,G,T)
        figures = {
            "blanks": mask.sum(),
            # summed over blanks
            "entropy": now.entropy.sum(),
            "mean_log_prob": now.logp.sum() / G,
            "mean_kl": now.kl.sum(),
            "approx_kl": (moved.exp() - 1 - moved).sum() / G,  # k3, of the policy that drew and now
            "clip_ratio": (clipped & learns).sum() / G,
            # averaged already
            "loss": loss,
            "pg_loss": pg_loss,
            "kl_penalty": kl_penalty,
        }
    return loss, {name: x.detach().float() for name, x in figures.items()}
