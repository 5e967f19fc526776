"""Decide which characters may be drawn, and draw them.

Shapes: B masked inputs, T characters, G group size, V vocabulary.

The policy of a blank is q = softmax(logits / temperature), restricted to a kept set S and
renormalised. `grpo/logprobs.py` differentiates log q on the same S. So we score what we sample
from.

We compute S and the draws with whole numbers. A character's weight is its probability divided by
the likeliest character's, in units of 2^-21, rounded to a whole number. The sum of whole numbers
does not depend on the order of adding them. So two implementations that agree on the weights also
agree on S and on every draw, bit for bit. A character of weight 0 cannot be drawn, so it is never
in S.
"""

from dataclasses import dataclass

import torch

from grpo.batch import Rows

SCALE = 1 << 21  # the largest weight; 1024 of them add up to less than 2^32
UNIT = 1 << 24  # a float32 uniform is a multiple of 1 / UNIT


@dataclass(frozen=True)
class Fills(Rows):
    """Hold the completions, and the set S of characters that each blank was drawn from.

    An update uses the same S when it computes the log-probabilities of the completions.
    """

    completions: torch.Tensor  # (B,G,T) the filled-in copies of each input
    kept: torch.Tensor  # (B,T,V), or (B,T,K,V) with a latent: True for the characters in S


def integer_weights(logits, temperature):
    """Turn logits into whole numbers, the weights: (...,V) -> (...,V) int64.

    A weight is round(exp((logit − largest logit) / temperature) · 2^21). A logit of -inf gives 0.
    We compute in float64. In float32 two implementations of exp often differ enough that a weight
    rounds to another whole number.
    """
    x = logits.double()
    below_best = x - x.amax(dim=-1, keepdim=True)  # (...,V)
    relative = (below_best * (1 / temperature)).exp()  # (...,V) 1 for the likeliest
    return relative.mul(SCALE).round().long()


def keep(weights, config):
    """Find the set S of characters that each blank may draw: (...,V) -> (...,V) bool.

    top_k keeps the k likeliest characters (0 keeps all). top_p goes through these from the
    likeliest down, and keeps them until they hold the share top_p of their total probability
    (1904.09751). min_p drops characters that are less than min_p times as likely as the likeliest
    (2407.01082). top_k and top_p also keep any character that ties with the last one they keep.
    """
    kept = weights > 0
    if 0 < config.top_k < weights.shape[-1]:
        last = weights.topk(config.top_k, dim=-1).values[..., -1:]  # (...,1)
        kept &= weights >= last
    if config.top_p < 1:
        # Walk down from the likeliest character until the sum reaches top_p of the total.
        falling = (weights * kept).sort(dim=-1, descending=True).values  # (...,V)
        total = falling.sum(dim=-1, keepdim=True).double()  # (...,1)
        enough = (total * config.top_p).ceil()  # (...,1)
        still_short = falling.cumsum(dim=-1) < enough  # (...,V)
        last = still_short.sum(dim=-1, keepdim=True)  # (...,1) rank of the last character we keep
        kept &= weights >= falling.gather(-1, last)  # the last one, its ties and all likelier ones
    if config.min_p > 0:
        best = weights.amax(dim=-1, keepdim=True).double()  # (...,1)
        kept &= weights >= best * config.min_p
    return kept


def exclude_top_choices(weights, kept, uniforms, config):
    """Leave out the likeliest characters now and then (XTC, text-generation-webui's pull 6335).

    weights (...,V), kept (...,V) bool, uniforms (...,G) -> what is still kept (...,V) bool

    A kept character is a top choice if it has at least the share xtc_threshold of the total weight
    of the kept characters. With probability xtc_probability, a blank loses all of its top choices
    but the least likely one. All G completions draw from the same characters, so we toss one coin
    for each blank. The coin is a hash of the sum of the blank's G uniforms.
    """
    total = (uniforms * UNIT).long().sum(dim=-1, keepdim=True)  # (...,1)
    hashed = total * 2654435769 % (1 << 32)  # (...,1) Knuth's multiplicative hash
    coin = hashed < config.xtc_probability * (1 << 32)  # (...,1)
    share = config.xtc_threshold * (weights * kept).sum(dim=-1, keepdim=True).double()  # (...,1)
    top = kept & (weights >= share)  # (...,V)
    least = weights.masked_fill(~top, SCALE).amin(dim=-1, keepdim=True)  # (...,1)
    left_out = coin & top & (weights > least)  # (...,V)
    return kept & ~left_out


def draw(weights, uniforms):
    """Draw by inverting the cumulative sum: weights (...,V), uniforms (...,G) -> (...,G) int64."""
    cumulative = weights.cumsum(dim=-1)  # (...,V)
    total = cumulative[..., -1:]  # (...,1)
    whole = (uniforms * UNIT).long()  # (...,G)
    target = whole * total // UNIT  # (...,G) in [0, total)
    return torch.searchsorted(cumulative, target, right=True)


def allowed(logits, uniforms, config):
    """Compute each character's weight, and the set S of characters that may be drawn.

    logits (...,V), uniforms (...,G) -> weights (...,V) int64, S (...,V) bool

    A character outside S gets the weight 0. Only XTC uses the uniforms. It derives a coin toss for
    each blank from them.
    """
    weights = integer_weights(logits, config.temperature)  # (...,V)
    kept = keep(weights, config)  # (...,V)
    if config.xtc_probability:
        kept = exclude_top_choices(weights, kept, uniforms, config)  # (...,V)
    return weights * kept, kept


def sample_completions(logits, masked, mask, uniforms, config):
    """Fill every blank of each input G times, in parallel, from one set of logits.

    logits (B,T,V), masked (B,T), mask (B,T) bool, uniforms (B,G,T) in [0,1)
    -> completions (B,G,T) int64, kept (B,T,V) bool

    kept is True for the characters that a blank could draw, and all False at visible text.
    """
    uniforms = uniforms.transpose(1, 2).contiguous()  # (B,T,G)
    weights, kept = allowed(logits, uniforms, config)  # each (B,T,V)
    kept = kept & mask[..., None]
    draws = draw(weights * kept, uniforms).transpose(1, 2)  # (B,G,T)
    # If the logits of a blank are NaN, no character is kept. Then the blank stays a blank.
    drawable = kept.any(dim=-1)[:, None]  # (B,1,T)
    return torch.where(drawable, draws, masked[:, None]), kept


def penalise_repetition(logits, masked, mask, blank, penalty):
    """Make a character less likely if the visible text has it: logits (B,T,...,V) -> (B,T,...,V).

    CTRL (1909.05858, section 4.1) divides the logit by the penalty, but division would make a
    negative logit larger. We multiply negative logits instead, as others do. A constant added to
    all logits changes no probability, so it should not decide which logits are negative. We
    therefore centre them first. The penalty does little here, because any input shows most of the
    alphabet.
    """
    V = logits.shape[-1]
    visible = masked.masked_fill(mask | (masked < 0), blank)  # (B,T) padding becomes a blank, too
    seen = torch.zeros(len(masked), V, dtype=torch.bool, device=masked.device)
    seen = seen.scatter(1, visible, True)  # (B,V)
    seen = seen.view(-1, *(1,) * (logits.dim() - 2), V)  # (B,1,...,V)
    characters = torch.cat([logits[..., :blank], logits[..., blank + 1 :]], dim=-1)  # (B,T,...,V-1)
    centred = logits - characters.mean(dim=-1, keepdim=True)  # (B,T,...,V)
    penalised = torch.where(centred > 0, centred / penalty, centred * penalty)
    return torch.where(seen, penalised, centred)
