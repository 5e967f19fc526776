"""Choose, then spell: this policy draws a latent z for each hidden word before its letters.

    q(y) = Π_words Σ_z π(z) Π_{t in word} q_z,t(y_t)

A product of independent blanks cannot draw `help` and `half` without also drawing `helf`. A mixture
of K products can. With one z the blanks spell `help`, and with another `half`. Each completion
draws a z for each word, and then the letters of the word in parallel. We do not keep z, because
scoring sums over all of its values. We score each letter given the letters before it in its word.
By the chain rule its log-probability is

    logp_t = L_t − L_{t−1},    L_t = log Σ_z π(z) Π_{s≤t} q_z,s(y_s)

The logp_t of a word add up to the word's exact log-probability. Every letter has a ratio and a clip
of its own. With K = 1 each logp_t is the same as in `Product`.

KL and entropy are those of the pair (z, y). The KL of a blank is Σ_z π(z) KL(q_z‖q_ref,z), where
q_ref,z is the reference's q_z. The first blank of a word adds KL(π‖π_ref), with its π.
The sum over all blanks is an upper bound of the KL of the fills. All of this is plain PyTorch, and
autograd differentiates it.

Temperature acts on the letters and on the prior π. Truncation and XTC act on the letters alone.
Others have used a shared latent for translation (Shen et al. 2019, 1902.07816) and mixtures for
discrete diffusion (Di4C, 2410.08709).

Shapes: B inputs, T characters, K values of z, V vocabulary. A step draws G completions of each
input. A function that takes any number of completions calls this number n. All inputs together have
M blanks and N hidden words. In a shape, L is the number of letters of the longest word.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from data.per_word import begins_word, lay_out_words, spread
from grpo.batch import Batch
from grpo.policy import (
    Distribution,
    Fills,
    Product,
    Scores,
    draw,
    expectation,
    integer_weights,
    log_softmax,
    may_be_drawn,
    restrict,
)


@dataclass
class Latent(Distribution):
    """A distribution over the fills of B inputs, with the same methods as `Product`."""

    prior: torch.Tensor  # (B,T,K) logits of π, the same at each blank of a word
    letters: torch.Tensor  # (B,T,K,V) logits of q_z
    batch: Batch
    config: object

    def __post_init__(self):
        self.mask = self.batch.mask  # (B,T)
        self.first = begins_word(self.batch.words)  # (B,T)
        self.word, self.place = lay_out_words(self.batch.words)  # each (M,), see `lay_out_words`

    def log_q(self):
        """Compute log q_z(v) of every character v, for each blank and each z: (M,K,V)."""
        return log_softmax(self.letters[self.mask], self.config.temperature)

    def log_pi(self):
        """Compute log π(z) of each word: (N,K)."""
        return log_softmax(self.prior[self.first], self.config.temperature)

    def running(self, log_q, log_pi, y):
        """Compute L_t, the log-probability of a word's first t letters, for every word and t.

        y (M,n) holds n letters for each blank. The result has the shape (N,L,n), where L is the
        number of letters of the longest word. It holds L_t at [:, t - 1].
        """
        each = log_q.take_along_dim(y[:, None], dim=2)  # (M,K,n) log q_z(y)
        N, L = len(log_pi), max(self.place.tolist(), default=0) + 1  # without blanks N = 0, L = 1
        letters = each.new_zeros(N, L, *each.shape[1:])  # (N,L,K,n) 0 beyond a word's end
        letters = letters.index_put((self.word, self.place), each)
        up_to = letters.cumsum(dim=1)  # (N,L,K,n)
        return (log_pi[:, None, :, None] + up_to).logsumexp(dim=2)

    def chain(self, log_q, log_pi, y):
        """Compute logp_t of each letter: y (M,n) -> (B,n,T).

        logp_t is L_t − L_{t−1}. The method `running` computes L_t, and L_0 is 0.

        Truncation may give a letter of y the probability 0 under some z. Then this z adds 0 to the
        sum in L_t. L_t is still finite, because the z that drew the letters allows all of them.
        """
        L = self.running(log_q, log_pi, y)  # (N,L,n)
        before = F.pad(L, (0, 0, 1, 0))[:, :-1]  # (N,L,n) 0 before a word's first letter
        logp = (L - before)[self.word, self.place]  # (M,n)
        return spread(logp, self.mask).mT

    def sample(self, uniforms):
        """Draw z ~ π for each word of each completion, then its letters from q_z: -> `Fills`."""
        K, V = self.letters.shape[-2:]
        # Here without the temperature, because `integer_weights` divides by it.
        log_pi = log_softmax(self.prior[self.first], temperature=1.0)  # (N,K)
        choosing = uniforms[..., 1].mT[self.first]  # (N,G)
        z = draw(integer_weights(log_pi, self.config.temperature), choosing)  # (N,G)
        z = z.clamp(max=K - 1)[self.word]  # (M,G) clamped, because NaN logits draw z = K

        spelling = uniforms[..., 0].mT[self.mask]  # (M,G)
        weights = integer_weights(self.letters[self.mask], self.config.temperature)  # (M,K,V)
        of_blank = uniforms.transpose(1, 2)[self.mask].flatten(1)  # (M,2G)
        kept = may_be_drawn(weights, of_blank[:, None], self.config)  # (M,K,V)
        of_z = (weights * kept).take_along_dim(z[..., None], dim=1)  # (M,G,V)
        y = draw(of_z, spelling[..., None]).squeeze(-1)  # (M,G)
        y = spread(y.clamp(max=V - 1), self.mask).mT  # (B,G,T)
        completions = torch.where(self.mask[:, None], y, self.batch.masked[:, None])
        return Fills(completions, spread(kept, self.mask))

    def score(self, fills, reference):
        """Score fills under the policy and a reference: -> `Scores`. Gradients reach the policy."""
        log_q, log_pi = self.log_q(), self.log_pi()  # (M,K,V), (N,K)
        log_q_ref, log_pi_ref = reference.log_q(), reference.log_pi()
        kept = fills.kept[self.mask]  # (M,K,V)
        y = fills.completions.mT[self.mask]  # (M,G)
        first = self.first[self.mask][:, None]  # (M,1)

        def of_pairs(letters, priors):
            """Compute the expectation over the pair of z and the letter v: -> (B,T).

            `letters` (M,K,V) has a number for each blank, z and v. `priors` (N,K) has a number for
            each word and z. The first blank of a word adds the numbers of its word.
            """
            given_z = expectation(log_q.exp(), letters).squeeze(-1)  # (M,K)
            each = given_z + first * priors[self.word]  # (M,K)
            both = expectation(log_pi.exp()[self.word], each)  # (M,1)
            return spread(both.squeeze(-1), self.mask)

        return Scores(
            logp=self.chain(restrict(log_q, kept), log_pi, y),
            ref_logp=self.chain(restrict(log_q_ref, kept), log_pi_ref, y),
            kl=of_pairs(log_q - log_q_ref, log_pi - log_pi_ref),
            entropy=of_pairs(-log_q, -log_pi),
        )

    def log_prob(self, completions):
        """Compute each letter's exact log-probability, without truncation: (B,n,T) -> (B,n,T)."""
        return self.chain(self.log_q(), self.log_pi(), completions.mT[self.mask])

    def best_guess(self):
        """Fill each word with a likely spelling: -> (B,T).

        Each z proposes its likeliest letters. The proposal that is likeliest under the mixture of
        all z wins. A spelling that no z proposes may be likelier still.
        """
        log_q = self.log_q()  # (M,K,V)
        candidates = log_q.argmax(dim=-1)  # (M,K)
        best = self.running(log_q, self.log_pi(), candidates)[:, -1].argmax(dim=1)  # (N,)
        letters = candidates.take_along_dim(best[self.word, None], dim=1)  # (M,1)
        return self.batch.masked.masked_scatter(self.mask, letters)

    def marginal(self):
        """Mix the q_z of each blank into one distribution, Σ_z π(z) q_z: -> `Product`."""
        joint = self.log_pi()[self.word][..., None] + self.log_q()  # (M,K,V)
        log_m = joint.logsumexp(dim=1)  # (M,V)
        logits = spread(self.config.temperature * log_m, self.mask)  # (B,T,V)
        return Product(logits, self.batch, self.config)
