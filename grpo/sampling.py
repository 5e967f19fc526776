"""Which characters may be drawn, and the draws.

Letters: B masked inputs, T characters, G group size, V vocabulary.

The policy of a blank is q = softmax(logits / temperature), restricted to a kept set S and renormalised. Draws come from q,
and `grpo/stats.py` differentiates log q on the same S: nothing is sampled from one distribution and scored by another.

All comparisons are made on whole numbers. A character's weight is its probability relative to the likeliest one, in units
of 2^-21; sums of whole numbers do not depend on their order, so any implementation that agrees on the weights agrees on
the kept set and on every draw, bit for bit. A character of weight 0 cannot be drawn, hence is never in S.
"""

import torch

OPTIONS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "xtc_threshold",
    "xtc_probability",
)  # settings that `sample_completions` takes
SCALE = 1 << 21  # V <= 1024 weights of at most SCALE add up to less than 2^32


def options(config):
    """The sampling settings of a run, as `sample_completions` takes them; the last two, which the fused kernel has not, only where they are on."""
    return {
        name: getattr(config, name) for name in (OPTIONS if config.xtc_probability else OPTIONS[:4])
    }


def penalise(logits, masked, repetition_penalty):
    """Make the characters that are visible in the input less likely: logits (B,T,V), masked (B,T) -> (B,T,V), differentiable.

    A visible character's logit is divided by the penalty if it is positive, else multiplied by it (CTRL, 1909.05858, section 4.1). It comes
    before temperature and truncation, and it is part of the policy: it is sampled, scored and differentiated.
    """
    B, _, V = logits.shape  # what is no character is counted in column V, and cut
    seen = torch.zeros(B, V + 1, dtype=torch.bool, device=logits.device).scatter_(
        1, torch.where(masked < 0, V, masked), True
    )[:, None, :V]  # (B,1,V)
    return torch.where(
        seen,
        torch.where(logits < 0, logits * repetition_penalty, logits / repetition_penalty),
        logits,
    )


def integer_weights(logits, temperature):
    """w[v] = round(exp((logits[v] - max) / temperature) * 2^21): (..., V) int64. A logit of -inf gives 0.
    In float64, because two implementations of a float32 exp often round such a weight to different whole numbers."""
    x = logits.double()
    x = (x - x.amax(dim=-1, keepdim=True)) * (1 / temperature)  # (...,V)
    return x.exp().mul(SCALE).round().long()


def keep(weights, top_k=0, top_p=1.0, min_p=0.0):
    """The kept set S of each blank: (..., V) weights -> (..., V) bool. Characters that tie with the last one kept are kept too.

    top_k: the k likeliest (0 = all). top_p: of those, the fewest likeliest whose share is at least top_p (1904.09751).
    min_p: at least min_p times as likely as the likeliest (2407.01082).
    """
    kept = weights > 0
    if top_k and top_k < weights.shape[-1]:
        kept &= weights >= weights.topk(top_k, dim=-1).values[..., -1:]
    if top_p < 1:
        falling = (weights * kept).sort(dim=-1, descending=True).values  # (...,V)
        total = falling.sum(dim=-1, keepdim=True)  # (...,1)
        last = (falling.cumsum(dim=-1) < (total.double() * top_p).ceil()).sum(
            dim=-1, keepdim=True
        )  # (...,1) index of the last kept
        kept &= weights >= falling.gather(-1, last)
    if min_p > 0:
        kept &= weights >= weights.amax(dim=-1, keepdim=True).double() * min_p
    return kept


def exclude_top_choices(weights, kept, uniforms, xtc_threshold, xtc_probability):
    """XTC (text-generation-webui, pull request 6335): with probability xtc_probability per blank, of the kept characters whose share is at
    least xtc_threshold, keep the least likely alone (and its ties). (..., V) twice, uniforms (..., G) -> the new kept set (..., V).

    All G completions share S, so the coin is a blank's: a hash of its G uniforms, which tells nothing about any one of them.
    """
    coin = (uniforms * (1 << 24)).long().sum(dim=-1, keepdim=True) * 2654435769 % (
        1 << 32
    ) < xtc_probability * (1 << 32)  # (...,1)
    top = kept & (
        weights >= (weights * kept).sum(dim=-1, keepdim=True).double() * xtc_threshold
    )  # (...,V)
    least = weights.masked_fill(~top, SCALE).amin(dim=-1, keepdim=True)  # (...,1)
    return kept & ~(coin & top & (weights > least))


def draw(weights, uniforms):
    """Inverse-CDF draws: weights (..., V), uniforms (..., G) float32 in [0,1) -> (..., G) int64."""
    cumulative = weights.cumsum(dim=-1)  # (...,V)
    target = ((uniforms * (1 << 24)).long() * cumulative[..., -1:]) >> 24  # (...,G) in [0, total)
    return torch.searchsorted(cumulative, target, right=True)


def sample_completions(
    logits,
    masked,
    mask,
    uniforms,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    xtc_threshold=0.1,
    xtc_probability=0.0,
):
    """Fill every blank of each input G times, in parallel, from one set of logits.

    logits (B,T,V), masked (B,T), mask (B,T) bool, uniforms (B,G,T) in [0,1)
    -> completions (B,G,T) int64, kept (B,T,V) bool, empty where there is no blank
    """
    weights = integer_weights(logits, temperature)  # (B,T,V)
    kept = keep(weights, top_k, top_p, min_p) & mask[..., None]  # (B,T,V)
    uniforms = uniforms.transpose(1, 2).contiguous()  # (B,T,G)
    if xtc_probability:
        kept = exclude_top_choices(weights, kept, uniforms, xtc_threshold, xtc_probability)
    draws = draw(weights * kept, uniforms).transpose(1, 2)  # (B,G,T)
    drawable = kept.any(dim=-1)[:, None]  # (B,1,T) a blank whose logits are NaN stays a blank
    return torch.where(drawable, draws, masked[:, None]), kept
