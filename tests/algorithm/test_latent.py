"""Compare the latent policy with sums over all pairs (z, y).

Shapes: one input of T = 4 characters, three of them blanks, V = 3 characters to choose from, K = 2
values of z, n completions.
"""

import pytest
import torch
from conftest import numbers

from grpo.batch import make_batch
from grpo.latent import Latent
from grpo.policy import Product
from grpo.run.config import Config
from model.pretrain import with_latent
from model.transformer import TransformerConfig, make_generator

T, V, K, TAU = 4, 3, 2, 0.8
BLANKS = [0, 2, 3]
MASK = torch.tensor([[True, False, True, True]])  # (1,T)
MASKED = torch.full((1, T), 2)
TRUNCATIONS = [{"top_k": 1}, {"top_k": 2}, {"min_p": 0.5}, {"xtc_probability": 1.0}]


def leaves(seed, K=K):
    """Make random logits of z (1,K) and of the characters (1,T,K,V)."""
    return numbers(seed, 1, K), 2 * numbers(seed + 9, 1, T, K, V)


def make(kind, *logits, **options):
    config = Config(temperature=TAU, **options)
    return kind(*logits, MASKED, MASK, config, truncates=bool(options))


def batch_of(n):
    return make_batch(MASKED, MASK, n, (1,))


def pairs(prior, characters, kept=1):
    """Compute P(z, y) of every completion y: (K,V,V,V), with one V for each blank."""
    weights = (characters[0] / TAU).exp() * kept  # (T,K,V)
    q = weights / weights.sum(dim=-1, keepdim=True)
    return torch.einsum("z,za,zb,zc->zabc", (prior[0] / TAU).softmax(dim=0), *q[BLANKS])


def slow_logp(table, y):
    """Look up log-probabilities given the blanks before: (V,V,V), (n,3) -> (n,3)."""
    a, b, c = y.T
    up_to = [torch.ones(len(y)), table.sum(dim=(1, 2))[a], table.sum(dim=2)[a, b], table[a, b, c]]
    return torch.stack(up_to).log().diff(dim=0).T


def test_likelihoods_and_marginals_are_sums_of_the_table():
    q, table = make(Latent, *leaves(0)), pairs(*leaves(0)).sum(dim=0)
    y = torch.cartesian_prod(*[torch.arange(V)] * 3)  # (27,3)
    every = MASKED.repeat(27, 1)  # (27,T)
    every[:, BLANKS] = y
    torch.testing.assert_close(q.log_likelihood(every[None])[0, :, BLANKS], slow_logp(table, y))
    for i, t in enumerate(BLANKS):
        others = [other for other in range(3) if other != i]
        torch.testing.assert_close(q.log_marginals()[0, t].exp(), table.sum(dim=others))


@pytest.mark.parametrize("options", TRUNCATIONS, ids=str)
def test_scores_are_sums_over_all_pairs(options):
    """Each z truncates its own characters, so what one z drew can be impossible for another."""
    now, reference = leaves(5), leaves(1)
    sample = make(Latent, *now, **options).sample(batch_of(20))
    y, kept = sample.completions[0, :, BLANKS], sample.allowed[0]
    p, r = (pairs(*logits, kept) for logits in (now, reference))
    assert (p[:, *y.T] == 0).any()
    scores = make(Latent, *now).log_probs(sample, make(Latent, *reference))
    found = [scores.logp[0, :, BLANKS], scores.ref_logp[0, :, BLANKS]]
    want = [slow_logp(each.sum(dim=0), y) for each in (p, r)]
    p, r = pairs(*now), pairs(*reference)
    found += [scores.kl.sum(), scores.entropy.sum()]
    want += [(p * (p / r).log()).sum(), -(p * p.log()).sum()]
    torch.testing.assert_close(found, want)
    assert not any(x[..., 1].any() for x in vars(scores).values())  # it's no blank


def test_draws_follow_the_mixture():
    """Each completion draws a z of its own, and then its characters."""
    n = 100_000
    sample = make(Latent, *leaves(3), top_k=2).sample(batch_of(n))
    assert (sample.completions[..., 1] == 2).all(), "a visible character"
    want = pairs(*leaves(3), sample.allowed[0]).sum(dim=0).flatten()
    code = sample.completions[0, :, BLANKS] @ torch.tensor([9, 3, 1])
    have = code.bincount(minlength=27) / n
    assert (want == 0).any() and not have[want == 0].any()
    torch.testing.assert_close(have.double(), want, rtol=0, atol=0.006)


def test_the_first_completions_need_the_first_random_numbers():
    q, batch = make(Latent, *leaves(0)), batch_of(9)
    have, want = q.sample(batch.first(4)).completions, q.sample(batch).completions
    assert torch.equal(have, want[:, :4])
    assert torch.equal(batch.first(4).noise, batch.noise[:, :4])


@pytest.mark.parametrize("options", [{}, *TRUNCATIONS], ids=str)
def test_with_one_z_it_is_a_product(options):
    """Draws, scores and the best guess are the same."""
    logits = leaves(0, K=1), leaves(1, K=1)
    latents = [make(Latent, *each, **options) for each in logits]
    products = [make(Product, characters[:, :, 0], **options) for _, characters in logits]
    results = []
    for q, q_ref in latents, products:
        sample = q.sample(batch_of(9))
        scores = vars(q.log_probs(sample, q_ref)).values()
        results.append([sample.completions, q.best_guess(), *scores])
    torch.testing.assert_close(*results)


def test_the_best_guess_is_the_likeliest_of_what_each_z_would_write():
    for seed in range(8):
        table = pairs(*leaves(seed)).sum(dim=0)
        proposals = leaves(seed)[1][0, BLANKS].argmax(dim=-1).T  # (K,3)
        best = max(proposals.tolist(), key=lambda y: table[tuple(y)])  # noqa: B023
        assert make(Latent, *leaves(seed)).best_guess().tolist() == [[best[0], 2, *best[1:]]]


def test_a_latent_begins_as_copies_of_a_product():
    """The copies differ by a little noise. Without it they'd get equal gradients forever."""
    product = make_generator(TransformerConfig(6, 8, 1, 1, 16, blank=5))
    text = torch.tensor([[5, 5, 1], [0, 1, 5]])  # 5 is a blank
    noise = (with_latent(product, 4)(text)[1] - product(text)[:, :, None])[..., :5]  # (B,T,K,V)
    assert (noise.std(dim=2) > 1e-4).all() and noise.abs().max() < 0.5
