"""What K sets of logits say together: the mixture of its values of z is the policy of an input.

    q(y) = 1/K Σ_z Π_t q_z,t(y_t)          all blanks of a fill see one z, drawn uniformly

Letters: N inputs, K values of z, n fills of each input, T characters, V vocabulary. Logits have a
row for each input and z, those of an input adjacent: (N·K,T,V). With K = 1 a row is an input.
"""

import torch

from grpo.sampling import sample_completions
from grpo.stats import log_mean, log_softmax, where_blank

AT_ONCE = 64  # inputs that are drawn at once: the draws' whole numbers take 8 bytes each


def draw(logits, masked, mask, uniforms, z_uniforms, options):
    """Fills of the mixture: uniforms (N,n,T), z_uniforms (N,n) in [0,1) -> fills (N,n,T).

    Each fill's z is drawn by itself. Every z fills each input n times, and its fill is taken.
    """
    K = len(logits) // len(masked)
    z = (z_uniforms * K).long()  # (N,n)
    fills = []
    for start in range(0, len(masked), AT_ONCE):
        some = slice(start, start + AT_ONCE)  # M of the inputs
        rows = logits[start * K : (start + AT_ONCE) * K]  # (M·K,T,V)
        drawn, _ = sample_completions(
            rows,
            masked[some].repeat_interleave(K, dim=0),  # (M·K,T)
            mask[some].repeat_interleave(K, dim=0),  # (M·K,T)
            uniforms[some].repeat_interleave(K, dim=0),  # (M·K,n,T)
            **options,
        )  # (M·K,n,T)
        of_each_z = drawn.unflatten(0, (-1, K))  # (M,K,n,T)
        own = z[some][:, None, :, None]  # (M,1,n,1)
        fills.append(of_each_z.take_along_dim(own, dim=1).squeeze(1))  # (M,n,T)
    return torch.cat(fills)  # (N,n,T)


def log_prob_given_z(log_p, fills, mask):
    """Σ_t log q_z,t(y_t) of each fill and z: log_p (N·K,T,V), fills (N,n,T) -> (N,n,K)."""
    N = len(fills)
    drawable = where_blank(fills, mask)  # (N,n,T) indices: no -1 of padding
    drawable = drawable.transpose(1, 2)  # (N,T,n)
    of_each_z = log_p.unflatten(0, (N, -1))  # (N,K,T,V)
    each = of_each_z.take_along_dim(drawable[:, None], dim=-1)  # (N,K,T,n)
    at_blanks = each.where(mask[:, None, :, None], 0)  # (N,K,T,n)
    return at_blanks.sum(dim=2).transpose(1, 2)  # (N,n,K)


def log_prob(log_p, fills, mask):
    """log q(y) of whole fills, exact: log_p (N·K,T,V), fills (N,n,T), mask (N,T) -> (N,n)."""
    given_z = log_prob_given_z(log_p, fills, mask)  # (N,n,K)
    return log_mean(given_z, dim=-1)  # (N,n)


def log_marginal(log_p, inputs):
    """log m, m = 1/K Σ_z q_z: what a blank is likely to be, whatever z: (N·K,T,V) -> (N,T,V)."""
    of_each_z = log_p.unflatten(0, (inputs, -1))  # (N,K,T,V)
    return log_mean(of_each_z, dim=1)  # (N,T,V)


def likeliest(logits, masked, mask, temperature):
    """Of the fills that are each z's own likeliest, the mixture's likeliest: -> (N,1,T)."""
    likely = logits.argmax(dim=-1).unflatten(0, (len(masked), -1))  # (N,K,T)
    own = likely.where(mask[:, None], masked[:, None])  # (N,K,T)
    log_p = log_softmax(logits, temperature)  # (N·K,T,V)
    best = log_prob(log_p, own, mask).argmax(dim=1)  # (N,)
    return own.take_along_dim(best[:, None, None], dim=1)  # (N,1,T)
