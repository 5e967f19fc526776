"""Compare the advantages with those that plain loops compute.

Shapes: B masked inputs, T characters, G completions of each.
"""

import math

import pytest
import torch
from conftest import make_batch

from grpo.advantage import compute_advantages, group_advantages
from grpo.plumbing.config import Config
from grpo.policy import Scores
from grpo.variants.advantages import forward

B, G, T = 3, 4, 5


def batch_of(mask):
    return make_batch(torch.zeros_like(mask).long(), mask, 0, 1, (0,))


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
        others = {"mean": [m] * G, "leave_one_out": [(sum(row) - r) / (G - 1) for r in row]}
        found = [(r - b) / divisor for r, b in zip(row, others[baseline])]
        advantages[b, :, t] = torch.tensor(found, dtype=reward.dtype)
    return advantages


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_the_loops(baseline, scale):
    """Visible characters have rewards here, but these do not change the blanks' advantages."""
    g = torch.Generator().manual_seed(2)
    reward = torch.rand(B, G, T, generator=g, dtype=torch.float64)
    mask = torch.rand(B, T, generator=g) < 0.6  # (B,T)
    config = Config(baseline=baseline, scale_rewards=scale)
    have = group_advantages(reward, None, batch_of(mask), config) * mask[:, None]
    want = slow_advantages(reward, mask, baseline, scale)
    torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    reward = torch.full((2, G, 1), 0.7) + torch.rand(2, G, 1) * 1e-7  # rounding noise
    reward[1, 0] = 0.1
    batch = batch_of(torch.ones(2, 1).bool())
    A = group_advantages(reward, None, batch, Config(scale_rewards=scale))
    assert (A[0] == 0).all(), "advantages of rounding noise"
    assert (A[1] != 0).all(), "advantages of different rewards"


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
    old = Scores(None, None, None, entropy)
    config = Config(top_entropy_quantile=share)
    have = compute_advantages(reward, old, batch_of(mask), config) * mask[:, None]
    whole = group_advantages(reward, old, batch_of(mask), config)
    assert torch.equal(have, whole * torch.tensor(learns)[:, None])


def test_forward_advantages_weigh_each_fill_by_how_likely_the_goal_writes_it():
    """A group has each of three words of two letters as often as q draws it, 3, 2 and 1 times.

    So the weights of a word's copies add up to q_ref(y) · exp(r(y)), normalised over the words.
    """
    q, q_ref, r = [3 / 6, 2 / 6, 1 / 6], [0.2, 0.2, 0.6], [1.0, -2.0, 0.5]
    goal = [p * math.exp(x) for p, x in zip(q_ref, r)]
    drawn = [0, 0, 0, 1, 1, 2]  # (G,)
    batch = batch_of(torch.tensor([[False, True, True, False]]))

    def letters(values, spread):
        """Give the letters of each drawn word these values: -> (1,G,T)."""
        rows = [[0, spread * values[y], (1 - spread) * values[y], 9.0] for y in drawn]
        return torch.tensor([rows], dtype=torch.float64)

    logp, ref_logp = (letters([math.log(p) for p in each], 0.3) for each in (q, q_ref))
    logp[..., 3] = ref_logp[..., 3] = 0  # visible text
    reward = letters(r, 0.5) * 2  # the same at both letters
    A = forward(reward, Scores(logp, ref_logp, None, None), batch, Config())
    weights = (A + 1) / len(drawn)
    for y, copies in enumerate([slice(0, 3), slice(3, 5), slice(5, 6)]):
        share = goal[y] / sum(goal)
        assert weights[0, copies, 1].sum().item() == pytest.approx(share)
        assert weights[0, copies, 2].sum().item() == pytest.approx(share)
    assert (A[..., [0, 3]] == 0).all()
