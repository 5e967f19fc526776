"""The policy whose blanks are independent: one distribution over characters for each blank.

    q(y) = Π_t q_t(y_t)

Letters: B masked inputs, T characters, G completions of each, n completions, V vocabulary.
"""

from dataclasses import replace

import torch

from grpo.cuda import kernel
from grpo.logprobs import Scores, compute_logprobs, log_softmax
from grpo.sampling import Fills, sample_completions


class Product:
    """A distribution over the fills of B inputs: one can sample from it and score with it."""

    def __init__(self, logits, batch, sampling):
        self.logits = logits  # (B,T,V)
        self.batch = batch
        self.sampling = sampling  # `Sampling`: temperature, truncation, and whether it is fused

    def sample(self, uniforms):
        """Fill every blank G times, in parallel: uniforms (B,G,T,2) in [0,1) -> `Fills`."""
        draw_all = kernel.sample_completions if self.sampling.fused else sample_completions
        where = (self.batch.masked, self.batch.mask, uniforms[..., 0])
        return Fills(*draw_all(self.logits, *where, self.sampling))

    def score(self, fills, reference):
        """Score fills under this policy, differentiably, and under a reference: -> `Scores`.

        log q is that of the distribution which was sampled, so it has the same temperature and the
        same set S. KL and entropy are exact, over the whole vocabulary.
        """
        compute = kernel.logprobs if self.sampling.fused else compute_logprobs
        drawn = (fills.completions, fills.kept, self.batch.mask)
        scores = compute(self.logits, reference.logits, *drawn, self.sampling.temperature)
        return Scores(*scores)

    def log_prob(self, completions):
        """Compute the exact log-probability of each letter, untruncated: (B,n,T) -> (B,n,T).

        The sum over a completion's blanks is the log-probability of the whole fill, in nats. It is
        0 wherever there is no blank.
        """
        log_p = log_softmax(self.logits, self.sampling.temperature)  # (B,T,V)
        mask = self.batch.mask[:, None]  # (B,1,T)
        y = torch.where(mask, completions, 0).transpose(1, 2)  # (B,T,n)
        letters = log_p.gather(-1, y).transpose(1, 2)  # (B,n,T)
        return torch.where(mask, letters, 0)

    def best_guess(self):
        """Fill each blank with its likeliest character: -> (B,T)."""
        return torch.where(self.batch.mask, self.logits.argmax(dim=-1), self.batch.masked)

    def marginal(self):
        """Return each blank's own distribution as a `Product`, which this policy already is."""
        return self

    def at(self, temperature):
        """Take the same logits at another temperature."""
        return Product(self.logits, self.batch, replace(self.sampling, temperature=temperature))

    def __getitem__(self, rows):
        """Take some of the inputs."""
        return Product(self.logits[rows], self.batch[rows], self.sampling)
