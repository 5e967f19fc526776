"""
Log-probability of each drawn character, exact KL and exact entropy of each blank, with their gradient written by hand.

Letters: B masked inputs, T characters, G group size, V vocabulary.

The policy of a whole input is a product over its blanks, so nothing is estimated. For one blank with logits z, temperature τ
and kept set S:

    p = softmax(z / τ)               over the whole vocabulary            r = the same from the reference's logits
    q = p restricted to S, renormalised                                   what the characters were drawn from
    logp = log q(y)      KL = Σ_v p(v) (log p(v) − log r(v))      H = −Σ_v p(v) log p(v)                        in nats

KL(π‖π_ref) of GRPO (2402.03300, equation 3) is estimated there by one sample; here it is the sum itself.
"""

import torch


def log_softmax(logits, temperature):
    """log p of each character, in float32 or better: (..., V) -> (..., V)."""
    return torch.log_softmax(
        logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, dim=-1
    )


def restrict(log_probs, kept):
    """log q: renormalise on the kept set, -inf outside: (..., V), (..., V) bool -> (..., V)."""
    return torch.log_softmax(log_probs.masked_fill(~kept, float("-inf")), dim=-1)


def expectation(p, values):
    """Σ_v p(v) values(v), where a character of probability 0 contributes 0 whatever its value: (..., V) -> (..., 1)."""
    return torch.where(p == 0, 0, p * values).sum(dim=-1, keepdim=True)


def where_blank(x, mask):
    """(B,G,T) or (B,T), 0 wherever there is no blank."""
    return torch.where(mask[:, None] if x.dim() == 3 else mask, x, 0)


def stats_forward(logits, ref_logits, completions, kept, mask, temperature):
    """-> logp (B,G,T), ref_logp (B,G,T), kl (B,T), entropy (B,T): zero wherever there is no blank."""
    log_p, log_r = log_softmax(logits, temperature), log_softmax(ref_logits, temperature)  # (B,T,V)
    p, drawn = log_p.exp(), where_blank(completions, mask).transpose(1, 2)  # (B,T,V), (B,T,G)
    logp, ref_logp = (
        restrict(x, kept).gather(-1, drawn).transpose(1, 2) for x in (log_p, log_r)
    )  # (B,G,T)
    kl, entropy = (
        expectation(p, log_p - log_r).squeeze(-1),
        -expectation(p, log_p).squeeze(-1),
    )  # (B,T)
    return tuple(where_blank(x, mask) for x in (logp, ref_logp, kl, entropy))


def stats_backward(
    g_logp, g_kl, g_entropy, logits, ref_logits, completions, kept, mask, temperature
):
    """Incoming gradients (B,G,T), (B,T), (B,T) -> gradient of the logits (B,T,V).

    dz[v] = 1/τ · ( Σ_j g_logp[j] (1[v = y_j] − q[v])  +  g_kl p[v] (log p[v] − log r[v] − KL)  −  g_entropy p[v] (log p[v] + H) )
    """
    log_p, log_r = log_softmax(logits, temperature), log_softmax(ref_logits, temperature)  # (B,T,V)
    p, q, drawn = (
        log_p.exp(),
        restrict(log_p, kept).exp(),
        where_blank(completions, mask).transpose(1, 2),
    )  # (B,T,V), (B,T,V), (B,T,G)
    g_logp = g_logp.transpose(1, 2)  # (B,T,G)
    d = torch.zeros_like(p).scatter_add(-1, drawn, g_logp) - g_logp.sum(dim=-1, keepdim=True) * q
    log_ratio = log_p - log_r
    d = d + g_kl[..., None] * torch.where(p == 0, 0, p * (log_ratio - expectation(p, log_ratio)))
    d = d - g_entropy[..., None] * torch.where(
        p == 0, 0, p * (log_p - expectation(p, log_p))
    )  # H = −Σ p log p
    return torch.where(mask[..., None], d / temperature, 0).to(logits.dtype)


class Stats(torch.autograd.Function):
    """`stats_forward`, differentiable in `logits` alone, by `stats_backward`."""

    @staticmethod
    def forward(ctx, logits, ref_logits, completions, kept, mask, temperature):
        ctx.save_for_backward(logits, ref_logits, completions, kept, mask)
        ctx.temperature = temperature
        logp, ref_logp, kl, entropy = stats_forward(
            logits, ref_logits, completions, kept, mask, temperature
        )
        ctx.mark_non_differentiable(ref_logp)
        return logp, ref_logp, kl, entropy

    @staticmethod
    def backward(ctx, g_logp, _, g_kl, g_entropy):
        return (
            stats_backward(g_logp, g_kl, g_entropy, *ctx.saved_tensors, ctx.temperature),
            None,
            None,
            None,
            None,
            None,
        )


def stats(logits, ref_logits, completions, kept, mask, temperature=1.0):
    """The four quantities, differentiable in `logits`.

    logits, ref_logits (B,T,V) · completions (B,G,T) int64 · kept (B,T,V) bool, frozen at rollout · mask (B,T) bool
    -> logp, ref_logp (B,G,T) · kl, entropy (B,T), in nats, zero wherever there is no blank
    ref_logp is log r renormalised on the same S: the sampled estimators k1 to k3 need it.
    """
    return Stats.apply(logits, ref_logits, completions, kept, mask, temperature)
