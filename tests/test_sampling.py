import math

import pytest
import torch

from grpo.sampling import (
    draw,
    exclude_top_choices,
    integer_weights,
    keep,
    penalise,
    sample_completions,
)
from grpo.stats import log_softmax, restrict


def slow_keep(logits, temperature, top_k, top_p, min_p):
    """The rules in plain words, one blank at a time, on real probabilities (no ties)."""
    p = torch.softmax(logits.double() / temperature, dim=-1).tolist()
    order = sorted(range(len(p)), key=lambda v: -p[v])
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        share, kept, total = 0.0, [], sum(p[v] for v in order)
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
    kept = keep(integer_weights(logits, 0.8), **options)
    for row, have in zip(logits, kept):
        want = slow_keep(row, 0.8, **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} | options))
        assert set(have.nonzero().squeeze(1).tolist()) == want


def test_ties_are_kept():
    weights = torch.tensor([[5, 3, 3, 3, 1]])
    assert keep(weights, top_k=2).tolist() == [[True, True, True, True, False]]
    assert keep(weights, top_p=0.5).tolist() == [[True, True, True, True, False]]


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [0.8, 1.7])
def test_draws_follow_the_differentiated_distribution(options, temperature):
    """Chi-square of a million draws against exp(logp) of `stats`: sampled and scored by the same distribution."""
    from grpo.stats import stats

    V, N = 8, 1_000_000
    logits = torch.randn(1, 1, V, generator=torch.Generator().manual_seed(3)) * 1.5
    logits[..., -1] = float("-inf")
    mask, masked = torch.ones(1, 1, dtype=torch.bool), torch.full((1, 1), V - 1)
    uniforms = torch.rand(1, N, 1, generator=torch.Generator().manual_seed(4))
    completions, kept = sample_completions(logits, masked, mask, uniforms, temperature, **options)
    count = torch.bincount(completions.flatten(), minlength=V).double()
    drawable = kept.flatten().nonzero().squeeze(1)
    logp = (
        stats(logits, logits, drawable.view(1, -1, 1), kept, mask, temperature)[0]
        .flatten()
        .double()
    )
    expected = logp.exp() * N
    assert count.sum() == count[drawable].sum() and abs(expected.sum() - N) < 1
    chi_square = ((count[drawable] - expected) ** 2 / expected).sum().item()
    freedom = len(drawable) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 10


def slow_xtc(q, threshold):
    """XTC in plain words on one blank's probabilities (no ties): what stays."""
    top = [v for v in range(len(q)) if q[v] >= threshold]
    return {v for v in range(len(q)) if q[v] > 0} - (
        set(top) - {min(top, key=lambda v: q[v])} if top else set()
    )


@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.3])
def test_xtc_equals_the_rule(threshold):
    logits = torch.randn(200, 9, generator=torch.Generator().manual_seed(1)) * 2
    weights = integer_weights(logits, 0.8)
    kept = keep(weights, top_p=0.9)
    have = exclude_top_choices(weights, kept, torch.rand(200, 4), threshold, 1.0)
    q = (weights * kept).double() / (weights * kept).sum(dim=-1, keepdim=True)
    assert [set(row.nonzero().flatten().tolist()) for row in have] == [
        slow_xtc(row, threshold) for row in q.tolist()
    ]
    assert (have != kept).any() and torch.equal(
        exclude_top_choices(weights, kept, torch.rand(200, 4), threshold, 0.0), kept
    )


@pytest.mark.parametrize("options", [{"top_p": 0.9, "min_p": 0.03}])
def test_xtc_draws_follow_the_exact_mixture(options):
    """Half a million inputs of one blank, two fills each: P(v) = (1 − probability) · q(v) + probability · q'(v), exactly, also of the second fill given the first."""
    V, N, probability, threshold = 8, 500_000, 0.4, 0.15
    logits = torch.tensor([1.2, 0.9, 0.5, 0.1, -0.2, -0.8, -1.5, float("-inf")])
    q = (
        restrict(log_softmax(logits, 0.8), keep(integer_weights(logits, 0.8), **options))
        .exp()
        .double()
    )
    dropped = torch.tensor([v in slow_xtc(q.tolist(), threshold) for v in range(V)]) * q
    joint = (1 - probability) * q[:, None] * q + probability * dropped[
        :, None
    ] * dropped / dropped.sum() ** 2  # (V,V) one coin for both fills
    uniforms = torch.rand(N, 2, 1, generator=torch.Generator().manual_seed(4))
    completions, kept = sample_completions(
        logits.expand(N, 1, V),
        torch.full((N, 1), V - 1),
        torch.ones(N, 1, dtype=torch.bool),
        uniforms,
        0.8,
        xtc_threshold=threshold,
        xtc_probability=probability,
        **options,
    )
    assert kept.gather(
        -1, completions.transpose(1, 2)
    ).all()  # what was drawn was kept: its log-probability is finite
    count = torch.bincount(
        completions[:, 0, 0] * V + completions[:, 1, 0], minlength=V * V
    ).double()
    expected = joint.flatten() * N
    assert count[expected == 0].sum() == 0
    chi_square = ((count - expected) ** 2 / expected)[expected > 0].sum().item()
    freedom = int((expected > 0).sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 10


def test_penalty_falls_on_visible_characters_alone():
    logits = torch.tensor(
        [[[2.0, -2.0, 1.0, -1.0, float("-inf")]] * 4], dtype=torch.float64, requires_grad=True
    )
    masked = torch.tensor([[0, 4, 1, -1]])  # 4 is the blank, -1 no character
    have = penalise(logits, masked, 1.25)
    assert have[0, 1].tolist() == [2 / 1.25, -2 * 1.25, 1.0, -1.0, float("-inf")]
    have[..., :4].sum().backward()
    assert logits.grad[0, 1].tolist() == [1 / 1.25, 1.25, 1.0, 1.0, 0.0]


def test_penalised_draws_follow_the_penalised_distribution():
    """Chi-square of a million draws against softmax of the rescaled logits, written out."""
    logits, masked, N = (
        torch.tensor([[[1.0, -0.5, 0.3, -1.0, float("-inf")]] * 3]),
        torch.tensor([[4, 0, 1]]),
        1_000_000,
    )
    draws, _ = sample_completions(
        penalise(logits, masked, 1.5)[:, :1],
        masked[:, :1],
        masked[:, :1] == 4,
        torch.rand(1, N, 1, generator=torch.Generator().manual_seed(0)),
        0.7,
    )
    weights = [math.exp(z / 0.7) for z in (1.0 / 1.5, -0.5 * 1.5, 0.3, -1.0)]
    expected = torch.tensor(weights, dtype=torch.float64) / sum(weights) * N
    chi_square = ((torch.bincount(draws.flatten(), minlength=4) - expected) ** 2 / expected).sum()
    assert chi_square < 3 + 5 * math.sqrt(6) + 10


def test_draw_is_the_inverse_of_the_cumulative_weights():
    weights = torch.tensor([[0, 2, 0, 1, 1, 0]])
    assert draw(weights, torch.tensor([[0.0, 0.49, 0.5, 0.74, 0.75, 0.999999]])).tolist() == [
        [1, 1, 3, 3, 4, 4]
    ]


def test_visible_characters_stay_and_completions_differ():
    logits = torch.zeros(2, 6, 5)
    masked = torch.arange(12).view(2, 6) % 5
    mask = torch.rand(2, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    completions, _ = sample_completions(
        logits, masked, mask, torch.rand(2, 7, 6, generator=torch.Generator().manual_seed(0))
    )
    assert (completions[:, :, :].transpose(1, 2)[~mask] == masked[~mask][:, None]).all()
    assert len({tuple(row) for row in completions[0].tolist()}) > 1


def test_extreme_logits():
    logits = torch.tensor(
        [[1e30, -1e30, 0.0], [-1e30, -1e30, -1e30], [float("-inf"), float("-inf"), 3.0]]
    )
    kept = keep(integer_weights(logits, 0.8), top_p=0.9, min_p=0.1)
    assert kept.tolist() == [[True, False, False], [True, True, True], [False, False, True]]
