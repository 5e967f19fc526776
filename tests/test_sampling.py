import math

import pytest
import torch

from grpo.sampling import draw, integer_weights, keep, sample_completions


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


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8, "min_p": 0.05}, {"top_k": 1}, {"top_p": 1e-6}])
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
    logp = stats(logits, logits, drawable.view(1, -1, 1), kept, mask, temperature)[0].flatten().double()
    expected = logp.exp() * N
    assert count.sum() == count[drawable].sum() and abs(expected.sum() - N) < 1
    chi_square = ((count[drawable] - expected) ** 2 / expected).sum().item()
    freedom = len(drawable) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom) + 10


def test_draw_is_the_inverse_of_the_cumulative_weights():
    weights = torch.tensor([[0, 2, 0, 1, 1, 0]])
    assert draw(weights, torch.tensor([[0.0, 0.49, 0.5, 0.74, 0.75, 0.999999]])).tolist() == [[1, 1, 3, 3, 4, 4]]


def test_visible_characters_stay_and_completions_differ():
    logits = torch.zeros(2, 6, 5)
    masked = torch.arange(12).view(2, 6) % 5
    mask = torch.rand(2, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    completions, _ = sample_completions(logits, masked, mask, torch.rand(2, 7, 6, generator=torch.Generator().manual_seed(0)))
    assert (completions[:, :, :].transpose(1, 2)[~mask] == masked[~mask][:, None]).all()
    assert len({tuple(row) for row in completions[0].tolist()}) > 1


def test_extreme_logits():
    logits = torch.tensor([[1e30, -1e30, 0.0], [-1e30, -1e30, -1e30], [float("-inf"), float("-inf"), 3.0]])
    kept = keep(integer_weights(logits, 0.8), top_p=0.9, min_p=0.1)
    assert kept.tolist() == [[True, False, False], [True, True, True], [False, False, True]]
