"""Which characters may be drawn, and the draws.

Letters: B masked inputs, T characters, G group size, V vocabulary.

The policy of a blank is q = softmax(logits / temperature), restricted to a kept set S and
renormalised. Draws come from q (to 2^-22 of the likeliest), and `grpo/logprobs.py` differentiates
log q on the same S: nothing is sampled from one distribution and scored by another.

All comparisons are made on whole numbers. A character's weight is its probability relative to the
likeliest one, in units of 2^-21; sums of whole numbers do not depend on their order, so any
implementation that agrees on the weights agrees on the kept set and on every draw, bit for bit.
A character of weight 0 cannot be drawn, hence is never in S.
"""

from typing import NamedTuple

import torch

SCALE = 1 << 21  # V <= 1024 weights of at most SCALE add up to less than 2^32
UNIT = 1 << 24  # a float32 uniform is a whole number of 2^-24


class Fills(NamedTuple):
    """What was drawn, and what could have been. S is frozen here: later updates score on it."""

    completions: torch.Tensor  # (B,G,T) the filled-in copies of each input
    kept: torch.Tensor  # (B,T,V) bool, the characters that could be drawn; none but at a blank
    mask: torch.Tensor  # (B,T) bool, True at a blank
    z: torch.Tensor = None  # (B,G,T) of a mixture: which value each completion drew for the run


def options(config):
    """The sampling settings of a run, as `sample_completions` takes them."""
    names = ["temperature", "top_k", "top_p", "min_p"]
    if config.xtc_probability:
        names += ["xtc_threshold", "xtc_probability"]
    return {name: getattr(config, name) for name in names}


def integer_weights(logits, temperature):
    """w[v] = round(exp((logits[v] - max) / temperature) · 2^21): (...,V) int64.

    A logit of -inf gives 0. In float64, because two implementations of a float32 exp often round
    such a weight to different whole numbers.
    """
    x = logits.double()
    below_best = x - x.amax(dim=-1, keepdim=True)  # (...,V)
    relative = (below_best * (1 / temperature)).exp()  # (...,V) 1 for the likeliest
    return relative.mul(SCALE).round().long()


def keep(weights, top_k=0, top_p=1.0, min_p=0.0):
    """The kept set S of each blank: weights (...,V) -> (...,V) bool. Ties with the last are kept.

    top_k: the k likeliest (0: all)
    top_p: of those, the fewest likeliest whose share is at least top_p (1904.09751)
    min_p: at least min_p times as likely as the likeliest (2407.01082)
    """
    kept = weights > 0
    if 0 < top_k < weights.shape[-1]:
        last = weights.topk(top_k, dim=-1).values[..., -1:]  # (...,1)
        kept &= weights >= last
    if top_p < 1:
        # Walk down from the likeliest character until the sum reaches top_p of the total.
        falling = (weights * kept).sort(dim=-1, descending=True).values  # (...,V)
        total = falling.sum(dim=-1, keepdim=True).double()  # (...,1)
        enough = (total * top_p).ceil()  # (...,1)
        still_short = falling.cumsum(dim=-1) < enough  # (...,V)
        last = still_short.sum(dim=-1, keepdim=True)  # (...,1) the character that reaches it
        kept &= weights >= falling.gather(-1, last)  # and what ties with it
    if min_p > 0:
        best = weights.amax(dim=-1, keepdim=True).double()  # (...,1)
        kept &= weights >= best * min_p
    return kept


def exclude_top_choices(weights, kept, uniforms, xtc_threshold, xtc_probability):
    """XTC: now and then leave out the likeliest (text-generation-webui, pull request 6335).

    With probability xtc_probability per blank: of the kept characters whose share is at least
    xtc_threshold, keep the least likely alone, and its ties. weights, kept (...,V), uniforms
    (...,G) -> the new kept set (...,V). All G completions share S, so the coin is a blank's: a hash
    of its G uniforms, which tells nothing about any one of several.
    """
    total = (uniforms * UNIT).long().sum(dim=-1, keepdim=True)  # (...,1)
    hashed = total * 2654435769 % (1 << 32)  # (...,1) Knuth's multiplicative hash
    coin = hashed < xtc_probability * (1 << 32)  # (...,1)
    share = xtc_threshold * (weights * kept).sum(dim=-1, keepdim=True).double()  # (...,1)
    top = kept & (weights >= share)  # (...,V)
    least = weights.masked_fill(~top, SCALE).amin(dim=-1, keepdim=True)  # (...,1)
    left_out = coin & top & (weights > least)  # (...,V)
    return kept & ~left_out


def draw(weights, uniforms):
    """Inverse-CDF draws: weights (...,V), uniforms (...,G) float32 in [0,1) -> (...,G) int64."""
    cumulative = weights.cumsum(dim=-1)  # (...,V)
    total = cumulative[..., -1:]  # (...,1)
    whole = (uniforms * UNIT).long()  # (...,G)
    target = whole * total // UNIT  # (...,G) in [0, total)
    return torch.searchsorted(cumulative, target, right=True)


def sample_completions(
    logits, masked, mask, uniforms, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **xtc
):
    """Fill every blank of each input G times, in parallel, from one set of logits.

    logits (B,T,V), masked (B,T), mask (B,T) bool, uniforms (B,G,T) in [0,1); `xtc` are
    xtc_threshold and xtc_probability, where that is on
    -> completions (B,G,T) int64, kept (B,T,V) bool, empty where there is no blank
    """
    weights = integer_weights(logits, temperature)  # (B,T,V)
    kept = keep(weights, top_k, top_p, min_p) & mask[..., None]  # (B,T,V)
    uniforms = uniforms.transpose(1, 2).contiguous()  # (B,T,G)
    if xtc:
        kept = exclude_top_choices(weights, kept, uniforms, **xtc)  # (B,T,V)
    draws = draw(weights * kept, uniforms).transpose(1, 2)  # (B,G,T)
    drawable = kept.any(dim=-1)[:, None]  # (B,1,T) a blank whose logits are NaN stays a blank
    return torch.where(drawable, draws, masked[:, None]), kept
