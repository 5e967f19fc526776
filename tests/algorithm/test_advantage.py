"""Advantages against loops. Letters: B masked inputs, T characters, G completions of each."""

import math

import pytest
import torch

from grpo.advantage import group_advantages
from grpo.plumbing.config import Config

B, G, T = 3, 4, 5


def slow_advantages(rewards, baseline, scale):
    everything = rewards.flatten().tolist()
    mean = sum(everything) / len(everything)
    batch_std = math.sqrt(sum((r - mean) ** 2 for r in everything) / len(everything))
    rows = []
    for row in rewards.tolist():
        m = sum(row) / G
        std = math.sqrt(sum((r - m) ** 2 for r in row) / G)
        divisor = {"group": std + 1e-4, "batch": batch_std + 1e-4, "none": 1.0}[scale]
        others = {"mean": [m] * G, "leave_one_out": [(sum(row) - r) / (G - 1) for r in row]}
        rows.append([(r - b) / divisor for r, b in zip(row, others[baseline])])
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_the_loops(baseline, scale):
    g = torch.Generator().manual_seed(2)
    rewards = torch.rand(B, G, generator=g, dtype=torch.float64)
    config = Config(baseline=baseline, scale_rewards=scale, credit="input")
    mask = torch.arange(T) < torch.tensor([[1], [3], [5]])  # (B,T) however many blanks: one reward
    have = group_advantages(rewards[..., None], mask, config).squeeze(-1)
    want = slow_advantages(rewards, baseline, scale)
    torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-9)


def test_visible_characters_do_not_count_in_the_scale_of_the_step():
    """credit=run: the standard deviation is that of the blanks alone."""
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(1)) < 0.6
    g = torch.Generator().manual_seed(2)
    rewards = torch.rand(B, G, T, generator=g, dtype=torch.float64)
    config = Config(baseline="mean", scale_rewards="batch", credit="run")
    have = group_advantages(rewards, mask, config)
    of_blanks = rewards[mask[:, None].expand_as(rewards)]
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    want = centred / (of_blanks.std(correction=0) + 1e-4)
    torch.testing.assert_close(have, want)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    rewards = torch.full((2, G, 1), 0.7) + torch.rand(2, G, 1) * 1e-7  # rounding noise
    rewards[1, 0] = 0.1
    config = Config(baseline="mean", scale_rewards=scale, credit="input")
    A = group_advantages(rewards, None, config)
    assert (A[0] == 0).all()
    assert (A[1] != 0).all()
