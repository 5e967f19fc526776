"""Compare kept sets with plain loops, and draws with exact distributions.

Shapes: B masked inputs, T characters, N draws, V vocabulary, K values of the latent.
"""

import math
from dataclasses import replace

import pytest
import torch
from conftest import BLANK, encode, make_batch

from grpo.policy import (
    compute_logprobs,
    draw,
    integer_weights,
    log_softmax,
    may_be_drawn,
    restrict,
    sample_completions,
)
from grpo.run.config import Config
from grpo.run.network import Policy
from grpo.truncation import TRUNCATIONS, penalise_repetition
from model.transformer import Generator, TransformerConfig


def random_uniforms(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def keep(weights, config):
    """Find what may be drawn where no truncation tosses a coin."""
    return may_be_drawn(weights, None, config)


def assert_follows(count, expected):
    """Check by a chi-square test that the numbers in `count` fit those in `expected`.

    Both hold the number of draws of each kind. Chi-square must not be more than about five standard
    deviations above its mean.
    """
    possible = expected > 0
    assert count[~possible].sum() == 0
    assert count.sum().item() == pytest.approx(expected.sum().item(), abs=1)
    chi_square = ((count - expected) ** 2 / expected)[possible].sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 10


def slow_keep(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """Apply the truncation rules to one blank, in float64. Its probabilities must have no ties."""
    p = torch.softmax(logits.double() / temperature, dim=-1).tolist()
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
    return {v for v in order if p[v] >= min_p * max(p)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 6, "top_p": 0.8, "min_p": 0.05},
        {"top_k": 1},
        {"top_p": 1e-6},
    ],
)
def test_kept_set_equals_the_rules(options):
    logits = torch.randn(200, 9, generator=torch.Generator().manual_seed(1)) * 2
    kept = keep(integer_weights(logits, 0.8), Config(**options))
    for row, have in zip(logits, kept):
        assert set(have.nonzero().squeeze(1).tolist()) == slow_keep(row, 0.8, **options)


def test_ties_are_kept():
    weights = torch.tensor([[5, 3, 3, 3, 1]])
    assert keep(weights, Config(top_k=2)).tolist() == [[True, True, True, True, False]]
    assert keep(weights, Config(top_p=0.5)).tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [0.8, 1.7])
def test_draws_follow_the_differentiated_distribution(options, temperature):
    """200,000 draws follow exp(logp), so sampling and scoring use the same distribution."""
    V = 8
    N = 200_000
    logits = torch.randn(1, 1, V, generator=torch.Generator().manual_seed(3)) * 1.5
    logits[..., -1] = float("-inf")
    mask = torch.ones(1, 1, dtype=torch.bool)
    masked = torch.full((1, 1), V - 1)
    uniforms = random_uniforms(1, N, 1, 2, seed=4)
    sampling = Config(temperature=temperature, **options)
    completions, kept = sample_completions(logits, masked, mask, uniforms, sampling)
    count = torch.bincount(completions.flatten(), minlength=V).double()
    drawable = kept.flatten().nonzero().squeeze(1)
    logp, *_ = compute_logprobs(logits, logits, drawable.view(1, -1, 1), kept, mask, temperature)
    expected = torch.zeros(V, dtype=torch.double)
    expected[drawable] = logp.flatten().double().exp() * N
    assert_follows(count, expected)


def slow_xtc(q, threshold):
    """Apply XTC to one blank's probabilities q, which have no ties: -> the characters that stay."""
    possible = {v for v in range(len(q)) if q[v] > 0}
    top = [v for v in range(len(q)) if q[v] >= threshold]
    if not top:
        return possible
    least = min(top, key=lambda v: q[v])
    return possible - (set(top) - {least})


@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.3])
def test_xtc_equals_the_rule(threshold):
    logits = torch.randn(200, 9, generator=torch.Generator().manual_seed(1)) * 2
    weights = integer_weights(logits, 0.8)
    kept = keep(weights, Config(top_p=0.9))
    uniforms = random_uniforms(200, 4)
    always = Config(xtc_threshold=threshold, xtc_probability=1.0)
    _, exclude_top_choices = TRUNCATIONS["xtc_probability"]
    have = exclude_top_choices(weights, kept, uniforms, always)
    q = (weights * kept).double() / (weights * kept).sum(dim=-1, keepdim=True)
    want = [slow_xtc(row, threshold) for row in q.tolist()]
    assert [set(row.nonzero().flatten().tolist()) for row in have] == want
    assert (have != kept).any()
    never = Config(xtc_threshold=threshold)
    assert torch.equal(exclude_top_choices(weights, kept, uniforms, never), kept)


def test_xtc_draws_follow_the_exact_mixture():
    """XTC acts on both fills of a blank or on neither, so they are not independent.

    P(v, w) = (1 − probability) · q(v) q(w) + probability · q'(v) q'(w).

    Here q is what a blank is drawn from without XTC, and q' is q without XTC's top choices.
    """
    V = 8
    N = 100_000
    probability = 0.4
    threshold = 0.15
    sampling = Config(
        temperature=0.8,
        top_p=0.9,
        min_p=0.03,
        xtc_threshold=threshold,
        xtc_probability=probability,
    )
    logits = torch.tensor([1.2, 0.9, 0.5, 0.1, -0.2, -0.8, -1.5, float("-inf")])
    kept = keep(integer_weights(logits, 0.8), replace(sampling, xtc_probability=0.0))
    q = restrict(log_softmax(logits, 0.8), kept).exp().double()  # (V,)
    stays = slow_xtc(q.tolist(), threshold)
    dropped = torch.tensor([v in stays for v in range(V)]) * q
    dropped = dropped / dropped.sum()  # (V,)
    joint = (1 - probability) * q.outer(q) + probability * dropped.outer(dropped)  # (V,V)
    completions, kept = sample_completions(
        logits.expand(N, 1, V),
        torch.full((N, 1), V - 1),
        torch.ones(N, 1, dtype=torch.bool),
        random_uniforms(N, 2, 1, 2, seed=4),
        sampling,
    )
    assert kept.gather(-1, completions.transpose(1, 2)).all()  # each draw is a kept character
    pairs = completions[:, 0, 0] * V + completions[:, 1, 0]  # (N,)
    assert_follows(torch.bincount(pairs, minlength=V * V).double(), joint.flatten() * N)


def test_the_coin_of_xtc_is_uniform_and_independent_of_each_uniform():
    """The coin is in the c-th eighth if a blank loses a character with p = (c + 1)/8, not c/8.

    We count blanks by the eighth of the coin, and by that of one of the uniforms.
    """
    N = 20_000
    uniforms = random_uniforms(N, 6)  # of three fills
    weights = torch.tensor([3, 2]).expand(N, 2)
    spared = 0
    for p in range(1, 9):
        config = Config(xtc_probability=p / 8)
        spared = spared + may_be_drawn(weights, uniforms, config).all(dim=-1)  # (N,)
    for each in uniforms.T:
        pairs = 8 * spared + (8 * each).long()
        assert_follows(pairs.bincount(minlength=64).double(), torch.full((64,), N / 64))


def test_draw_is_the_inverse_of_the_cumulative_weights():
    weights = torch.tensor([[0, 2, 0, 1, 1, 0]])
    uniforms = torch.tensor([[0.0, 0.49, 0.5, 0.74, 0.75, 0.999999]])
    assert draw(weights, uniforms).tolist() == [[1, 1, 3, 3, 4, 4]]


def test_extreme_logits():
    infinite = float("-inf")
    logits = torch.tensor([[1e30, -1e30, 0.0], [-1e30, -1e30, -1e30], [infinite, infinite, 3.0]])
    kept = keep(integer_weights(logits, 0.8), Config(top_p=0.9, min_p=0.1))
    assert kept.tolist() == [[True, False, False], [True, True, True], [False, False, True]]


def slow_penalty(s, seen, penalty):
    """Centre one blank's logits, and make what was seen less likely, one character at a time."""
    mean = sum(s[:-1]) / (len(s) - 1)  # of all but the mask token
    centred = [x - mean for x in s]
    for v in seen:
        centred[v] = centred[v] / penalty if centred[v] > 0 else centred[v] * penalty
    return centred[:-1]


@pytest.mark.parametrize("shape", [(2, 6, 9), (2, 6, 3, 9)])  # (B,T,V), (B,T,K,V)
def test_the_repetition_penalty_is_a_loop_over_what_is_visible(shape):
    """Blanks and padding are not visible. Adding a constant to the logits changes nothing."""
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    logits[..., -1] = -1e9  # the mask token
    masked = torch.tensor([[3, 8, 5, 8, 3, 7], [4, 8, 1, -1, -1, -1]])  # (B,T)
    seen = [{3, 5, 7}, {4, 1}]
    have = penalise_repetition(logits, masked, masked == 8, 8, 1.3)
    assert have.shape == logits.shape and (have[..., -1] < -1e8).all()
    for row, found, visible in zip(logits, have, seen):
        for s, penalised in zip(row.view(-1, 9).tolist(), found.view(-1, 9).tolist()):
            assert penalised[:-1] == pytest.approx(slow_penalty(s, visible, 1.3))
    shifts = 100 * torch.randn(*shape[:-1], 1, dtype=torch.float64)
    shifted = penalise_repetition(logits + shifts, masked, masked == 8, 8, 1.3)
    torch.testing.assert_close(shifted[..., :-1], have[..., :-1])
    same = penalise_repetition(logits, masked, masked == 8, 8, 1.0)
    torch.testing.assert_close(same.softmax(dim=-1), logits.softmax(dim=-1))


@pytest.mark.parametrize("n_latent, name", [(1, "logits"), (3, "letters")])
def test_a_policy_penalises_the_logits_of_its_letters(n_latent, name):
    shape = TransformerConfig(n_layer=1, n_head=2, n_embd=32, n_latent=n_latent)
    generator = Generator(shape)
    masked = encode("the c_t so", "a __ on so")
    batch = make_batch(masked, masked == BLANK, BLANK, 2, (0,))

    def logits(penalty):
        config = Config(dtype="float32", compile="false", repetition_penalty=penalty)
        return getattr(Policy(generator, config, torch.device("cpu"))(batch), name)

    want = penalise_repetition(logits(1.0), masked, batch.mask, BLANK, 1.5)
    torch.testing.assert_close(logits(1.5), want)
