"""Compare the latent policy with sums over all pairs (z, y).

For each word the policy chooses a value z, and then the letters y.

There are two inputs. The blanks of the first one's words are not adjacent, and the second one has a
word of three letters. Temperature and truncation are on.

Shapes: B = 2 inputs, T = 5 characters, V = 3 characters, K = 2 values of z, n sample.
"""

from dataclasses import replace

import pytest
import torch
from conftest import make_batch

from data.per_word import number_words
from grpo.latent import Latent
from grpo.policy import Product
from grpo.run.config import Config
from model.pretrain import with_latent
from model.transformer import TransformerConfig, make_generator

B, T, V, K, TAU = 2, 5, 3, 2, 0.8
WORDS = torch.tensor([[1, 2, 1, 0, 2], [1, 1, 1, 2, 0]])  # (B,T)
MASK = WORDS > 0
BLANKS = {  # (input, word): where its blanks are
    (b, w): (WORDS[b] == w).nonzero().flatten().tolist() for b in range(B) for w in (1, 2)
}
EVERY_FILL = torch.cartesian_prod(*[torch.arange(V)] * T).expand(B, -1, T)  # (B,243,T)
ALL = torch.ones(B, T, K, V, dtype=torch.bool)


def leaves(seed, K=K):
    """Make random logits of the prior (B,T,K) and of the letters (B,T,K,V).

    All letters of a word have the same prior.
    """
    g = torch.Generator().manual_seed(seed)
    of_words = torch.randn(B, 3, K, generator=g, dtype=torch.float64)  # of word 0, 1, 2
    prior = of_words.gather(1, WORDS[..., None].expand(-1, -1, K))
    letters = 2 * torch.randn(B, T, K, V, generator=g, dtype=torch.float64)
    return prior.requires_grad_(), letters.requires_grad_()


def make(prior, letters, n=1, **options):
    batch = replace(make_batch(torch.full((B, T), 2), MASK, 2, n, (1,)), words=WORDS)
    return Latent(prior, letters, batch, Config(temperature=TAU, **options))


def pairs(prior, letters, kept, b, w):
    """Compute P(z, letters) of word w in input b: (K,V,V,...), with one V for each letter."""
    blanks = BLANKS[b, w]
    p = (prior[b, blanks[0]] / TAU).softmax(dim=0)
    for t in blanks:
        weights = (letters[b, t] / TAU).exp() * kept[b, t]
        q = weights / weights.sum(dim=-1, keepdim=True)  # (K,V)
        p = p[..., None] * q.view(-1, *[1] * (p.dim() - 1), V)
    return p


def slow_logp(prior, letters, kept, y):
    """Compute the log-probability of each letter given those before it in its word: -> (B,n,T)."""
    logp = torch.zeros(y.shape, dtype=torch.float64)
    for (b, w), blanks in BLANKS.items():
        table = pairs(prior, letters, kept, b, w).sum(dim=0)  # (V,V,...) of all spellings
        for i in reversed(range(len(blanks))):
            to_here = table[tuple(y[b, :, s] for s in blanks[: i + 1])]
            table = table.sum(dim=-1)  # P of the letters before letter i
            logp[b, :, blanks[i]] = (to_here / table[tuple(y[b, :, s] for s in blanks[:i])]).log()
    return logp


def test_the_probabilities_of_all_fills_are_those_of_the_pairs_and_add_up_to_1():
    policy = make(*leaves(0))
    have = policy.log_likelihood(EVERY_FILL)
    torch.testing.assert_close(have, slow_logp(*leaves(0), ALL, EVERY_FILL))
    copies = V ** (~MASK).sum(dim=1)  # EVERY_FILL varies visible characters, too
    torch.testing.assert_close(have.sum(dim=-1).exp().sum(dim=1), copies.double())


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_k": 2}, {"min_p": 0.5}, {"xtc_probability": 1.0}], ids=str
)
def test_scores_and_their_gradient_are_sums_over_all_pairs(options):
    """Each z truncates its own letters, so what one z drew can be impossible for another."""
    n = 20
    now, reference, old = leaves(0), leaves(1), make(*leaves(0), n, **options)
    sample = old.sample()
    y, kept = sample.completions, sample.allowed
    written = kept[..., None, :].take_along_dim(y.mT[:, :, None, :, None], dim=-1)[MASK]
    assert not written.all() and written.any(dim=1).all()

    scores = make(*now).log_probs(sample, make(*reference))
    logp, ref_logp = (slow_logp(*policy, kept, y) for policy in (now, reference))
    torch.testing.assert_close(scores.logp, logp)
    torch.testing.assert_close(scores.ref_logp, ref_logp)
    value = slow_value = 0
    for (b, w), blanks in BLANKS.items():
        p, r = (pairs(*policy, ALL, b, w) for policy in (now, reference))
        kl, entropy = (p * (p / r).log()).sum(), -(p * p.log()).sum()
        torch.testing.assert_close(scores.kl[b, blanks].sum(), kl)
        torch.testing.assert_close(scores.entropy[b, blanks].sum(), entropy)
        slow_value = slow_value + 2 * kl - 3 * entropy
    of_draws = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))  # (B,n,T)
    value = (of_draws * scores.logp).sum() + 2 * scores.kl.sum() - 3 * scores.entropy.sum()
    have = torch.autograd.grad(value, now, retain_graph=True)
    want = torch.autograd.grad((of_draws * logp).sum() + slow_value, now)
    torch.testing.assert_close(have, want)
    for name, x in vars(scores).items():
        assert not (x.mT if x.dim() == 3 else x)[~MASK].any(), name


def test_draws_follow_the_mixture():
    """Each word of each completion draws its own z, and then its letters."""
    n = 100_000
    policy = make(*leaves(3), n, top_k=2)
    sample = policy.sample()
    assert torch.equal(
        sample.completions[0, :, 3], torch.full((n,), 2)
    )  # a visible character stays
    for b in range(B):
        want = torch.ones((), dtype=torch.float64)
        for w in (1, 2):
            table = pairs(*leaves(3), sample.allowed, b, w).sum(dim=0)
            want = torch.outer(want.flatten(), table.flatten())  # the words are independent
        letters = [t for w in (1, 2) for t in BLANKS[b, w]]
        code = sum(sample.completions[b, :, t] * V**i for i, t in enumerate(reversed(letters)))
        have = torch.bincount(code, minlength=want.numel()).view(want.shape) / n
        assert (want == 0).any() and not have[want == 0].any()
        torch.testing.assert_close(have.double(), want.detach(), rtol=0, atol=0.006)


def test_the_best_guess_is_the_likeliest_of_what_each_z_would_write():
    for seed in range(8):
        prior, letters = leaves(seed)
        guess = make(prior, letters).best_guess()
        for (b, w), blanks in BLANKS.items():
            table = pairs(prior, letters, ALL, b, w).sum(dim=0)
            candidates = [tuple(letters[b, blanks, z].argmax(dim=-1).tolist()) for z in range(K)]
            best = max(candidates, key=lambda word: table[word])  # noqa: B023
            assert tuple(guess[b, blanks].tolist()) == best
        assert (guess[~MASK] == 2).all()


SHAPE = TransformerConfig(vocab_size=6, block_size=8, n_layer=1, n_head=1, n_embd=16, blank=5)
TEXT = torch.tensor([[5, 5, 1, 5, 5, 5, 2, 3], [0, 1, 5, 4, 4, 4, 4, 5]])  # 5 is a blank


def test_a_generator_has_a_prior_for_each_word_and_letters_for_each_blank():
    torch.manual_seed(0)
    generator = make_generator(replace(SHAPE, n_latent=3))
    for weight in generator.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    words = number_words(TEXT != 5, TEXT == 5)
    words[1, 7] = 1  # the last blank belongs to the word of the first, though far from it
    prior, letters = generator(TEXT, words)
    assert prior.shape == (2, 8, 3) and letters.shape == (2, 8, 3, 6)
    blank = TEXT == 5
    assert not prior[~blank].any() and not letters[~blank].any()
    assert not letters[blank].softmax(dim=-1)[..., 5].any()  # it never writes a blank
    words = words + torch.tensor([[0], [10]])
    same = words[blank][:, None] == words[blank]  # (M,M)
    apart = (prior[blank][:, None] - prior[blank]).abs().amax(dim=-1)  # (M,M)
    assert not apart[same].any() and (apart[~same] > 0.01).all()


def test_a_latent_begins_as_copies_of_a_product(monkeypatch):
    """The copies differ by a little noise. Without it they would get equal gradients for ever."""
    torch.manual_seed(0)
    product = make_generator(SHAPE)
    batch = make_batch(TEXT, TEXT == 5, 5, 1, (1,))
    letters = with_latent(product, 4)(TEXT, batch.words)[1][batch.mask].log_softmax(
        dim=-1
    )  # (M,K,V)
    assert (letters - letters[:, :1]).abs().max() > 1e-4
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    have = Latent(*with_latent(product, 4)(TEXT, batch.words), batch, Config())
    want = Product(product(TEXT), batch, Config())
    y = torch.randint(5, (2, 9, 8), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(have.log_likelihood(y), want.log_likelihood(y))
