"""Compare the latent policy with sums over all pairs (z, y).

Temperature and truncation are on. The blanks of the first input are not adjacent.

Shapes: B = 2 inputs, T = 4 characters, V = 3 characters to choose from, K = 2 values of z, n
completions of each input. Input b has L blanks.
"""

import pytest
import torch

from grpo.batch import make_batch
from grpo.latent import Latent
from grpo.policy import Product
from grpo.run.config import Config
from model.pretrain import with_latent
from model.transformer import TransformerConfig, make_generator

B, T, V, K, TAU = 2, 4, 3, 2, 0.8
MASK = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]]).bool()  # (B,T)
BLANKS = [row.nonzero().flatten().tolist() for row in MASK]
ALL = torch.ones(B, T, K, V, dtype=torch.bool)
TRUNCATIONS = [{"top_k": 1}, {"top_k": 2}, {"min_p": 0.5}, {"xtc_probability": 1.0}]


def leaves(seed, K=K):
    """Make random logits of z (B,K) and of the characters (B,T,K,V)."""
    g = torch.Generator().manual_seed(seed)
    prior = torch.randn(B, K, generator=g, dtype=torch.float64)
    characters = 2 * torch.randn(B, T, K, V, generator=g, dtype=torch.float64)
    return prior.requires_grad_(), characters.requires_grad_()


def make(kind, *logits, **options):
    config = Config(temperature=TAU, **options)
    return kind(*logits, torch.full((B, T), 2), MASK, config, truncates=bool(options))


def batch_of(n):
    return make_batch(torch.zeros(B, T), MASK, n, (1,))


def pairs(prior, characters, kept, b):
    """Compute P(z, y) of every completion y of input b: (K,V,V,...), with one V for each blank."""
    p = (prior[b] / TAU).softmax(dim=0)
    for t in BLANKS[b]:
        weights = (characters[b, t] / TAU).exp() * kept[b, t]
        q = weights / weights.sum(dim=-1, keepdim=True)  # (K,V)
        p = p[..., None] * q.view(K, *[1] * (p.dim() - 1), V)
    return p


def slow_logp(prior, characters, kept, y):
    """Compute the log-probability of each character given those before it: -> (B,n,T)."""
    logp = torch.zeros(y.shape, dtype=torch.float64)
    for b, blanks in enumerate(BLANKS):
        table = pairs(prior, characters, kept, b).sum(dim=0)  # (V,V,...)
        for i in reversed(range(len(blanks))):
            to_here = table[tuple(y[b, :, s] for s in blanks[: i + 1])]
            table = table.sum(dim=-1)  # P of what's in the first i blanks
            logp[b, :, blanks[i]] = (to_here / table[tuple(y[b, :, s] for s in blanks[:i])]).log()
    return logp


def weigh(logp, kl, entropy):
    """Compute a number that depends on all scores, to differentiate it."""
    g = torch.randn(logp.shape, generator=torch.Generator().manual_seed(0))  # (B,n,T)
    return (g * logp).sum() + 2 * kl.sum() - 3 * entropy.sum()


def test_the_probabilities_of_all_completions_are_those_of_the_pairs():
    every = torch.cartesian_prod(*[torch.arange(V)] * T).expand(B, -1, T)  # (B,81,T)
    have = make(Latent, *leaves(0)).log_likelihood(every)
    torch.testing.assert_close(have, slow_logp(*leaves(0), ALL, every))


def test_marginals_are_sums_over_z_and_the_other_blanks():
    have = make(Latent, *leaves(0)).log_marginals()  # (B,T,V)
    for b, blanks in enumerate(BLANKS):
        table = pairs(*leaves(0), ALL, b).sum(dim=0)  # (V,V,...)
        for i, t in enumerate(blanks):
            others = [other for other in range(len(blanks)) if other != i]
            torch.testing.assert_close(have[b, t].exp(), table.sum(dim=others))


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
def test_scores_and_their_gradient_are_sums_over_all_pairs(options):
    """Each z truncates its own characters, so what one z drew can be impossible for another."""
    now, reference = leaves(0), leaves(1)
    sample = make(Latent, *now, **options).sample(batch_of(20))
    y, kept = sample.completions, sample.allowed
    written = kept[..., None, :].take_along_dim(y.mT[:, :, None, :, None], dim=-1)[MASK]
    assert not written.all() and written.any(dim=1).all()

    scores = make(Latent, *now).log_probs(sample, make(Latent, *reference))
    logp, ref_logp = (slow_logp(*logits, kept, y) for logits in (now, reference))
    torch.testing.assert_close(scores.logp, logp)
    torch.testing.assert_close(scores.ref_logp, ref_logp)
    p, r = ([pairs(*logits, ALL, b) for b in range(B)] for logits in (now, reference))
    kl = torch.stack([(p[b] * (p[b] / r[b]).log()).sum() for b in range(B)])
    entropy = torch.stack([-(p[b] * p[b].log()).sum() for b in range(B)])
    torch.testing.assert_close(scores.kl.sum(dim=1), kl)
    torch.testing.assert_close(scores.entropy.sum(dim=1), entropy)
    have = torch.autograd.grad(weigh(scores.logp, scores.kl, scores.entropy), now)
    torch.testing.assert_close(have, torch.autograd.grad(weigh(logp, kl, entropy), now))
    for name, x in vars(scores).items():
        assert not (x.mT if x.dim() == 3 else x)[~MASK].any(), name


def test_draws_follow_the_mixture():
    """Each completion draws a z of its own, and then its characters."""
    n = 100_000
    sample = make(Latent, *leaves(3), top_k=2).sample(batch_of(n))
    assert (sample.completions.mT[~MASK] == 2).all(), "visible characters"
    for b, blanks in enumerate(BLANKS):
        want = pairs(*leaves(3), sample.allowed, b).sum(dim=0).flatten()
        code = sum(sample.completions[b, :, t] * V**i for i, t in enumerate(reversed(blanks)))
        have = torch.bincount(code, minlength=len(want)) / n
        assert (want == 0).any() and not have[want == 0].any()
        torch.testing.assert_close(have.double(), want.detach(), rtol=0, atol=0.006)


def test_the_first_completions_need_the_first_random_numbers():
    q, batch = make(Latent, *leaves(0)), batch_of(9)
    have, want = q.sample(batch.first(4)).completions, q.sample(batch).completions
    assert torch.equal(have, want[:, :4]) and not torch.equal(have, want[:, 4:8])
    assert torch.equal(batch.first(4).noise, batch.noise[:, :4])


@pytest.mark.parametrize("options", [{}, *TRUNCATIONS], ids=str)
def test_with_one_z_it_is_a_product(options):
    """Draws, scores, their gradient and the best guess are the same."""
    now, reference = leaves(0, K=1), leaves(1, K=1)
    latents = [make(Latent, *logits, **options) for logits in (now, reference)]
    products = [make(Product, logits[1][:, :, 0], **options) for logits in (now, reference)]
    results = []
    for q, q_ref in latents, products:
        sample = q.sample(batch_of(9))
        scores = q.log_probs(sample, q_ref)
        value = weigh(scores.logp, scores.kl, scores.entropy)
        gradient = torch.autograd.grad(value, now[1])
        results.append([sample.completions, q.best_guess(), *vars(scores).values(), *gradient])
    torch.testing.assert_close(*results)


def test_the_best_guess_is_the_likeliest_of_what_each_z_would_write():
    for seed in range(8):
        prior, characters = leaves(seed)
        guess = make(Latent, prior, characters).best_guess()
        for b, blanks in enumerate(BLANKS):
            table = pairs(prior, characters, ALL, b).sum(dim=0)  # (V,V,...)
            proposals = [tuple(row.tolist()) for row in characters[b, blanks].argmax(dim=-1).T]
            best = max(proposals, key=lambda y: table[y])  # noqa: B023
            assert tuple(guess[b, blanks].tolist()) == best
        assert (guess[~MASK] == 2).all()


SHAPE = TransformerConfig(vocab_size=6, block_size=8, n_layer=1, n_head=1, n_embd=16, blank=5)
TEXT = torch.tensor([[5, 5, 1, 5, 5, 5, 2, 3], [0, 1, 5, 4, 4, 4, 4, 4]])  # 5 is a blank


def test_a_latent_begins_as_copies_of_a_product(monkeypatch):
    """The copies differ by a little noise. Without it they would get equal gradients for ever."""
    torch.manual_seed(0)
    product = make_generator(SHAPE)
    want = product(TEXT)[:, :, None].expand(-1, -1, 4, -1)  # (B,T,K,V)
    assert ((with_latent(product, 4)(TEXT)[1] - want).std(dim=2)[..., :5] > 1e-4).all()
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    torch.testing.assert_close(with_latent(product, 4)(TEXT)[1], want)
