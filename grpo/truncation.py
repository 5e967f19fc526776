"""Draw from only some of the characters. The default run doesn't use any of this.

A truncation finds the characters that each blank may be drawn from. Drawing and scoring then both
see logits in which all others are as impossible as the blank itself, so what is sampled is what is
differentiated. The set is found once, at the rollout, and its updates reuse it. `Truncated` is the
`Product` that does so; grpo/latent.py does the same for each of its z.

Each truncation is an `if` in `allowed_characters`. To add one of your own, write a line there, one
in `truncates`, and its setting in Config (grpo/run/config.py).

Shapes: B masked inputs, T characters, K values of a latent, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from grpo.policy import LogProbs, Product, Sample

LEFT_OUT = -1e9  # a logit; like -inf, but it makes no NaN
TOP_CHOICE = 0.1  # XTC leaves out characters that are at least this likely


def truncates(config) -> bool:
    """Tell whether any truncation is on."""
    return bool(config.top_k or config.top_p < 1 or config.min_p or config.xtc_probability)


class Truncated(Product):
    """A `Product` that draws from the allowed characters alone."""

    def sample(self) -> Sample:
        allowed = allowed_characters(self.logits, self.batch.coins()[..., None], self.config)
        restricted = Product(restrict(self.logits, allowed), self.batch, self.config)
        return replace(restricted.sample(), allowed=allowed)

    def log_probs(self, sample: Sample, reference: Product) -> LogProbs:
        """Take logp and ref_logp from the allowed characters, and the rest from all characters.

        A KL and an entropy of the allowed ones would read 0 while the policy collapses.
        """
        q, q_ref = (
            Product(restrict(each.logits, sample.allowed), self.batch, self.config)
            for each in (self, reference)
        )
        drawn = q.log_probs(sample, q_ref)
        return replace(
            super().log_probs(sample, reference), logp=drawn.logp, ref_logp=drawn.ref_logp
        )


def restrict(logits: Tensor, allowed: Tensor) -> Tensor:
    """Make all but the allowed characters impossible: (...,V), (...,V) bool -> (...,V)."""
    return logits.masked_fill(~allowed, LEFT_OUT)


def allowed_characters(logits: Tensor, coins: Tensor, config) -> Tensor:
    """Find what may be drawn: logits (...,V), coins (...,1) in [0,1) -> (...,V) bool.

    Characters that tie with the last one allowed are allowed, too.
    """
    q = (logits.double() / config.temperature).softmax(dim=-1)  # (...,V)
    allowed = q > 0
    if config.top_k:
        k = min(config.top_k, q.shape[-1])
        allowed = allowed & (q >= q.topk(k, dim=-1).values[..., -1:])
    if config.top_p < 1:
        allowed = allowed & top_p(q * allowed, config.top_p)
    if config.min_p:  # relative to the most likely character (2407.01082)
        allowed = allowed & (q >= config.min_p * q.amax(dim=-1, keepdim=True))
    if config.xtc_probability:
        allowed = allowed & ~(top_choices(q * allowed) & (coins < config.xtc_probability))
    return allowed


def top_p(q: Tensor, share: float) -> Tensor:
    """Keep the most likely characters that add up to this share of q (1904.09751)."""
    falling = q.sort(dim=-1, descending=True).values  # (...,V)
    up_to = falling.cumsum(dim=-1)  # (...,V)
    still_short = up_to < share * up_to[..., -1:]  # (...,V)
    last = still_short.sum(dim=-1, keepdim=True)  # (...,1) rank of the last character to keep
    return q >= falling.gather(-1, last)


def top_choices(q: Tensor) -> Tensor:
    """Find what XTC leaves out: all likely characters except the least likely one.

    XTC (exclude top choices) is text-generation-webui's pull request 6335. All G completions of an
    input draw from the same characters, so there's one coin for each blank.
    """
    top = q >= TOP_CHOICE * q.sum(dim=-1, keepdim=True)  # (...,V)
    least = torch.where(top, q, 2.0).amin(dim=-1, keepdim=True)  # (...,1)
    return top & (q > least)


def penalized(kind: Callable, blank: int) -> Callable:
    """Wrap a kind of distribution, so that its logits, the last tensor, get penalized first."""

    def penalize_and_make(*tensors):
        *prior, logits, batch, config = tensors
        penalty = config.repetition_penalty
        logits = penalize_repetition(logits, batch.masked, blank, penalty)
        return kind(*prior, logits, batch, config)

    return penalize_and_make


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
