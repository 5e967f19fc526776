"""What one step is compared with: more passes, the judge's choice, and the price of independence.

Letters: N inputs, M of them, K values of the latent, n fills of each, T characters, V vocabulary.
"""

import torch

from grpo.mixture import log_marginal
from grpo.reward import mean_over_run
from grpo.rollout import in_batches
from grpo.sampling import integer_weights, options, sample_completions
from grpo.stats import log_mean, log_softmax
from grpo.words import decode, hidden_words

AT_ONCE = 32  # inputs of one forward pass: a CPU's cache holds their activations


@torch.no_grad()
def fill_in_passes(policy, logits, masked, mask, passes, config, surest=False):
    """Fill in at most `passes` forward passes, from the mixture's marginals: (N,T) -> (N,1,T).

    logits (N·K,T,V) are what the first pass says of the masked inputs.

    Each pass draws all blanks that are still open, in parallel, keeps an equal share of them,
    chosen at random, and leaves the rest to the next pass. With as many passes as blanks that is
    blank by blank. `surest` takes the likeliest character instead, and keeps the surest blanks.
    """
    filled = masked.clone()  # (N,T)
    left = mask.clone()  # (N,T)
    rng = torch.Generator().manual_seed(config.seed)
    rows = torch.arange(len(masked), device=masked.device)  # (M,) inputs that still have blanks
    for passes_left in range(passes, 0, -1):
        now = filled[rows]  # (M,T)
        still = left[rows]  # (M,T)
        if passes_left < passes:
            logits = in_batches(policy, now, AT_ONCE)  # (M·K,T,V)
        log_p = log_softmax(logits, config.temperature)  # (M·K,T,V)
        marginal = config.temperature * log_marginal(log_p, len(rows))  # (M,T,V) as logits
        if surest:
            weights = integer_weights(marginal, config.temperature)  # (M,T,V)
            choice = weights.argmax(dim=-1)  # (M,T)
            preference = weights.amax(dim=-1) / weights.sum(dim=-1)  # (M,T)
        else:
            uniforms = torch.rand(*now.shape, 2, generator=rng).to(now.device)  # (M,T,2)
            drawing, preference = uniforms.unbind(dim=-1)  # (M,T), (M,T)
            draws, _ = sample_completions(
                marginal, now, still, drawing[:, None], **options(config)
            )  # (M,1,T)
            choice = draws[:, 0]  # (M,T)
        share = (still.sum(dim=1, keepdim=True) / passes_left).ceil()  # (M,1)
        order = preference.masked_fill(~still, -1).argsort(dim=1, descending=True, stable=True)
        keep = order.argsort(dim=1) < share  # (M,T) the rank of each blank
        filled[rows] = torch.where(keep, choice, now)
        left[rows] = still & ~keep
        rows = left.any(dim=1).nonzero().squeeze(1)  # (M,)
        if not len(rows):
            break
    return filled[:, None]  # (N,1,T)


def best_by_run(fills, scores, mask):
    """Of n fills, each run of blanks as the judge likes it best there: -> (N,1,T).

    fills (N,n,T), the judge's scores of them (N,n,T), mask (N,T)
    """
    liked = mean_over_run(scores.double(), mask)  # (N,n,T) the same all over a run
    best = liked.argmax(dim=1, keepdim=True)  # (N,1,T)
    return fills.take_along_dim(best, dim=1)  # (N,1,T)


@torch.no_grad()
def price_of_independence(policy, logits, tokens, masked, mask, vocabulary, temperature):
    """log P(original word) blank by blank − in parallel, in nats; its mean over hidden words.

    Blank by blank: left to right, each blank sees the ones before it, Σ_t log m(y_t | y_<t), with
    m the mixture's marginal; other words stay hidden. In parallel: log 1/K Σ_z Π_t q_z,t(y_t), over
    the blanks of the word. logits (N·K,T,V) are of the masked inputs. None where no word is hidden.
    """
    N = len(tokens)
    log_p = log_softmax(logits, temperature)  # (N·K,T,V)
    log_m = log_marginal(log_p, N)  # (N,T,V)
    of_each_z = log_p.unflatten(0, (N, -1))  # (N,K,T,V)
    flags = mask.cpu().numpy()
    parallel = []
    first = []
    prefixes = []
    blanks = []
    originals = []
    for i, text in enumerate(decode(tokens, vocabulary)):
        for start, end in hidden_words(text, flags[i]):
            at = start + mask[i, start:end].nonzero().squeeze(1)  # (L,)
            word = tokens[i, at]  # (L,)
            given_z = of_each_z[i][:, at, word].sum(dim=1)  # (K,)
            parallel.append(log_mean(given_z, dim=0))
            first.append(log_m[i, at[0], word[0]])
            for known in range(1, len(at)):
                prefixes.append(masked[i].index_put((at[:known],), word[:known]))  # (T,)
                blanks.append(at[known])
                originals.append(word[known])
    if not parallel:
        return None
    gained = torch.stack(first).sum() - torch.stack(parallel).sum()
    if prefixes:
        logits = in_batches(policy, torch.stack(prefixes), AT_ONCE)  # (M·K,T,V)
        log_m = log_marginal(log_softmax(logits, temperature), len(prefixes))  # (M,T,V)
        rows = torch.arange(len(prefixes), device=log_m.device)  # (M,)
        gained += log_m[rows, torch.stack(blanks), torch.stack(originals)].sum()
    return gained.item() / len(parallel)
