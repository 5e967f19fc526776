"""Compare the advantages with those that plain loops compute.

Shapes: B masked inputs, G completions of each.
"""

from statistics import fmean, pstdev

import pytest
import torch
from conftest import numbers

from grpo.advantage import compute_advantages
from grpo.run.config import Config

BASELINES = pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
SCALES = pytest.mark.parametrize("scale", ["group", "batch", "none"])


def slow_advantages(reward, baseline, scale):
    """Compare each completion with its group: reward (B,G) -> (B,G)."""
    advantages = []
    for group in reward.tolist():
        deviation = {"group": group, "batch": reward.flatten().tolist()}
        divisor = pstdev(deviation[scale]) + 1e-4 if scale in deviation else 1
        for j, r in enumerate(group):
            others = group[:j] + group[j + 1 :]
            subtracted = {"mean": fmean(group), "leave_one_out": fmean(others)}
            advantages.append((r - subtracted[baseline]) / divisor)
    return torch.tensor(advantages, dtype=torch.float64).view(reward.shape)


@BASELINES
@SCALES
def test_advantages_equal_the_loops(baseline, scale):
    reward = numbers(2, 3, 4)  # (B,G)
    have = compute_advantages(reward, Config(baseline=baseline, scale_rewards=scale))
    want = slow_advantages(reward, baseline, scale)
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-12)


@BASELINES
@SCALES
def test_equal_rewards_give_exactly_zero(baseline, scale):
    config = Config(baseline=baseline, scale_rewards=scale)
    reward = torch.tensor([0.7, 0.7, 12345.678, 0.003])[:, None].expand(4, 4)
    reward = reward * (1 + torch.rand(4, 4) * 1e-7)  # rounding noise
    reward[1, 0] = 0.1
    reward[3, 0] = 0.0031
    zero = (compute_advantages(reward, config) == 0).all(dim=1)
    assert zero.tolist() == [True, False, True, False]
    tiny = torch.tensor([[0, 1e-7, -1e-7, 2e-7]])
    assert (compute_advantages(tiny, config)[0] != 0).all(), "the noise of tiny rewards is tinier"


def test_a_nan_is_not_taken_for_equal_rewards():
    """It reaches the loss and the metrics, which end the run."""
    reward = torch.tensor([[torch.nan, 1.0, 1.0]])
    assert compute_advantages(reward, Config()).isnan().any()


def test_without_a_baseline_a_group_of_correct_completions_teaches_them():
    """That's rejection sampling: a good completion is a label, whatever the rest of its group."""
    reward = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])  # (B,G)
    assert torch.equal(compute_advantages(reward, Config(baseline="none")), reward)
