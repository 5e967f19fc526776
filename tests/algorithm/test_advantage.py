"""Compare the advantages with those that plain loops compute.

Shapes: B masked inputs, T characters, G completions of each.
"""

import math

import pytest
import torch

from grpo.advantage import compute_advantages
from grpo.run.config import Config

B, G, T = 3, 4, 5


def slow_advantages(reward, mask, baseline, scale):
    """Compare each blank with its group, one blank at a time; visible characters get 0."""
    blanks = mask.nonzero().tolist()
    every = [r for b, t in blanks for r in reward[b, :, t].tolist()]
    mean = sum(every) / len(every)
    batch_std = math.sqrt(sum((r - mean) ** 2 for r in every) / len(every))
    advantages = torch.zeros_like(reward)
    for b, t in blanks:
        row = reward[b, :, t].tolist()
        m = sum(row) / G
        std = math.sqrt(sum((r - m) ** 2 for r in row) / G)
        divisor = {"group": std + 1e-4, "batch": batch_std + 1e-4, "none": 1.0}[scale]
        others = [(sum(row) - r) / (G - 1) for r in row]
        subtracted = {"mean": [m] * G, "leave_one_out": others, "none": [0.0] * G}[baseline]
        found = [(r - b) / divisor for r, b in zip(row, subtracted)]
        advantages[b, :, t] = torch.tensor(found, dtype=reward.dtype)
    return advantages


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_the_loops(baseline, scale):
    """Visible characters have rewards here, but these do not change the blanks' advantages."""
    g = torch.Generator().manual_seed(2)
    reward = torch.rand(B, G, T, generator=g, dtype=torch.float64)
    mask = torch.rand(B, T, generator=g) < 0.6  # (B,T)
    config = Config(baseline=baseline, scale_rewards=scale)
    have = compute_advantages(reward, None, mask, config) * mask[:, None]
    want = slow_advantages(reward, mask, baseline, scale)
    torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    reward = torch.tensor([0.7, 0.7, 12345.678, 0.003]).view(4, 1, 1).expand(4, G, 1)
    reward = reward * (1 + torch.rand(4, G, 1) * 1e-7)  # rounding noise
    reward[1, 0] = 0.1
    reward[3, 0] = 0.0031
    mask = torch.ones(4, 1).bool()
    A = compute_advantages(reward, None, mask, Config(scale_rewards=scale))
    assert (A[[0, 2]] == 0).all(), "advantages of rounding noise"
    assert (A[[1, 3]] != 0).all(), "advantages of different rewards"
    tiny = torch.tensor([[0, 1e-7, -1e-7, 2e-7], [0, 0, 0, 0]])[..., None]
    A = compute_advantages(tiny, None, mask[:2], Config(scale_rewards=scale))
    assert (A[0] != 0).all() and (A[1:] == 0).all(), "of tiny rewards, whose noise is tinier"


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
def test_a_nan_is_not_taken_for_equal_rewards(baseline):
    """It reaches the loss and the metrics, which end the run."""
    reward = torch.ones(1, G, 1)
    reward[0, 0] = torch.nan
    A = compute_advantages(reward, None, torch.ones(1, 1).bool(), Config(baseline=baseline))
    assert A.isnan().any()


def test_without_a_baseline_a_group_of_correct_completions_teaches_them():
    """That's rejection sampling: a good completion is a label, whatever the rest of its group."""
    reward = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]).view(2, 3, 1)  # (B,G,T)
    mask = torch.ones(2, 1).bool()
    A = compute_advantages(reward, None, mask, Config(baseline="none"))
    assert torch.equal(A, reward)


@pytest.mark.parametrize(
    "share, learns",
    [
        (0.4, [[0, 1, 1, 0], [1, 0, 0, 0]]),  # two of five blanks, and one more by a tie
        (0.2, [[0, 1, 0, 0], [0, 0, 0, 0]]),
        (1.0, [[1, 1, 1, 0], [1, 1, 0, 0]]),
    ],
)
def test_only_the_most_uncertain_blanks_learn(share, learns):
    """Only blanks count. The entropy of a visible character is ignored, however large it is."""
    entropy = torch.tensor([[0.1, 0.9, 0.5, 9.0], [0.5, 0.2, 9.0, 9.0]])  # (B,T)
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    reward = torch.arange(G)[None, :, None].expand(2, G, 4).float()
    config = Config(top_entropy_quantile=share)
    have = compute_advantages(reward, entropy, mask, config) * mask[:, None]
    whole = compute_advantages(reward, entropy, mask, config)
    assert torch.equal(have, whole * torch.tensor(learns)[:, None])
