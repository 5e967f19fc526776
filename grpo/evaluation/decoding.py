"""What one step is compared with: the same generator in more passes, and the judge's choice.

Letters: N inputs, M of them that still have blanks, n fills of each, T characters, V vocabulary.
"""

import torch

from grpo.mixture import log_prob_of_runs, marginal
from grpo.rollout import in_batches
from grpo.sampling import integer_weights, options, sample_completions

AT_ONCE = 32  # inputs of one forward pass: a CPU's cache holds their activations


@torch.no_grad()
def fill_in_passes(policy, masked, mask, passes, config, surest=False):
    """Fill in at most `passes` forward passes: masked, mask (N,T) -> (N,1,T).

    Each pass draws all blanks that are still open, in parallel, keeps an equal share of them,
    chosen at random, and leaves the rest to the next pass. With as many passes as blanks that is
    blank by blank. `surest` takes the likeliest character instead, and keeps the surest blanks.
    """
    filled = masked.clone()  # (N,T)
    left = mask.clone()  # (N,T)
    rng = torch.Generator().manual_seed(config.seed)
    for passes_left in range(passes, 0, -1):
        rows = left.any(dim=1).nonzero().squeeze(1)  # (M,)
        if not len(rows):
            break
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
        share = (still.sum(dim=1, keepdim=True) / passes_left).ceil()  # (M,1)
        order = preference.masked_fill(~still, -1).argsort(dim=1, descending=True, stable=True)
        keep = order.argsort(dim=1) < share  # (M,T) the rank of each blank
        filled[rows] = torch.where(keep, choice, now)
        left[rows] = still & ~keep
    return filled[:, None]  # (N,1,T)


def best_by_run(logits, fills, log_odds, mask):
    """Of n fills, each run of blanks as it is likeliest in the text, says the judge: (N,1,T).

    log p = log q + log p/q: the base model's logits (N,T,V) or (N,T,K,V), and the judge's log-odds
    (N,n,T) of the fills (N,n,T); mask (N,T). The log-odds alone would take what q thinks rare.
    """
    log_q = log_prob_of_runs(logits, fills, mask)  # (N,n,T) the same all over a run
    best = (log_q + log_odds).argmax(dim=1, keepdim=True)  # (N,1,T)
    return fills.take_along_dim(best, dim=1)  # (N,1,T)
