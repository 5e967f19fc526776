"""Compute log-probabilities, exact KL and entropy, and their gradient, which is written by hand.

Shapes: B masked inputs, T characters, G group size, V vocabulary.

The blanks of an input are independent, so we can compute KL and entropy exactly, blank by blank.
For one blank, let s be the logits, τ the temperature, y the character that was drawn, and S the
set of the characters that could have been drawn:

    p = softmax(s / τ)                     over the whole vocabulary
    p_ref = softmax(s_ref / τ)             from the reference's logits s_ref
    q = p restricted to S, renormalised    what the characters were drawn from

    logp = log q(y)    KL = Σ_v p(v) (log p(v) − log p_ref(v))    H = −Σ_v p(v) log p(v)    in nats

GRPO (2402.03300, equation 4) estimates this KL from the drawn character. We sum over all
characters. We wrote the gradient out by hand for two reasons: you can read what GRPO does to each
logit, and the fused kernel has to compute the same. tests/algorithm/test_logprobs.py compares our
gradient with autograd's.
"""

from dataclasses import dataclass

import torch

from grpo.batch import Rows


@dataclass(frozen=True)
class Scores(Rows):
    """A policy's scores of fills, in nats. All are 0 where there is no blank."""

    logp: torch.Tensor  # (B,G,T) log q(y), under the policy
    ref_logp: torch.Tensor  # (B,G,T) the same under the reference
    kl: torch.Tensor  # (B,T)
    entropy: torch.Tensor  # (B,T)


def log_softmax(logits, temperature):
    """Compute log p of each character, in float32 or better: (...,V) -> (...,V)."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.log_softmax(precise / temperature, dim=-1)


def restrict(log_probs, kept):
    """Renormalise log_probs (...,V) over the characters in `kept` (...,V). Others become -inf."""
    return torch.log_softmax(log_probs.masked_fill(~kept, float("-inf")), dim=-1)


def times(p, values):
    """Multiply p(v) by values(v), (...,V). Where p is 0, the result is 0 even if values is inf."""
    return torch.where(p == 0, 0, p * values)


def expectation(p, values):
    """Sum p(v) · values(v) over v: (...,V) -> (...,1)."""
    return times(p, values).sum(dim=-1, keepdim=True)


def draws_by_position(completions, mask):
    """Turn completions (B,G,T) into the draws of each blank (B,T,G), with 0 at visible text."""
    return torch.where(mask[:, None], completions, 0).transpose(1, 2)


def logprobs_forward(logits, ref_logits, completions, kept, mask, temperature):
    """Compute the four tensors of `Scores`, without a gradient: -> logp, ref_logp, kl, entropy.

    logits and ref_logits are (B,T,V), completions (B,G,T) and mask (B,T) bool. kept (B,T,V) bool is
    True for the characters that a blank could draw.
    """
    log_p = log_softmax(logits, temperature)  # (B,T,V)
    log_p_ref = log_softmax(ref_logits, temperature)  # (B,T,V)
    log_q = restrict(log_p, kept)  # (B,T,V) q is p, renormalised over the kept characters
    log_q_ref = restrict(log_p_ref, kept)  # (B,T,V)

    y = draws_by_position(completions, mask)  # (B,T,G)
    logp = log_q.gather(-1, y).transpose(1, 2)  # (B,G,T)
    ref_logp = log_q_ref.gather(-1, y).transpose(1, 2)  # (B,G,T)

    p = log_p.exp()  # (B,T,V)
    kl = expectation(p, log_p - log_p_ref).squeeze(-1)  # (B,T)  Σ p (log p − log p_ref)
    entropy = -expectation(p, log_p).squeeze(-1)  # (B,T)  −Σ p log p
    of_draws = (torch.where(mask[:, None], x, 0) for x in (logp, ref_logp))
    of_blanks = (torch.where(mask, x, 0) for x in (kl, entropy))
    return *of_draws, *of_blanks


def logprobs_backward(gradients, logits, ref_logits, completions, kept, mask, temperature):
    """Compute the gradient of the loss with respect to logits (B,T,V).

    `gradients` holds g_logp (B,G,T), g_kl (B,T) and g_entropy (B,T), the loss's gradients with
    respect to logp, kl and entropy. The formula gives the gradient ds for one blank with logits s
    and drawn letters y_1 to y_G. The docstring of this file explains the other symbols.

    ds[v] = 1/τ · ( Σ_j g_logp[j] (1[v = y_j] − q[v])
                    + g_kl p[v] (log p[v] − log p_ref[v] − KL)
                    − g_entropy p[v] (log p[v] + H) )
    """
    g_logp, g_kl, g_entropy = gradients
    g_logp = g_logp.transpose(1, 2)  # (B,T,G)
    log_p = log_softmax(logits, temperature)  # (B,T,V)
    log_p_ref = log_softmax(ref_logits, temperature)  # (B,T,V)
    p = log_p.exp()  # (B,T,V)
    q = restrict(log_p, kept).exp()  # (B,T,V)
    y = draws_by_position(completions, mask)  # (B,T,G)

    drawn = torch.zeros_like(p).scatter_add(-1, y, g_logp)  # (B,T,V)  Σ_j g_logp[j] 1[v = y_j]
    d_logp = drawn - g_logp.sum(dim=-1, keepdim=True) * q  # (B,T,V)
    log_ratio = log_p - log_p_ref  # (B,T,V)
    d_kl = times(p, log_ratio - expectation(p, log_ratio))  # (B,T,V)
    d_entropy = -times(p, log_p - expectation(p, log_p))  # (B,T,V), since H = −Σ p log p
    d = d_logp + g_kl[..., None] * d_kl + g_entropy[..., None] * d_entropy  # (B,T,V)
    return torch.where(mask[..., None], d / temperature, 0).to(logits.dtype)


class LogProbsFunction(torch.autograd.Function):
    """Make autograd use `logprobs_backward` as the gradient of `logprobs_forward`.

    Only `logits` gets a gradient.
    """

    @staticmethod
    def forward(ctx, *inputs):
        ctx.temperature = inputs[-1]
        ctx.save_for_backward(*inputs[:-1])
        logp, ref_logp, kl, entropy = logprobs_forward(*inputs)
        ctx.mark_non_differentiable(ref_logp)
        return logp, ref_logp, kl, entropy

    @staticmethod
    def backward(ctx, g_logp, _, g_kl, g_entropy):
        gradients = (g_logp, g_kl, g_entropy)
        d = logprobs_backward(gradients, *ctx.saved_tensors, ctx.temperature)
        return d, None, None, None, None, None


compute_logprobs = LogProbsFunction.apply  # runs on any device
