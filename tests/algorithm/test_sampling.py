"""Compare what may be drawn with plain loops, and draws with exact distributions.

Shapes: B masked inputs, T characters, N draws or blanks, V vocabulary, K values of the latent.
"""

import pytest
import torch
from conftest import BLANK, encode, numbers

from grpo import truncation
from grpo.batch import make_batch
from grpo.policy import Product
from grpo.run.config import Config
from grpo.run.load import make_policy
from grpo.truncation import allowed_characters
from model.transformer import TransformerConfig, make_generator

LOGITS = 2 * numbers(1, 200, 9)  # (N,V)


def slow_keep(logits, coin, top_k=0, top_p=1.0, min_p=0.0, xtc_probability=0.0):
    """Truncate one blank's characters. Its probabilities must have no ties."""
    p = (logits / 0.8).softmax(dim=-1).tolist()
    order = sorted(range(len(p)), key=lambda v: -p[v])
    if top_k:
        order = order[:top_k]
    total = sum(p[v] for v in order)
    while sum(p[v] for v in order[:-1]) >= top_p * total:
        order.pop()
    order = [v for v in order if p[v] >= min_p * max(p)]
    total = sum(p[v] for v in order)
    likely = [v for v in order if p[v] >= 0.1 * total]
    return set(order) - set(likely[:-1] if coin < xtc_probability else [])


TRUNCATIONS = [
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 6, "top_p": 0.8, "min_p": 0.05},
    {"top_p": 1e-6},
    {"top_p": 0.9, "xtc_probability": 0.3},
]


@pytest.mark.parametrize("options", TRUNCATIONS)
def test_allowed_characters_equal_the_rules(options):
    coins = torch.arange(200)[:, None] / 200  # (N,1)
    allowed = allowed_characters(LOGITS, coins, Config(temperature=0.8, **options))
    for row, coin, logits in zip(allowed, coins, LOGITS):
        assert {*row.nonzero().flatten().tolist()} == slow_keep(logits, coin, **options)


@pytest.mark.parametrize("options", [{}, *TRUNCATIONS])
@pytest.mark.parametrize("temperature", [0.8, 1.7])
def test_draws_follow_the_differentiated_distribution(options, temperature):
    """Frequencies of 400,000 draws are exp(logp): sampling and scoring use one distribution."""
    mask = torch.ones(1, 4, dtype=torch.bool)
    config = Config(temperature=temperature, **options)
    q = Product(2 * numbers(3, 1, 4, 8), mask.long(), mask, config, truncates=bool(options))
    sample = q.sample(make_batch(mask.long(), mask, 100_000, (4,)))
    for y, logp in zip(sample.completions[0].T, q.log_probs(sample, q).logp[0].T):  # (G,), (G,)
        want = torch.zeros(8, dtype=torch.float64)
        want[y] = logp.exp()
        assert want.sum().item() == pytest.approx(1)
        share = y.bincount(minlength=8) / len(y)
        torch.testing.assert_close(share.double(), want, rtol=0, atol=0.008)


def test_a_truncation_that_leaves_nothing_is_ignored_at_that_blank(monkeypatch):
    """This one leaves nothing where the likeliest character is 0, and everything elsewhere."""

    def of_my_own(q, value, coins):
        return (q.argmax(dim=-1, keepdim=True) > 0).expand(q.shape)

    coins = torch.zeros(200, 1)
    want = allowed_characters(LOGITS, coins, Config(top_k=3))
    monkeypatch.setitem(truncation.TRUNCATIONS, "min_p", (of_my_own, 0))
    assert torch.equal(allowed_characters(LOGITS, coins, Config(top_k=3, min_p=0.1)), want)


@pytest.mark.parametrize("n_latent, name", [(1, "logits"), (3, "characters")])
def test_the_repetition_penalty_is_a_loop_over_what_is_visible(n_latent, name):
    """Blanks and padding aren't visible."""
    generator = make_generator(TransformerConfig(28, 10, 1, 2, 32, n_latent))
    masked = encode("the c_t so", "ab__onx___")
    masked[1, -3:] = -1

    def logits(penalty):
        config = Config(dtype="float32", repetition_penalty=penalty)
        return getattr(make_policy(generator, config, torch.device("cpu"))(masked), name).detach()

    want = logits(1.0)
    for row, seen in zip(want, masked):
        for v in set(seen.tolist()) - {BLANK, -1}:
            s = row[..., v]
            s[:] = torch.where(s > 0, s / 1.5, s * 1.5)
    torch.testing.assert_close(logits(1.5)[..., :BLANK], want[..., :BLANK])
