import itertools
import math

import pytest
import torch

from grpo import mixture
from grpo.sampling import sample_completions
from grpo.stats import log_softmax

V = 4  # three characters and the mask token
MASK = torch.tensor([[False, True, False, True]])
MASKED = torch.tensor([[1, 3, 2, 3]])


def logits_of(inputs, n_latent, seed=0):
    logits = torch.randn(inputs * n_latent, 4, V, generator=torch.Generator().manual_seed(seed))
    logits[..., V - 1] = float("-inf")
    return 2 * logits


def every_fill():
    """(1,9,4) of the two blanks."""
    return torch.tensor([[[1, a, 2, b] for a, b in itertools.product(range(3), repeat=2)]])


def by_enumeration(logits, temperature):
    """P of every fill: the mean over z of the product over blanks."""
    q = (logits.double() / temperature).softmax(dim=-1)  # (K,T,V)
    return [
        sum(row[1, a] * row[3, b] for row in q).item() / len(q)
        for a, b in itertools.product(range(3), repeat=2)
    ]


@pytest.mark.parametrize("n_latent", [1, 2, 3])
def test_the_probability_of_a_fill_by_enumeration(n_latent):
    logits = logits_of(1, n_latent).double()
    log_p = log_softmax(logits, 0.7)
    p = mixture.log_prob(log_p, every_fill(), MASK)[0].exp()
    assert p.tolist() == pytest.approx(by_enumeration(logits, 0.7))
    assert p.sum().item() == pytest.approx(1)
    marginal = mixture.log_marginal(log_p, 1)[0, 1].exp()
    summed = p.view(3, 3).sum(dim=1)  # over the other blank
    assert marginal[:3].tolist() == pytest.approx(summed.tolist())
    again = mixture.marginal_logits(logits, 1, 0.7) / 0.7
    assert again.softmax(dim=-1)[0, 1].tolist() == pytest.approx(marginal.tolist())


@pytest.mark.parametrize("n_latent", [1, 2])
def test_draws_come_as_often_as_they_are_likely(n_latent):
    logits = logits_of(1, n_latent)
    rng = torch.Generator().manual_seed(0)
    n = 20000
    uniforms = torch.rand(1, n, 4, generator=rng)
    z_uniforms = torch.rand(1, n, generator=rng)
    fills = mixture.draw(logits, MASKED, MASK, uniforms, z_uniforms, {"temperature": 0.7})
    assert (fills[..., ~MASK[0]] == MASKED[..., ~MASK[0]]).all()
    for fill, p in zip(every_fill()[0], by_enumeration(logits, 0.7)):
        share = (fills[0] == fill).all(dim=1).double().mean().item()
        assert abs(share - p) < 5 * math.sqrt(p / n)


def test_each_fill_has_a_z_of_its_own():
    logits = logits_of(2, 2)
    masked = MASKED.expand(2, 4)
    mask = MASK.expand(2, 4)
    uniforms = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(1))
    z_uniforms = torch.tensor([[0.1, 0.6, 0.4, 0.99], [0.5, 0.0, 0.49, 0.51]])
    fills = mixture.draw(logits, masked, mask, uniforms, z_uniforms, {"temperature": 1.0})
    for i, zs in enumerate([[0, 1, 0, 1], [1, 0, 0, 1]]):
        for j, z in enumerate(zs):
            row = logits[2 * i + z][None]
            own, _ = sample_completions(row, MASKED, MASK, uniforms[i, j][None, None])
            assert fills[i, j].tolist() == own[0, 0].tolist()


def test_without_a_latent_it_is_sample_completions():
    """Bit for bit, and with more inputs than are drawn at once."""
    N = mixture.AT_ONCE + 3
    logits = logits_of(N, 1)
    rng = torch.Generator().manual_seed(1)
    inputs = (MASKED.expand(N, 4), MASK.expand(N, 4), torch.rand(N, 5, 4, generator=rng))
    options = {"temperature": 0.8, "top_p": 0.9}
    fills = mixture.draw(logits, *inputs, torch.rand(N, 5, generator=rng), options)
    assert torch.equal(fills, sample_completions(logits, *inputs, **options)[0])


def test_the_likeliest_of_what_each_z_likes_best():
    logits = logits_of(8, 3)
    own = torch.where(MASK, logits.argmax(dim=-1), MASKED).view(8, 3, 4)
    best = mixture.likeliest(logits, MASKED.expand(8, 4), MASK.expand(8, 4), 0.7)
    chosen = set()
    for i in range(8):
        p = dict(
            zip(itertools.product(range(3), repeat=2), by_enumeration(logits[3 * i :][:3], 0.7))
        )
        of_z = [p[row[1].item(), row[3].item()] for row in own[i]]
        chosen.add(of_z.index(max(of_z)))
        assert p[best[i, 0, 1].item(), best[i, 0, 3].item()] == max(of_z)
    assert len(chosen) > 1


def test_without_a_latent_the_likeliest_is_the_argmax():
    logits = logits_of(5, 1)
    best = mixture.likeliest(logits, MASKED.expand(5, 4), MASK.expand(5, 4), 0.7)
    assert torch.equal(best[:, 0], torch.where(MASK, logits.argmax(dim=-1), MASKED))


def test_a_coin_keeps_both_words_where_a_product_makes_four():
    """he is "1 0" or "0 1": each z is sure of one of them."""
    sure = torch.full((2, 4, V), -50.0)
    sure[0, 1, 1] = sure[0, 3, 0] = sure[1, 1, 0] = sure[1, 3, 1] = 50.0
    log_p = log_softmax(sure, 1.0)
    p = dict(
        zip(itertools.product(range(3), repeat=2), mixture.log_prob(log_p, every_fill(), MASK)[0])
    )
    assert p[1, 0].exp() == pytest.approx(0.5) and p[0, 1].exp() == pytest.approx(0.5)
    product = mixture.log_marginal(log_p, 1)  # what is left when nobody looks at z
    p = mixture.log_prob(product, every_fill(), MASK)[0].exp()
    assert sorted(p.tolist())[-4:] == pytest.approx([0.25] * 4)
