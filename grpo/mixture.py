"""Choose, then spell: a latent z for each run of blanks, drawn before its letters.

    q(y) = Π_runs Σ_z π(z) Π_{t in run} q_z,t(y_t)

A product of blanks cannot say "both or neither"; a mixture of K products can. Everything stays
exact if (z, y) is taken as what was drawn: log π(z) is added at the run's *first* blank to the log
q_z(y) of its letter, so that ratio, clip, advantage and averages need not change. KL and entropy
are those of the pair, by the chain rule: of a blank Σ_z π(z) KL(q_z‖r_z), at the run's first blank
KL(π‖π_ref) too. Their sum over the run bounds the KL of the fills from above. In plain PyTorch: the
gradient by hand and the fused kernel are those of K = 1.

A generator with a latent hands over one tensor (B,T,K,V): log π(z) + log q_z,t(v) at a blank.

Letters: B inputs, T characters, G completions of each, K values of z, V vocabulary, M blanks and N
runs of blanks of all inputs. Temperature is of letters and of the prior; truncation and XTC are
for letters alone.
Relatives: mixtures with a shared latent in translation (Shen et al. 2019, 1902.07816) and in
discrete diffusion (Di4C, 2410.08709).
"""

import torch

from grpo.logprobs import LogProbs, expectation, log_softmax, restrict
from grpo.reward import begins_run
from grpo.sampling import Fills, draw, exclude_top_choices, integer_weights, keep


def spread(values, mask):
    """What was found at the blanks, zeros elsewhere: (M,...) -> (B,T,...)."""
    everywhere = values.new_zeros(*mask.shape, *values.shape[1:])  # (B,T,...)
    everywhere[mask] = values
    return everywhere


def at_blanks(logits, mask, temperature):
    """-> log q_z (M,K,V), log π (N,K), each blank's run (M,). Without a latent K is 1."""
    rows = logits[mask]  # (M,K,V) or (M,V)
    if logits.dim() == 3:
        rows = rows[:, None]  # (M,1,V)
    first = begins_run(mask)[mask]  # (M,)
    run = first.cumsum(dim=0) - 1  # (M,)
    log_pi = rows[first].logsumexp(dim=-1)  # (N,K)
    return log_softmax(rows, temperature), log_softmax(log_pi, temperature), run


def sample_pairs(logits, inputs, config):
    """z ~ π for each run of each completion, by itself; then its letters, in parallel, from q_z."""
    mask = inputs.mask
    *_, K, V = logits.shape
    _, log_pi, run = at_blanks(logits, mask, 1.0)  # (N,K), (M,)
    uniforms = inputs.z_uniforms.mT[begins_run(mask)]  # (N,G)
    z = draw(integer_weights(log_pi, config.temperature), uniforms)  # (N,G)
    z = z.clamp(max=K - 1)[run]  # (M,G); of NaN the last, and below the mask token

    weights = integer_weights(logits[mask], config.temperature)  # (M,K,V)
    kept = keep(weights, config.top_k, config.top_p, config.min_p)  # (M,K,V)
    uniforms = inputs.uniforms.mT[mask]  # (M,G)
    if config.xtc_probability:
        xtc = (config.xtc_threshold, config.xtc_probability)
        kept = exclude_top_choices(weights, kept, uniforms[:, None], *xtc)  # (M,K,V)
    weights = weights * kept
    own = weights.take_along_dim(z[..., None], dim=1)  # (M,G,V)
    y = draw(own, uniforms[..., None]).squeeze(-1)  # (M,G)
    y = spread(y.clamp(max=V - 1), mask).mT  # (B,G,T)
    completions = torch.where(mask[:, None], y, inputs.masked[:, None])
    return Fills(completions, spread(kept, mask), mask, spread(z, mask).mT)


def logprobs_of_pairs(logits, ref_logits, fills, config):
    """As `logprobs`, of the pairs (z, y), by autograd."""
    mask = fills.mask
    log_q, log_pi, run = at_blanks(logits, mask, config.temperature)  # (M,K,V), (N,K), (M,)
    log_r, log_pi_ref, _ = at_blanks(ref_logits, mask, config.temperature)
    first = begins_run(mask)[mask][:, None]  # (M,1)
    kept = fills.kept[mask]  # (M,K,V)
    z = fills.z.mT[mask]  # (M,G)
    y = fills.completions.mT[mask]  # (M,G)

    def of_draws(log_q, log_pi):
        """log q_z(y), and at a first blank log π(z) more: (B,G,T)."""
        log_q = restrict(log_q, kept)  # (M,K,V)
        own = log_q.take_along_dim(z[..., None], dim=1)  # (M,G,V)
        letters = own.take_along_dim(y[..., None], dim=2).squeeze(2)  # (M,G)
        chosen = log_pi[run].take_along_dim(z, dim=1)  # (M,G)
        return spread(letters + first * chosen, mask).mT

    def of_pairs(letters, priors):
        """Σ_z π(z) Σ_v q_z(v) letters[v], and at a first blank Σ_z π(z) priors[z] more: (B,T)."""
        given_z = expectation(log_q.exp(), letters).squeeze(-1)  # (M,K)
        each = given_z + first * priors[run]  # (M,K)
        both = expectation(log_pi.exp()[run], each)  # (M,1)
        return spread(both.squeeze(-1), mask)

    logp = of_draws(log_q, log_pi)
    ref_logp = of_draws(log_r, log_pi_ref)
    kl = of_pairs(log_q - log_r, log_pi - log_pi_ref)
    entropy = of_pairs(-log_q, -log_pi)
    return LogProbs(logp, ref_logp, kl, entropy)


def of_runs(log_q, log_pi, run, y):
    """log Σ_z π(z) Π_{t in run} q_z,t(y_t), of n fills of each run: y (M,n) -> (N,n)."""
    each = log_q.take_along_dim(y[:, None], dim=2)  # (M,K,n)
    nothing = each.new_zeros(*log_pi.shape, y.shape[1])  # (N,K,n)
    given_z = nothing.index_add(0, run, each)  # (N,K,n) the product over the run, as a sum of logs
    return (log_pi[..., None] + given_z).logsumexp(dim=1)


def log_prob_of_runs(logits, completions, mask, temperature=1.0):
    """log P of what fills a run, exact, untruncated, at each of its blanks: -> (B,n,T)."""
    log_q, log_pi, run = at_blanks(logits, mask, temperature)
    each = of_runs(log_q, log_pi, run, completions.mT[mask])  # (N,n)
    return spread(each[run], mask).mT


def log_prob(logits, completions, mask, temperature=1.0):
    """log P of whole fills: completions (B,n,T) -> (B,n)."""
    each = log_prob_of_runs(logits, completions, mask, temperature)  # (B,n,T)
    first = begins_run(mask)[:, None]  # (B,1,T)
    return (each * first).sum(dim=-1)


def likeliest(logits, masked, mask, temperature=1.0):
    """The best guess, the text elsewhere: (B,T).

    For each run: of each z's likeliest letters those that all z together find likeliest.
    """
    log_q, log_pi, run = at_blanks(logits, mask, temperature)
    own = log_q.argmax(dim=-1)  # (M,K)
    best = of_runs(log_q, log_pi, run, own).argmax(dim=1)  # (N,)
    letters = own.take_along_dim(best[run, None], dim=1)  # (M,1)
    return masked.masked_scatter(mask, letters)


def marginal(logits, mask, temperature):
    """What each blank says by itself, Σ_z π(z) q_z, as logits at this temperature: (B,T,V)."""
    if logits.dim() == 3:
        return logits
    log_q, log_pi, run = at_blanks(logits, mask, temperature)
    joint = log_pi[run][..., None] + log_q  # (M,K,V)
    log_m = joint.logsumexp(dim=1)  # (M,V)
    return spread(temperature * log_m, mask)
