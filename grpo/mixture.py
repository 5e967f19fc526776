"""What K sets of logits say together: the mixture of its values of z is the policy of an input.

    q(y) = 1/K Σ_z Π_t q_z,t(y_t)          all blanks of a fill see one z, drawn uniformly

Letters: N inputs, K values of z, n fills of each input, T characters, V vocabulary. Logits have a
row for each input and z, those of an input adjacent: (N·K,T,V). With K = 1 a row is an input.
"""

import math

import torch

from grpo.sampling import sample_completions
from grpo.stats import log_softmax

AT_ONCE = 64  # inputs that are drawn at once: the draws' whole numbers take 8 bytes each


def draw(logits, masked, mask, uniforms, z_uniforms, options):
    """Fills of the mixture: uniforms (N,n,T), z_uniforms (N,n) in [0,1) -> fills (N,n,T).

    Each fill's z is drawn by itself. Every z fills each input n times, and its fill is taken.
    """
    K = len(logits) // len(masked)
    fills = []
    for start in range(0, len(masked), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        rows = logits[start * K : (start + AT_ONCE) * K]  # (M·K,T,V) of M inputs
        inputs = (masked[some], mask[some], uniforms[some])
        each = (x.repeat_interleave(K, dim=0) for x in inputs)
        drawn, _ = sample_completions(rows, *each, **options)  # (M·K,n,T)
        drawn = drawn.unflatten(0, (-1, K)).transpose(1, 2)  # (M,n,K,T)
        z = (z_uniforms[some] * K).long()  # (M,n)
        fills.append(drawn.take_along_dim(z[..., None, None], dim=2).squeeze(2))  # (M,n,T)
    return torch.cat(fills)  # (N,n,T)


def log_prob_given_z(log_p, fills, mask):
    """Σ_t log q_z,t(y_t) of each fill and z: log_p (N·K,T,V), fills (N,n,T) -> (N,n,K)."""
    N = len(fills)
    drawable = torch.where(mask[:, None], fills, 0).transpose(1, 2)  # (N,T,n)
    log_p = log_p.unflatten(0, (N, -1))  # (N,K,T,V)
    each = log_p.take_along_dim(drawable[:, None], dim=-1)  # (N,K,T,n)
    each = torch.where(mask[:, None, :, None], each, 0)  # (N,K,T,n)
    return each.sum(dim=2).transpose(1, 2)  # (N,n,K)


def log_mean(log_probs, dim):
    """log 1/K Σ_z exp(log_probs): the mixture of K values along `dim`."""
    return log_probs.logsumexp(dim=dim) - math.log(log_probs.shape[dim])


def log_prob(log_p, fills, mask):
    """log q(y) of whole fills, exact: log_p (N·K,T,V), fills (N,n,T), mask (N,T) -> (N,n)."""
    return log_mean(log_prob_given_z(log_p, fills, mask), dim=-1)  # (N,n)


def log_marginal(log_p, inputs):
    """log m, m = 1/K Σ_z q_z: what a blank is likely to be, whatever z: (N·K,T,V) -> (N,T,V)."""
    return log_mean(log_p.unflatten(0, (inputs, -1)), dim=1)  # (N,T,V)


def marginal_logits(logits, inputs, temperature):
    """Logits whose softmax at `temperature` is m: (N·K,T,V) -> (N,T,V)."""
    return temperature * log_marginal(log_softmax(logits, temperature), inputs)  # (N,T,V)


def likeliest(logits, masked, mask, temperature):
    """Of the fills that are each z's own likeliest, the mixture's likeliest: -> (N,1,T)."""
    own = logits.argmax(dim=-1).unflatten(0, (len(masked), -1))  # (N,K,T)
    own = torch.where(mask[:, None], own, masked[:, None])  # (N,K,T)
    best = log_prob(log_softmax(logits, temperature), own, mask).argmax(dim=1)  # (N,)
    return own.take_along_dim(best[:, None, None], dim=1)  # (N,1,T)
