"""Choose, then spell: the policy that draws a latent z for each hidden word before its letters.

q(y) = Π_words Σ_z π(z) Π_{t in word} q_z,t(y_t)
"""

from dataclasses import dataclass, replace

import torch

from data.blanks import begins_word, spread
from grpo.logprobs import Scores, expectation, log_softmax, restrict
from grpo.product import Product
from grpo.sampling import Fills, allowed, draw, integer_weights


@dataclass(frozen=True)
class PairFills(Fills):
    z: torch.Tensor = None


class Latent:
    def __init__(self, prior, letters, batch, sampling):
        self.prior = prior  # (B,T,K)
        self.letters = letters  # (B,T,K,V)
        import os

        if os.environ.get("PACK"):
            joint = prior.log_softmax(-1)[..., None] + letters.log_softmax(-1)
            joint[..., -1] = -1e9
            joint = spread(joint[batch.mask], batch.mask)
            self.prior = joint.logsumexp(-1)
            self.letters = joint
        self.batch = batch
        self.sampling = sampling
        self.mask = batch.mask
        first = begins_word(batch.words)
        self.first = first[self.mask]
        self.run = self.first.cumsum(dim=0) - 1
        self.begins = first

    def tables(self, temperature):
        return (
            log_softmax(self.letters[self.mask], temperature),
            log_softmax(self.prior[self.begins], temperature),
        )

    def sample(self, uniforms):
        K, V = self.letters.shape[-2:]
        mask, sampling = self.mask, self.sampling
        log_pi = log_softmax(self.prior[self.begins], 1.0)
        uz = uniforms[..., 1].mT[self.begins]
        z = draw(integer_weights(log_pi, sampling.temperature), uz)
        z = z.clamp(max=K - 1)[self.run]
        u = uniforms[..., 0].mT[mask]  # (M,G)
        weights, kept = allowed(self.letters[mask], u[:, None], sampling)
        own = weights.take_along_dim(z[..., None], dim=1)
        y = draw(own, u[..., None]).squeeze(-1)
        y = spread(y.clamp(max=V - 1), mask).mT
        completions = torch.where(mask[:, None], y, self.batch.masked[:, None])
        return PairFills(completions, spread(kept, mask), spread(z, mask).mT)

    def score(self, fills, reference):
        mask, run = self.mask, self.run
        log_q, log_pi = self.tables(self.sampling.temperature)
        log_r, log_pi_ref = reference.tables(self.sampling.temperature)
        first = self.first[:, None]
        kept = fills.kept[mask]
        z = fills.z.mT[mask]
        y = fills.completions.mT[mask]

        def of_draws(log_q, log_pi):
            log_q = restrict(log_q, kept)
            own = log_q.take_along_dim(z[..., None], dim=1)
            letters = own.take_along_dim(y[..., None], dim=2).squeeze(2)
            chosen = log_pi[run].take_along_dim(z, dim=1)
            return spread(letters + first * chosen, mask).mT

        def of_pairs(letters, priors):
            given_z = expectation(log_q.exp(), letters).squeeze(-1)
            each = given_z + first * priors[run]
            both = expectation(log_pi.exp()[run], each)
            return spread(both.squeeze(-1), mask)

        return Scores(
            of_draws(log_q, log_pi),
            of_draws(log_r, log_pi_ref),
            of_pairs(log_q - log_r, log_pi - log_pi_ref),
            of_pairs(-log_q, -log_pi),
        )

    def of_runs(self, log_q, log_pi, y):
        each = log_q.take_along_dim(y[:, None], dim=2)
        nothing = each.new_zeros(*log_pi.shape, y.shape[1])
        given_z = nothing.index_add(0, self.run, each)
        return (log_pi[..., None] + given_z).logsumexp(dim=1)

    def log_prob(self, completions):
        log_q, log_pi = self.tables(self.sampling.temperature)
        each = self.of_runs(log_q, log_pi, completions.mT[self.mask])
        return spread(each[self.run] * self.first[:, None], self.mask).mT

    def best_guess(self):
        log_q, log_pi = self.tables(self.sampling.temperature)
        own = log_q.argmax(dim=-1)
        best = self.of_runs(log_q, log_pi, own).argmax(dim=1)
        letters = own.take_along_dim(best[self.run, None], dim=1)
        return self.batch.masked.masked_scatter(self.mask, letters)

    def marginal(self):
        log_q, log_pi = self.tables(self.sampling.temperature)
        log_m = (log_pi[self.run][..., None] + log_q).logsumexp(dim=1)
        logits = spread(self.sampling.temperature * log_m, self.mask)
        return Product(logits, self.batch, self.sampling)

    def at(self, temperature):
        sampling = replace(self.sampling, temperature=temperature)
        return Latent(self.prior, self.letters, self.batch, sampling)

    def __getitem__(self, rows):
        return Latent(self.prior[rows], self.letters[rows], self.batch[rows], self.sampling)
