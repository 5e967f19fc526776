"""Compute the loss of GRPO from advantages and log-probabilities.

    loss = Σ_{b,g,t} weight[b,t] · ( −objective[b,g,t] + β · KL[b,t] − entropy_coef · H[b,t] )

Here stand the objective, the KL and the average of the default run. The tables add what others have
published: OBJECTIVES (grpo/variants/objectives.py), KL_ESTIMATORS (kl_estimators.py) and LOSS_TYPES
(averages.py). Everything is plain PyTorch, and autograd differentiates it.

Shapes: B masked inputs, T characters, G completions of each. logp, old_logp, ref_logp, A are
(B,G,T); kl, entropy, mask, words and weights are (B,T).
"""

import math
from dataclasses import dataclass

import torch

from grpo.distributed import n_processes
from grpo.variants import averages, kl_estimators, objectives


def clip(logp, old_logp, A, words, config):
    """min(ρA, clip(ρ, 1−ε, 1+ε_high)·A), with ρ = q(y) / q_old(y): -> objective, stopped (B,G,T).

    This is the objective of PPO (1707.06347, equation 7) and of GRPO (2402.03300, equation 3), with
    an upper bound of its own as in DAPO (2503.14476, equation 8). `stopped` says where the bound
    acts, so that the objective has no gradient. Where A < 0, the ρ of the first term can grow
    without limit, unless clip_delta bounds it (2505.07291).
    """
    ratio = (logp - old_logp).exp()
    bounded = ratio.clamp(max=config.clip_delta or math.inf)
    clipped = ratio.clamp(1 - config.clip_eps, 1 + config.clip_eps_high)
    objective = torch.minimum(bounded * A, clipped * A)
    return objective, (bounded < ratio) | (clipped * A < bounded * A)


def exact_kl(now):
    """KL(q‖q_ref) of each blank, summed over the vocabulary: -> (B,1,T), for all draws."""
    return now.kl[:, None]


def mean_of_completions(mask, config):
    """Average the blanks of each completion, then the completions (2402.03300, equation 3).

    mask (b,T) -> weights (b,T). All processes together have n_processes() · b · G completions.
    """
    per_completion = mask / (len(mask) * n_processes() * config.group_size)
    return per_completion / mask.sum(dim=1, keepdim=True).clamp(min=1)


OBJECTIVES = {"clip": clip} | objectives.OBJECTIVES
KL_ESTIMATORS = {"exact": exact_kl} | kl_estimators.KL_ESTIMATORS
LOSS_TYPES = {"grpo": mean_of_completions} | averages.LOSS_TYPES


def loss_weights(mask, rows, config):
    """Weigh each blank of an update, whose inputs are `rows`: mask (B,T) -> (B,T), 0 elsewhere.

    The weights are normalised over the whole update. So its loss does not depend on how it is cut
    into micro-batches, except with bnpo.
    """
    weights = torch.zeros_like(mask, dtype=torch.float)
    weights[rows] = LOSS_TYPES[config.loss_type](mask[rows].float(), config)
    return weights


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
    objective, stopped = OBJECTIVES[config.objective](now.logp, old.logp, advantages, words, config)
    kl = KL_ESTIMATORS[config.kl_estimator](now)  # (B,1,T), or (B,G,T)

    def total(x):
        """Sum weights · x over all draws. x is (B,G,T), or (B,1,T) if the G draws share it."""
        return (weights[:, None] * x.expand_as(objective)).sum()

    pg_loss = -total(objective)
    kl_penalty = config.kl_beta * total(kl)
    loss = pg_loss + kl_penalty - config.entropy_coef * total(now.entropy[:, None])
    clipped = (stopped & (words > 0)[:, None]).sum()  # at blanks only
    return loss, Terms(loss, pg_loss, kl_penalty, clipped)
