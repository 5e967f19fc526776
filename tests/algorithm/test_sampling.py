"""Compare what may be drawn with plain loops, and draws with exact distributions.

Shapes: B masked inputs, T characters, N draws or blanks, V vocabulary, K values of the latent.
"""

import math

import pytest
import torch
from conftest import BLANK, encode

from grpo import truncation
from grpo.batch import make_batch
from grpo.policy import Product
from grpo.run.config import Config
from grpo.run.network import make_policy
from grpo.truncation import LEFT_OUT, allowed_characters, penalize_repetition
from model.transformer import TransformerConfig, make_generator

LOGITS = torch.randn(200, 9, generator=torch.Generator().manual_seed(1)) * 2  # (N,V)


def slow_keep(logits, top_k=0, top_p=1.0, min_p=0.0, xtc=False):
    """Truncate one blank's characters, in float64. Its probabilities must have no ties."""
    p = (logits.double() / 0.8).softmax(dim=-1).tolist()
    order = sorted(range(len(p)), key=lambda v: -p[v])
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        total = sum(p[v] for v in order)
        share = 0.0
        kept = []
        for v in order:
            kept.append(v)
            share += p[v]
            if share >= top_p * total:
                break
        order = kept
    order = [v for v in order if p[v] >= min_p * max(p)]
    total = sum(p[v] for v in order)
    likely = [v for v in order if p[v] >= 0.1 * total]
    return set(order) - set(likely[:-1] if xtc else [])


TRUNCATIONS = [
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 1},
    {"top_p": 1e-6},
]


def sets(allowed):
    """Turn masks (N,V) into sets of characters."""
    return [set(row.nonzero().flatten().tolist()) for row in allowed]


@pytest.mark.parametrize("options", TRUNCATIONS)
def test_allowed_characters_equal_the_rules(options):
    allowed = allowed_characters(LOGITS, torch.zeros(200, 1), Config(temperature=0.8, **options))
    assert sets(allowed) == [slow_keep(row, **options) for row in LOGITS]


@pytest.mark.parametrize("options", [{}, *TRUNCATIONS[:4]])
@pytest.mark.parametrize("temperature", [0.8, 1.7])
def test_draws_follow_the_differentiated_distribution(options, temperature):
    """200,000 draws follow exp(logp), so sampling and scoring use the same distribution.

    Chi-square must not be more than about five standard deviations above its mean.
    """
    V, N = 8, 200_000
    logits = torch.randn(V, generator=torch.Generator().manual_seed(3)) * 1.5
    logits[-1] = LEFT_OUT
    masked = torch.tensor([[V - 1]])  # one input, one blank
    config = Config(temperature=temperature, **options)
    q = Product(logits.view(1, 1, V), masked, masked > 0, config, truncates=bool(options))
    sample = q.sample(make_batch(masked, masked > 0, N, (4,)))
    drawn = sample.completions.flatten()  # (N,)
    count = drawn.bincount(minlength=V).double()  # (V,)
    expected = torch.zeros(V, dtype=torch.double)
    expected[drawn] = N * q.log_probs(sample, q).logp.flatten().double().exp()
    assert expected.sum().item() == pytest.approx(N, abs=1)
    count, expected = count[expected > 0], expected[expected > 0]
    chi_square = ((count - expected) ** 2 / expected).sum().item()
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 10


def test_xtc_equals_the_rule():
    """It comes after the other truncations, and acts where the coin is below its probability."""
    coins = torch.arange(200)[:, None] / 200  # (N,1)
    for probability in 0.3, 1.0:
        config = Config(temperature=0.8, top_p=0.9, xtc_probability=probability)
        acts = (coins < probability).flatten().tolist()
        want = [slow_keep(row, top_p=0.9, xtc=act) for row, act in zip(LOGITS, acts)]
        assert sets(allowed_characters(LOGITS, coins, config)) == want


def test_a_truncation_that_leaves_nothing_is_ignored_at_that_blank(monkeypatch):
    """This one leaves nothing where the likeliest character is 0, and everything elsewhere."""

    def of_my_own(q, value, coins):
        return (q.argmax(dim=-1, keepdim=True) > 0).expand(q.shape)

    coins = torch.zeros(200, 1)
    want = allowed_characters(LOGITS, coins, Config(top_k=3))
    monkeypatch.setitem(truncation.TRUNCATIONS, "min_p", (of_my_own, 0))
    assert torch.equal(allowed_characters(LOGITS, coins, Config(top_k=3, min_p=0.1)), want)


@pytest.mark.parametrize("shape", [(2, 6, 9), (2, 6, 3, 9)])  # (B,T,V), (B,T,K,V)
def test_the_repetition_penalty_is_a_loop_over_what_is_visible(shape):
    """Blanks and padding are not visible."""
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logits[..., -1] = -1e9  # the mask token
    masked = torch.tensor([[3, 8, 5, 8, 3, 7], [4, 8, 1, -1, -1, -1]])  # (B,T)
    seen = [{3, 5, 7}, {4, 1}]
    have = penalize_repetition(logits, masked, 8, 1.3)
    assert have.shape == logits.shape and (have[..., -1] < -1e8).all()
    for row, found, visible in zip(logits, have, seen):
        for s, penalized in zip(row.view(-1, 9).tolist(), found.view(-1, 9).tolist()):
            for v in visible:
                s[v] = s[v] / 1.3 if s[v] > 0 else s[v] * 1.3
            assert penalized[:-1] == pytest.approx(s[:-1])
    assert torch.equal(penalize_repetition(logits, masked, 8, 1.0), logits)


@pytest.mark.parametrize("n_latent, name", [(1, "logits"), (3, "characters")])
def test_a_policy_penalizes_the_logits_of_its_characters(n_latent, name):
    shape = TransformerConfig(n_layer=1, n_head=2, n_embd=32, n_latent=n_latent)
    generator = make_generator(shape)
    masked = encode("the c_t so", "a __ on so")

    def logits(penalty):
        config = Config(dtype="float32", repetition_penalty=penalty)
        return getattr(make_policy(generator, config, torch.device("cpu"))(masked), name)

    want = penalize_repetition(logits(1.0), masked, BLANK, 1.5)
    torch.testing.assert_close(logits(1.5), want)
