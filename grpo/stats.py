"""Log-probability of each draw, exact KL and entropy of each blank; the gradient written by hand.

Letters: B masked inputs, T characters, G group size, V vocabulary. With a latent of K values the B
here are rows and the G are G/K: an input as one value sees it.

The policy of a row is a product over its blanks, so nothing is estimated. For one blank
with logits z, temperature τ and kept set S:

    p = softmax(z / τ)                     over the whole vocabulary
    p_ref                                  the same from the reference's logits
    q = p restricted to S, renormalised    what the characters were drawn from

    logp = log q(y)    KL = Σ_v p(v) (log p(v) − log p_ref(v))    H = −Σ_v p(v) log p(v)    in nats

KL(π‖π_ref) of GRPO (2402.03300, equation 3) is estimated there by one sample; here it is the sum.
The gradient stands here in full because it is the method, and what the fused kernel has to equal;
autograd finds the same one (tests/test_stats.py).
"""

import math
from typing import NamedTuple

import torch

IMPOSSIBLE = -1e30  # a finite log-probability of 0: differences and gradients of -inf are NaN


class Stats(NamedTuple):
    """In nats, zero wherever there is no blank."""

    logp: torch.Tensor  # (B,G,T) log q(y)
    ref_logp: torch.Tensor  # (B,G,T) log p_ref(y), p_ref renormalised on the same S
    kl: torch.Tensor  # (B,T)
    entropy: torch.Tensor  # (B,T)


def log_softmax(logits, temperature):
    """log p of each character, in float32 or better: (...,V) -> (...,V)."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(precise / temperature, dim=-1)


def restrict(log_probs, kept):
    """log q: renormalise on the kept set, -inf outside: (...,V), (...,V) bool -> (...,V)."""
    return torch.log_softmax(log_probs.masked_fill(~kept, float("-inf")), dim=-1)


def times(p, values):
    """p(v) · values(v): (...,V), with 0 for a character of probability 0, whatever its value."""
    return torch.where(p == 0, 0, p * values)


def expectation(p, values):
    """Σ_v p(v) values(v): (...,V) -> (...,1)."""
    return times(p, values).sum(dim=-1, keepdim=True)


def where_blank(x, mask):
    """x (B,T) or (B,G,T), 0 wherever there is no blank."""
    if x.dim() == 3:
        mask = mask[:, None]  # (B,1,T)
    return torch.where(mask, x, 0)


def stats_forward(logits, ref_logits, completions, kept, mask, temperature):
    """The four quantities, without a gradient: see `stats`."""
    log_p = log_softmax(logits, temperature)  # (B,T,V)
    log_p_ref = log_softmax(ref_logits, temperature)  # (B,T,V)
    log_q = restrict(log_p, kept)  # (B,T,V) what was drawn from
    log_q_ref = restrict(log_p_ref, kept)  # (B,T,V)

    y = where_blank(completions, mask)
    y = y.transpose(1, 2)  # (B,T,G) the draws at each position
    logp = log_q.gather(-1, y).transpose(1, 2)  # (B,G,T)
    ref_logp = log_q_ref.gather(-1, y).transpose(1, 2)  # (B,G,T)

    p = log_p.exp()  # (B,T,V)
    kl = expectation(p, log_p - log_p_ref).squeeze(-1)  # (B,T)  Σ p (log p − log p_ref)
    entropy = -expectation(p, log_p).squeeze(-1)  # (B,T)  −Σ p log p
    return Stats(*(where_blank(x, mask) for x in (logp, ref_logp, kl, entropy)))


def stats_backward(gradients, logits, ref_logits, completions, kept, mask, temperature):
    """`gradients` of logp (B,G,T), kl (B,T) and entropy (B,T) -> gradient of the logits (B,T,V).

    dz[v] = 1/τ · ( Σ_j g_logp[j] (1[v = y_j] − q[v])
                    + g_kl p[v] (log p[v] − log p_ref[v] − KL)
                    − g_entropy p[v] (log p[v] + H) )
    """
    g_logp, g_kl, g_entropy = gradients
    g_logp = g_logp.transpose(1, 2)  # (B,T,G)
    log_p = log_softmax(logits, temperature)  # (B,T,V)
    log_p_ref = log_softmax(ref_logits, temperature)  # (B,T,V)
    p = log_p.exp()  # (B,T,V)
    q = restrict(log_p, kept).exp()  # (B,T,V)
    y = where_blank(completions, mask).transpose(1, 2)  # (B,T,G)

    drawn = torch.zeros_like(p).scatter_add(-1, y, g_logp)  # (B,T,V)  Σ_j g_logp[j] 1[v = y_j]
    d_logp = drawn - g_logp.sum(dim=-1, keepdim=True) * q  # (B,T,V)
    log_ratio = log_p - log_p_ref  # (B,T,V)
    d_kl = times(p, log_ratio - expectation(p, log_ratio))  # (B,T,V)
    d_entropy = -times(p, log_p - expectation(p, log_p))  # (B,T,V), since H = −Σ p log p
    d = d_logp + g_kl[..., None] * d_kl + g_entropy[..., None] * d_entropy  # (B,T,V)
    return torch.where(mask[..., None], d / temperature, 0).to(logits.dtype)


class StatsFunction(torch.autograd.Function):
    """`stats_forward`, differentiable in `logits` alone, by `stats_backward`."""

    @staticmethod
    def forward(ctx, *inputs):
        ctx.temperature = inputs[-1]
        ctx.save_for_backward(*inputs[:-1])
        result = stats_forward(*inputs)
        ctx.mark_non_differentiable(result.ref_logp)
        return tuple(result)

    @staticmethod
    def backward(ctx, g_logp, _, g_kl, g_entropy):
        gradients = (g_logp, g_kl, g_entropy)
        d = stats_backward(gradients, *ctx.saved_tensors, ctx.temperature)
        return d, None, None, None, None, None


def stats(logits, ref_logits, completions, kept, mask, temperature=1.0):
    """Log-probabilities of the draws, exact KL and entropy, differentiable in `logits`.

    logits, ref_logits (B,T,V), completions (B,G,T) int64, kept (B,T,V) bool, frozen at rollout,
    mask (B,T) bool -> Stats. The sampled estimators k1 to k3 need ref_logp.
    """
    return Stats(*StatsFunction.apply(logits, ref_logits, completions, kept, mask, temperature))


def log_mean(log_probs, dim):
    """log 1/K Σ_z exp(log_probs): the mixture of K values along `dim`."""
    K = log_probs.shape[dim]
    return log_probs.logsumexp(dim=dim) - math.log(K)


def marginal_kl(logits, ref_logits, mask, n_latent, temperature):
    """KL of the mixture's marginals: logits (B·K,T,V), mask (B·K,T) -> (B·K,T), differentiable.

    m(v) = 1/K Σ_z p_z(v) is what a blank shows when nobody looks at the latent z; the K rows of an
    input all get Σ_v m(v) (log m(v) − log m_ref(v)). It lets each value of z commit, and holds only
    what they are together. With K = 1 it is the KL of `stats`.
    """

    def log_marginal(x):
        log_p = log_softmax(x, temperature).clamp(min=IMPOSSIBLE)  # (B·K,T,V)
        return log_mean(log_p.unflatten(0, (-1, n_latent)), dim=1)  # (B,T,V)

    log_m = log_marginal(logits)
    kl = (log_m.exp() * (log_m - log_marginal(ref_logits))).sum(dim=-1)  # (B,T)
    return where_blank(kl.repeat_interleave(n_latent, dim=0), mask)
