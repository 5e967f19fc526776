"""What one step is compared with: more passes, the judge's choice, and the price of independence.

Letters: N inputs, M of them, K values of the latent, n fills of each, T characters, V vocabulary.
"""

from itertools import groupby

import torch

from grpo.mixture import log_marginal, log_mean, marginal_logits
from grpo.rollout import in_batches
from grpo.sampling import integer_weights, options, sample_completions
from grpo.stats import log_softmax
from grpo.words import decode, hidden_words

AT_ONCE = 64  # inputs of one forward pass


@torch.no_grad()
def fill_in_passes(policy, masked, mask, passes, config, seed, surest=False):
    """Fill in at most `passes` forward passes, from the mixture's marginals: (N,T) -> (N,1,T).

    Each pass draws all blanks that are still open, in parallel, keeps an equal share of them,
    chosen at random, and leaves the rest to the next pass. With as many passes as blanks that is
    blank by blank. `surest` takes the likeliest character instead, and keeps the surest blanks.
    """
    filled = masked.clone()  # (N,T)
    left = mask.clone()  # (N,T)
    rng = torch.Generator().manual_seed(seed)
    for passes_left in range(passes, 0, -1):
        rows = left.any(dim=1).nonzero().squeeze(1)  # (M,) inputs that still have blanks
        if not len(rows):
            break
        now = filled[rows]  # (M,T)
        still = left[rows]  # (M,T)
        logits = in_batches(policy, now, AT_ONCE)  # (M·K,T,V)
        logits = marginal_logits(logits, len(rows), config.temperature)  # (M,T,V)
        if surest:
            weights = integer_weights(logits, config.temperature)  # (M,T,V)
            choice = weights.argmax(dim=-1)  # (M,T)
            preference = weights.amax(dim=-1) / weights.sum(dim=-1)  # (M,T)
        else:
            uniforms = torch.rand(*now.shape, 2, generator=rng).to(now.device)  # (M,T,2)
            drawing, preference = uniforms.unbind(dim=-1)  # (M,T), (M,T)
            draws, _ = sample_completions(
                logits, now, still, drawing[:, None], **options(config)
            )  # (M,1,T)
            choice = draws[:, 0]  # (M,T)
        share = (still.sum(dim=1, keepdim=True) / passes_left).ceil()  # (M,1)
        order = preference.masked_fill(~still, -1).argsort(dim=1, descending=True, stable=True)
        keep = order.argsort(dim=1) < share  # (M,T) the rank of each blank
        filled[rows] = torch.where(keep, choice, now)
        left[rows] = still & ~keep
    return filled[:, None]  # (N,1,T)


def runs(flags):
    """(start, end) of each run of blanks in a list of bools."""
    spans = []
    end = 0
    for blank, run in groupby(flags):
        start = end
        end += len(list(run))
        if blank:
            spans.append((start, end))
    return spans


def best_by_run(fills, scores, mask):
    """Each run of blanks as in the fill that the judge likes best there: (N,n,T) -> (N,1,T).

    scores (N,n,T): the judge read the n fills as they are.
    """
    best = fills[:, 0].clone()  # (N,T)
    for i, flags in enumerate(mask.tolist()):
        for start, end in runs(flags):
            winner = scores[i, :, start:end].mean(dim=1).argmax()
            best[i, start:end] = fills[i, winner, start:end]
    return best[:, None]  # (N,1,T)


@torch.no_grad()
def price_of_independence(policy, log_p, tokens, masked, mask, vocabulary, temperature):
    """log P(original word) blank by blank − in parallel, in nats; its mean over hidden words.

    Blank by blank: left to right, each blank sees the ones before it, Σ_t log m(y_t | y_<t), with
    m the mixture's marginal; other words stay hidden. In parallel: log 1/K Σ_z Π_t q_z,t(y_t), over
    the blanks of the word. log_p (N·K,T,V) is of the masked inputs. None where no word is hidden.
    """
    log_p = log_p.unflatten(0, (len(tokens), -1))  # (N,K,T,V)
    flags = mask.cpu().numpy()
    parallel, prefixes, blanks, originals = [], [], [], []
    for i, text in enumerate(decode(tokens, vocabulary)):
        for start, end in hidden_words(text, flags[i]):
            at = start + mask[i, start:end].nonzero().squeeze(1)  # (L,)
            word = tokens[i, at]  # (L,)
            parallel.append(log_mean(log_p[i][:, at, word].sum(dim=1), dim=0))
            for known in range(len(at)):
                prefixes.append(masked[i].index_put((at[:known],), word[:known]))  # (T,)
                blanks.append(at[known])
                originals.append(word[known])
    if not parallel:
        return None
    # The first blank of each word of an input sees the same: different prefixes are read once.
    different, which = torch.stack(prefixes).unique(dim=0, return_inverse=True)  # (M,T), (M',)
    logits = in_batches(policy, different, AT_ONCE)  # (M·K,T,V)
    log_m = log_marginal(log_softmax(logits, temperature), len(different))  # (M,T,V)
    chain = log_m[which, torch.stack(blanks), torch.stack(originals)]  # (M',)
    return (chain.sum() - torch.stack(parallel).sum()).item() / len(parallel)
