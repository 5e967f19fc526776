"""
Which characters may be drawn, and the draws.

Letters: B masked inputs, T characters, G group size, V vocabulary.

The policy of a blank is q = softmax(logits / temperature), restricted to a kept set S and renormalised. Draws come from q,
and `grpo/stats.py` differentiates log q on the same S: nothing is sampled from one distribution and scored by another.

All comparisons are made on whole numbers. A character's weight is its probability relative to the likeliest one, in units
of 2^-21; sums of whole numbers do not depend on their order, so any implementation that agrees on the weights agrees on
the kept set and on every draw, bit for bit. A character of weight 0 cannot be drawn, hence is never in S.
"""
import torch

SCALE = 1 << 21  # V <= 1024 weights of at most SCALE add up to less than 2^32


def integer_weights(logits, temperature):
    """w[v] = round(exp((logits[v] - max) / temperature) * 2^21): (..., V) int64. A logit of -inf gives 0.

    In float64, because two implementations of a float32 exp often round such a weight to different whole numbers.
    """
    x = logits.double()
    return ((x - x.amax(dim=-1, keepdim=True)) / temperature).exp().mul(SCALE).round().long()


def keep(weights, top_k=0, top_p=1.0, min_p=0.0):
    """The kept set S of each blank: (..., V) weights -> (..., V) bool. Characters that tie with the last one kept are kept too.

    top_k: the k likeliest (0 = all). top_p: of those, the fewest likeliest whose share is at least top_p (1904.09751).
    min_p: at least min_p times as likely as the likeliest (2407.01082).
    """
    kept = weights > 0
    if top_k and top_k < weights.shape[-1]:
        kept &= weights >= weights.topk(top_k, dim=-1).values[..., -1:]
    if top_p < 1:
        falling = (weights * kept).sort(dim=-1, descending=True).values                   # (...,V)
        total = falling.sum(dim=-1, keepdim=True)                                         # (...,1)
        last = (falling.cumsum(dim=-1) < (total.double() * top_p).ceil()).sum(dim=-1, keepdim=True)  # (...,1) index of the last kept
        kept &= weights >= falling.gather(-1, last)
    if min_p > 0:
        kept &= weights >= weights.amax(dim=-1, keepdim=True).double() * min_p
    return kept


def draw(weights, uniforms):
    """Inverse-CDF draws: weights (..., V), uniforms (..., G) float32 in [0,1) -> (..., G) int64."""
    cumulative = weights.cumsum(dim=-1)                                                   # (...,V)
    target = ((uniforms * (1 << 24)).long() * cumulative[..., -1:]) >> 24                 # (...,G) in [0, total)
    return torch.searchsorted(cumulative, target, right=True)


def sample_completions(logits, masked, mask, uniforms, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Fill every blank of each input G times, in parallel, from one set of logits.

    logits (B,T,V), masked (B,T), mask (B,T) bool, uniforms (B,G,T) in [0,1)
    -> completions (B,G,T) int64, kept (B,T,V) bool, empty where there is no blank
    """
    weights = integer_weights(logits, temperature)                                        # (B,T,V)
    kept = keep(weights, top_k, top_p, min_p) & mask[..., None]                           # (B,T,V)
    draws = draw(weights * kept, uniforms.transpose(1, 2).contiguous()).transpose(1, 2)   # (B,G,T)
    drawable = kept.any(dim=-1)[:, None]                                                  # (B,1,T) a blank whose logits are NaN stays a blank
    return torch.where(drawable, draws, masked[:, None]), kept
