"""Draw from only some of the characters. The default run doesn't use any of this.

A truncation finds the characters that each blank may be drawn from. Drawing and scoring then both
see logits in which all others are as impossible as the blank itself, so what is sampled is what is
differentiated. The set is found once, at the rollout, and its updates reuse it
(`Product.log_probs`).

To add one of your own, write a function and a line in TRUNCATIONS, and its setting in Config
(grpo/run/config.py).

Shapes: B masked inputs, T characters, K values of a latent, V vocabulary.
"""

import torch
from torch import Tensor

LEFT_OUT = -1e9  # a logit; like -inf, but it makes no NaN
TOP_CHOICE = 0.1  # XTC leaves out characters that are at least this likely

# Each takes the probabilities q (...,V), with 0 for what another one has left out, the value of its
# setting, and coins (...,1) in [0,1). It returns what may be drawn, (...,V) bool. Characters that
# tie with the last one allowed are allowed, too.


def top_k(q: Tensor, k: int, coins: Tensor) -> Tensor:
    """Keep the k most likely characters."""
    return q >= q.topk(min(k, q.shape[-1]), dim=-1).values[..., -1:]


def top_p(q: Tensor, share: float, coins: Tensor) -> Tensor:
    """Keep the most likely characters that add up to this share of q (1904.09751)."""
    falling = q.sort(dim=-1, descending=True).values  # (...,V)
    up_to = falling.cumsum(dim=-1)  # (...,V)
    still_short = up_to < share * up_to[..., -1:]  # (...,V)
    last = still_short.sum(dim=-1, keepdim=True)  # (...,1) rank of the last character to keep
    return q >= falling.gather(-1, last)


def min_p(q: Tensor, share: float, coins: Tensor) -> Tensor:
    """Keep what has at least this share of the most likely one's probability (2407.01082)."""
    return q >= share * q.amax(dim=-1, keepdim=True)


def xtc(q: Tensor, chance: float, coins: Tensor) -> Tensor:
    """Leave out all likely characters except the least likely one, if the coin says so.

    XTC (exclude top choices) is text-generation-webui's pull request 6335. All G completions of an
    input draw from the same characters, so there's one coin for each blank.
    """
    top = q >= TOP_CHOICE * q.sum(dim=-1, keepdim=True)  # (...,V)
    least = torch.where(top, q, 2.0).amin(dim=-1, keepdim=True)  # (...,1)
    return ~(top & (q > least) & (coins < chance))


# {setting: (function, the value that switches it off)}, in the order in which they act
TRUNCATIONS = {
    "top_k": (top_k, 0),
    "top_p": (top_p, 1),
    "min_p": (min_p, 0),
    "xtc_probability": (xtc, 0),
}


def truncates(config) -> bool:
    """Tell whether any truncation is on."""
    return any(getattr(config, name) != off for name, (_, off) in TRUNCATIONS.items())


def allowed_characters(logits: Tensor, coins: Tensor, config) -> Tensor:
    """Find what may be drawn: logits (...,V), coins (...,1) in [0,1) -> (...,V) bool."""
    q = (logits.double() / config.temperature).softmax(dim=-1)  # (...,V)
    allowed = q > 0
    for name, (function, off) in TRUNCATIONS.items():
        value = getattr(config, name)
        if value != off:
            kept = allowed & function(q * allowed, value, coins)
            allowed = torch.where(kept.any(dim=-1, keepdim=True), kept, allowed)  # never nothing
    return allowed


def restrict(logits: Tensor, allowed: Tensor) -> Tensor:
    """Make all but the allowed characters impossible: (...,V), (...,V) bool -> (...,V)."""
    return logits.masked_fill(~allowed, LEFT_OUT)


def penalize_repetition(logits: Tensor, masked: Tensor, blank: int, penalty: float) -> Tensor:
    """Make characters of the visible text less likely: logits (B,T,...,V) -> (B,T,...,V).

    CTRL (1909.05858, section 4.1) divides logits by the penalty. That would raise a negative one,
    so we multiply those, as others do.
    """
    V = logits.shape[-1]
    visible = masked.masked_fill(masked < 0, blank)  # (B,T) padding is -1
    seen = torch.zeros(len(visible), V, dtype=torch.bool, device=visible.device)
    seen = seen.scatter(1, visible, True)  # (B,V)
    seen = seen.view(-1, *(1,) * (logits.dim() - 2), V)  # (B,1,...,V)
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
