"""Fill blanks independently: this policy has one distribution over characters for each blank.

    q(y) = Π_t q_t(y_t)

Shapes: B masked inputs, T characters, V vocabulary. A step draws G completions of each input. A
function that takes any number of completions calls this number n.
"""

from dataclasses import replace

import torch

from grpo.cuda import kernel
from grpo.logprobs import Scores, compute_logprobs, log_softmax
from grpo.sampling import Fills, sample_completions


class Product:
    """A distribution over the fills of B inputs, which can draw fills and score them."""

    def __init__(self, logits, batch, config):
        self.logits = logits  # (B,T,V)
        self.batch = batch
        self.config = config  # temperature, truncation, and whether the kernel runs

    def sample(self, uniforms):
        """Fill every blank G times, in parallel: uniforms (B,G,T,2) in [0,1) -> `Fills`."""
        draw_all = kernel.sample_completions if self.config.kernel == "cuda" else sample_completions
        where = (self.batch.masked, self.batch.mask, uniforms[..., 0])
        return Fills(*draw_all(self.logits, *where, self.config))

    def score(self, fills, reference):
        """Score fills under the policy and a reference: -> `Scores`. Gradients reach the policy.

        All scores use the temperature of the draws. logp and ref_logp are renormalised over the
        characters in `fills.kept`. kl and entropy are exact, over the whole vocabulary.
        """
        compute = kernel.logprobs if self.config.kernel == "cuda" else compute_logprobs
        drawn = (fills.completions, fills.kept, self.batch.mask)
        scores = compute(self.logits, reference.logits, *drawn, self.config.temperature)
        return Scores(*scores)

    def log_prob(self, completions):
        """Compute each letter's exact log-probability, without truncation: (B,n,T) -> (B,n,T).

        The unit is nats. Visible text gets 0, so the sum over T is the log-probability of all
        blanks of a completion.
        """
        log_p = log_softmax(self.logits, self.config.temperature)  # (B,T,V)
        mask = self.batch.mask[:, None]  # (B,1,T)
        y = torch.where(mask, completions, 0).transpose(1, 2)  # (B,T,n)
        letters = log_p.gather(-1, y).transpose(1, 2)  # (B,n,T)
        return torch.where(mask, letters, 0)

    def best_guess(self):
        """Fill each blank with its likeliest character: -> (B,T)."""
        return torch.where(self.batch.mask, self.logits.argmax(dim=-1), self.batch.masked)

    def marginal(self):
        """Return this policy itself, because its blanks are already independent."""
        return self

    def at(self, temperature):
        """Return this policy at another temperature."""
        return Product(self.logits, self.batch, replace(self.config, temperature=temperature))

    def __getitem__(self, rows):
        """Return the policy of some of the inputs."""
        return Product(self.logits[rows], self.batch[rows], self.config)
