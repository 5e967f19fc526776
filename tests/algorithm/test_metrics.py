"""Compare the metrics of a step with loops. Shapes: G = 16 completions of each of two inputs."""

from statistics import pstdev

import pytest
import torch
from conftest import BLANK, encode, make_batch, numbers

from data.rules import WordRule
from grpo.metrics import Rollout, rollout_metrics, to_floats, update_metrics
from grpo.policy import Sample


def test_metrics_of_updates_are_means_over_all_blanks_and_losses_over_updates():
    """Two updates had two micro-batches each, and one of those had no blank."""
    names = ("entropy", "mean_log_prob", "mean_kl", "approx_kl", "clip_ratio", "loss")
    blanks, sums = torch.tensor([5, 0, 7, 2]), numbers(0, 4, 6)
    figures = [{"blanks": n, **dict(zip(names, row))} for n, row in zip(blanks, sums)]
    want = {"grad_norm": 1.5}
    for name, total in zip(names, sums.sum(dim=0).tolist()):
        want[name] = total / (2 if name == "loss" else 14)
    have = to_floats(update_metrics(figures, [torch.tensor(1.0), torch.tensor(2.0)]))
    assert have == pytest.approx(want, rel=1e-5)


def test_metrics_of_a_rollout_are_those_of_the_loops():
    words = [["cat"] * 3 + ["xat"] * 10 + ["xxx"] * 3, ["cat"] + ["cut"] * 15]  # (2,16)
    completions = encode(*(f"so {word} so" for word in sum(words, []))).view(2, 16, -1)
    masked = encode("so ___ so", "so ___ so")
    batch = make_batch(masked, masked == BLANK, BLANK, 16, (0,))
    reward, scores, advantages = numbers(0, 3, 2, 16)  # each (2,16)
    reward[1] = 0.3 + 1e-8 * reward[1]  # equal but for rounding
    rollout = Rollout(batch, Sample(completions), None, reward, {"judge": scores}, advantages)
    wrong = torch.tensor([[word != "cat" for word in group] for group in words])
    want = {
        "reward_judge": scores.mean().item(),
        "mean_reward": reward.mean().item(),
        "std_reward": pstdev(reward[0].tolist()) / 2,
        "frac_reward_zero_std": 1 / 2,
        "different_completions": (3 + 2) / 2,
        "mean_advantage": advantages.mean().item(),
        "valid": 4 / 32,
        "accepts": (scores > 0).double().mean().item(),
        "fooled": (scores[wrong] > 0).double().mean().item(),
    }
    have = to_floats(rollout_metrics(rollout, WordRule("so a cat")))
    for name, number in want.items():
        assert have[name] == pytest.approx(number, rel=1e-6), name
    assert [name for name in have if name in want] == [*want], "a cause comes before its effect"
    assert want.keys() - rollout_metrics(rollout, None).keys() == {"valid", "fooled"}
