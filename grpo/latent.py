"""Choose, then spell: draw a latent z for each hidden word, then all of its letters at once.

    q(y) = Π_words Σ_z π(z) Π_{t in word} q_z,t(y_t)

Independent blanks can't draw `help` and `half` without drawing `helf`, too. A mixture of K such
products can: with one z the blanks spell `help`, with another `half`. Once the letters are drawn we
forget z, because scoring sums over all of its values. Each letter is scored given those before it
in its word. By the chain rule its log-probability is

    logp_t = L_t − L_{t−1},    L_t = log Σ_z π(z) Π_{s≤t} q_z,s(y_s)

These add up to the word's exact log-probability, and every letter has a ratio and a clip of its
own. With K = 1 each logp_t is that of `Product`.

KL and entropy are those of the pair (z, y). The KL of a blank is Σ_z π(z) KL(q_z‖q_ref,z), and the
first blank of a word adds KL(π‖π_ref). Their sum is an upper bound of the KL of the completions.
It's all plain PyTorch, differentiated by autograd.

Temperature acts on the letters and on π, a truncation on the letters of each z alone. Others have
used a shared latent for translation (Shen et al. 2019, 1902.07816) and mixtures for discrete
diffusion (Di4C, 2410.08709).

Shapes: B inputs, T characters, K values of z, V vocabulary, G completions of each input (n where
any number will do). All inputs together have M blanks and N hidden words, the longest of L letters.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from data.per_word import begins_word, lay_out_words, spread
from grpo.batch import Batch, Rows
from grpo.policy import LogProbs, Policy, Sample, draw, log_softmax
from grpo.truncation import allowed_characters, restrict, truncates


@dataclass
class Latent(Rows):
    """A distribution over the completions of B inputs, with the same methods as `Product`."""

    prior: Tensor  # (B,T,K) logits of π, the same at each blank of a word
    letters: Tensor  # (B,T,K,V) logits of q_z
    batch: Batch
    config: object

    def __post_init__(self):
        self.mask = self.batch.mask  # (B,T)
        self.first = begins_word(self.batch.words)  # (B,T)
        self.word, self.place = lay_out_words(self.batch.words)  # each (M,), see `lay_out_words`

    def log_q(self, allowed: Tensor | None = None) -> Tensor:
        """Compute log q_z(v) of every character v, for each blank and each z: (M,K,V)."""
        letters = self.letters[self.mask]  # (M,K,V)
        if allowed is not None:
            letters = restrict(letters, allowed[self.mask])
        return log_softmax(letters, self.config.temperature)

    def log_pi(self) -> Tensor:
        """Compute log π(z) of each word: (N,K)."""
        return log_softmax(self.prior[self.first], self.config.temperature)

    def running(self, log_q: Tensor, log_pi: Tensor, y: Tensor) -> Tensor:
        """Compute L_t, the log-probability of a word's first t letters, for every word and t.

        y (M,n) holds n letters for each blank. The result (N,L,n) has L_t at [:, t - 1].
        """
        each = log_q.take_along_dim(y[:, None], dim=2)  # (M,K,n) log q_z(y)
        N, L = len(log_pi), max(self.place.tolist(), default=0) + 1  # without blanks N = 0, L = 1
        letters = each.new_zeros(N, L, *each.shape[1:])  # (N,L,K,n) 0 beyond a word's end
        letters = letters.index_put((self.word, self.place), each)
        up_to = letters.cumsum(dim=1)  # (N,L,K,n)
        return (log_pi[:, None, :, None] + up_to).logsumexp(dim=2)

    def chain(self, log_q: Tensor, log_pi: Tensor, y: Tensor) -> Tensor:
        """Compute logp_t = L_t − L_{t−1} of each letter, with L_0 = 0: y (M,n) -> (B,n,T)."""
        up_to = self.running(log_q, log_pi, y)  # (N,L,n)
        before = F.pad(up_to, (0, 0, 1, 0))[:, :-1]  # (N,L,n) 0 before a word's first letter
        logp = (up_to - before)[self.word, self.place]  # (M,n)
        return spread(logp, self.mask).mT

    def sample(self) -> Sample:
        """Draw z ~ π for each word of each completion, then its letters from q_z."""
        batch, allowed = self.batch, None
        if truncates(self.config):
            coins = batch.coins()[..., None, None]  # (B,T,1,1)
            allowed = allowed_characters(self.letters, coins, self.config)  # (B,T,K,V)
        log_pi = self.log_pi()[:, None]  # (N,1,K)
        z = draw(log_pi, batch.latent_uniforms().mT[self.first])[self.word]  # (M,G)
        of_z = self.log_q(allowed).take_along_dim(z[..., None], dim=1)  # (M,G,V)
        y = spread(draw(of_z, batch.uniforms.mT[self.mask]), self.mask).mT  # (B,G,T)
        return Sample(torch.where(self.mask[:, None], y, batch.masked[:, None]), allowed)

    def log_probs(self, sample: Sample, reference: "Latent") -> LogProbs:
        """Compute log q and log q_ref of a sample. Gradients reach the policy."""
        log_q, log_pi = self.log_q(), self.log_pi()  # (M,K,V), (N,K)
        log_q_ref, log_pi_ref = reference.log_q(), reference.log_pi()
        y = sample.completions.mT[self.mask]  # (M,G)
        first = self.first[self.mask][:, None]  # (M,1)

        def over_pairs(letters, priors):
            """Compute the expectation over the pair of z and the letter v: -> (B,T).

            `letters` (M,K,V) has a number for each blank, z and v, and `priors` (N,K) one for each
            word and z. Those of a word are added at its first blank.
            """
            given_z = (log_q.exp() * letters).sum(dim=-1)  # (M,K)
            each = given_z + first * priors[self.word]  # (M,K)
            both = (log_pi.exp()[self.word] * each).sum(dim=-1)  # (M,)
            return spread(both, self.mask)

        kl = over_pairs(log_q - log_q_ref, log_pi - log_pi_ref)
        entropy = over_pairs(-log_q, -log_pi)
        if sample.allowed is not None:
            log_q, log_q_ref = (q.log_q(sample.allowed) for q in (self, reference))
        return LogProbs(
            logp=self.chain(log_q, log_pi, y),
            ref_logp=self.chain(log_q_ref, log_pi_ref, y),
            kl=kl,
            entropy=entropy,
        )

    def log_likelihood(self, completions: Tensor) -> Tensor:
        """Compute log q of each letter, without truncation: (B,n,T) -> (B,n,T)."""
        return self.chain(self.log_q(), self.log_pi(), completions.mT[self.mask])

    def best_guess(self) -> Tensor:
        """Fill each word with a likely spelling: -> (B,T).

        Each z proposes its most likely letters, and the mixture picks the likeliest proposal. (A
        spelling that no z proposes could be likelier still.)
        """
        log_q = self.log_q()  # (M,K,V)
        candidates = log_q.argmax(dim=-1)  # (M,K)
        best = self.running(log_q, self.log_pi(), candidates)[:, -1].argmax(dim=1)  # (N,)
        letters = candidates.take_along_dim(best[self.word, None], dim=1)  # (M,1)
        return self.batch.masked.masked_scatter(self.mask, letters)


class LatentPolicy(Policy):
    """A `Policy` whose network is a `LatentGenerator`."""

    def __call__(self, batch: Batch) -> Latent:
        inputs = [
            x.to(self.device).split(self.config.batch_size) for x in (batch.masked, batch.words)
        ]
        with self.autocast:
            outputs = [self.network(masked, words) for masked, words in zip(*inputs)]
        tensors = [torch.cat(x).to(batch.masked.device) for x in zip(*outputs)]
        return self.kind(*tensors, batch, self.config)
