"""Choose, then spell: draw a latent z for each completion, then all of its characters at once.

    q(y) = Σ_z π(z) Π_t q_z,t(y_t)

Independent blanks can't draw `help` and `half` without drawing `helf`, too. A mixture of K such
products can: with one z the blanks spell `help`, with another `half`. Once the characters are drawn
we forget z, because scoring sums over all of its values. Each character is scored given those
before it. By the chain rule its log-probability is

    logp_t = L_t − L_{t−1},    L_t = log Σ_z π(z) Π_{s≤t} q_z,s(y_s)

These add up to the completion's exact log-probability, and every character has a ratio and a clip
of its own. With K = 1 each logp_t is that of `Product`.

KL and entropy are those of the pair (z, y). The KL of a blank is Σ_z π(z) KL(q_z‖q_ref,z), and the
first blank adds KL(π‖π_ref). Their sum is an upper bound of the KL of the completions. It's all
plain PyTorch, differentiated by autograd.

Temperature acts on the characters and on π, a truncation on the characters of each z alone. Others
have used a shared latent for translation (Shen et al. 2019, 1902.07816) and mixtures for discrete
diffusion (Di4C, 2410.08709).

Shapes: B inputs, T characters, K values of z, V vocabulary, G completions of each input (n where
any number will do).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo.batch import Batch, Rows
from grpo.policy import LogProbs, Sample, log_softmax, pick
from grpo.truncation import allowed_characters, restrict


@dataclass(frozen=True)
class Latent(Rows):
    """A distribution over the completions of B inputs, with the same methods as `Product`."""

    prior: Tensor  # (B,K) logits of π
    characters: Tensor  # (B,T,K,V) logits of q_z
    masked: Tensor  # (B,T) the inputs
    mask: Tensor  # (B,T) bool, True at a blank
    config: object
    truncates: bool = False  # draw from only some of the characters (grpo/truncation.py)

    def log_q(self, allowed: Tensor | None = None) -> Tensor:
        """Compute log q_z(v) of every character v, for each blank and each z: (B,T,K,V)."""
        logits = self.characters
        if allowed is not None:
            logits = restrict(logits, allowed)
        return log_softmax(logits, self.config.temperature)

    def log_pi(self) -> Tensor:
        """Compute log π(z): (B,K)."""
        return log_softmax(self.prior, self.config.temperature)

    def up_to(self, log_q: Tensor, completions: Tensor) -> Tensor:
        """Compute L_t, the log-probability of what's in the first t blanks: (B,n,T) -> (B,T,n)."""
        y = completions.clamp(min=0).mT[:, :, None]  # (B,T,1,n) padding is -1
        each = log_q.take_along_dim(y, dim=3)  # (B,T,K,n) log q_z(y)
        each = torch.where(self.mask[..., None, None], each, 0)
        given_z = each.cumsum(dim=1)  # (B,T,K,n)
        return (self.log_pi()[:, None, :, None] + given_z).logsumexp(dim=2)

    def one_by_one(self, log_q: Tensor, completions: Tensor) -> Tensor:
        """Compute logp_t = L_t − L_{t−1} of each character, with L_0 = 0: (B,n,T) -> (B,n,T)."""
        up_to = self.up_to(log_q, completions)  # (B,T,n)
        before = torch.zeros_like(up_to)
        before[:, 1:] = up_to[:, :-1]
        return torch.where(self.mask[:, None], (up_to - before).mT, 0)

    def sample(self, batch: Batch) -> Sample:
        """Draw z ~ π for each completion, then its characters from q_z."""
        allowed = None
        if self.truncates:
            coins = batch.coins[..., None, None]  # (B,T,1,1)
            allowed = allowed_characters(self.characters, coins, self.config)  # (B,T,K,V)
        pi = self.log_pi().double().exp()[:, None]  # (B,1,K)
        z = pick(pi, batch.latents)  # (B,G)
        of_z = self.log_q(allowed).take_along_dim(z[:, None, :, None], dim=2)  # (B,T,G,V)
        y = pick(of_z.double().softmax(dim=-1), batch.uniforms.mT).mT  # (B,G,T)
        return Sample(torch.where(self.mask[:, None], y, self.masked[:, None]), allowed)

    def log_probs(self, sample: Sample, reference: "Latent") -> LogProbs:
        """Compute log q and log q_ref of a sample. Gradients reach the policy."""
        log_q, log_q_ref = self.log_q(), reference.log_q()  # (B,T,K,V)
        log_pi, log_pi_ref = self.log_pi(), reference.log_pi()  # (B,K)
        kl = self.over_pairs(log_q - log_q_ref, log_pi - log_pi_ref)
        entropy = self.over_pairs(-log_q, -log_pi)
        if sample.allowed is not None:
            log_q, log_q_ref = self.log_q(sample.allowed), reference.log_q(sample.allowed)
        return LogProbs(
            logp=self.one_by_one(log_q, sample.completions),
            ref_logp=reference.one_by_one(log_q_ref, sample.completions),
            kl=kl,
            entropy=entropy,
        )

    def over_pairs(self, characters: Tensor, choices: Tensor) -> Tensor:
        """Take the expectation over the pair of z and the character v: -> (B,T).

        `characters` (B,T,K,V) has a number for each blank, z and v. `choices` (B,K) has one for
        each z, and is added at the first blank.
        """
        mask = self.mask
        first = mask.cumsum(dim=1) == 1  # (B,T) and up to the next blank, which has no part in this
        given_z = (self.log_q().exp() * characters).sum(dim=-1)  # (B,T,K)
        each = given_z + first[..., None] * choices[:, None]  # (B,T,K)
        return torch.where(mask, (self.log_pi().exp()[:, None] * each).sum(dim=-1), 0)

    def log_likelihood(self, completions: Tensor) -> Tensor:
        """Compute log q of each character, without truncation: (B,n,T) -> (B,n,T)."""
        return self.one_by_one(self.log_q(), completions)

    def log_marginals(self) -> Tensor:
        """Compute log Σ_z π(z) q_z(v) of every character v at each position: -> (B,T,V)."""
        return (self.log_pi()[:, None, :, None] + self.log_q()).logsumexp(dim=2)

    def best_guess(self) -> Tensor:
        """Fill the blanks with a likely completion: -> (B,T).

        Each z proposes its most likely characters, and the mixture picks the likeliest proposal.
        (A completion that no z proposes could be likelier still.)
        """
        log_q = self.log_q()  # (B,T,K,V)
        proposals = log_q.argmax(dim=-1).mT  # (B,K,T)
        best = self.up_to(log_q, proposals)[:, -1].argmax(dim=1)  # (B,)
        y = proposals.take_along_dim(best[:, None, None], dim=1)[:, 0]  # (B,T)
        return torch.where(self.mask, y, self.masked)
