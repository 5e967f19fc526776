"""What one step is compared with: the same generator blank by blank, and the judge's choice.

Letters: N inputs, M of them that still have blanks, n fills of each, T characters, V vocabulary.
"""

import torch

from grpo.mixture import log_prob_of_runs, marginal
from grpo.rollout import in_batches
from grpo.sampling import integer_weights, options, sample_completions

AT_ONCE = 32  # inputs of one forward pass: a CPU's cache holds their activations


@torch.no_grad()
def fill_blank_by_blank(policy, masked, mask, config, surest=False):
    """A forward pass for every blank of an input: masked, mask (N,T) -> (N,1,T).

    Each pass sees what those before it filled, and fills one blank, drawn and chosen at random;
    `surest`: where the likeliest character is surest, with that one.
    """
    filled = masked.clone()  # (N,T)
    left = mask.clone()  # (N,T)
    rng = torch.Generator().manual_seed(config.seed)
    while left.any():
        rows = left.any(dim=1).nonzero().squeeze(1)  # (M,)
        now = filled[rows]  # (M,T)
        still = left[rows]  # (M,T)
        logits = in_batches(policy, now, AT_ONCE)  # (M,T,V) or (M,T,K,V)
        logits = marginal(logits, still, config.temperature)  # (M,T,V)
        if surest:
            weights = integer_weights(logits, config.temperature)  # (M,T,V)
            choice = weights.argmax(dim=-1)  # (M,T)
            preference = weights.amax(dim=-1) / weights.sum(dim=-1)  # (M,T)
        else:
            uniforms = torch.rand(*now.shape, 2, generator=rng).to(now.device)  # (M,T,2)
            drawing, preference = uniforms.unbind(dim=-1)  # (M,T), (M,T)
            draws, _ = sample_completions(logits, now, still, drawing[:, None], **options(config))
            choice = draws[:, 0]  # (M,T)
        at = preference.masked_fill(~still, -1).argmax(dim=1, keepdim=True)  # (M,1)
        filled[rows] = now.scatter(1, at, choice.gather(1, at))
        left[rows] = still.scatter(1, at, False)
    return filled[:, None]  # (N,1,T)


def best_by_run(logits, fills, log_odds, mask):
    """Of n fills, each run of blanks as it is likeliest in the text, says the judge: (N,1,T).

    log p = log q + log p/q: the base model's logits (N,T,V) or (N,T,K,V), and the judge's log-odds
    (N,n,T) of the fills (N,n,T); mask (N,T). The log-odds alone would take what q thinks rare.
    """
    log_q = log_prob_of_runs(logits, fills, mask)  # (N,n,T) the same all over a run
    best = (log_q + log_odds).argmax(dim=1, keepdim=True)  # (N,1,T)
    return fills.take_along_dim(best, dim=1)  # (N,1,T)
