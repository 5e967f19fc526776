"""Compare the metrics of a step with loops. Shapes: B inputs, T characters, G completions."""

import math
import statistics
from collections import defaultdict

import pytest
import torch
from conftest import BLANK, encode, make_batch

from data.rules import WordRule
from grpo.metrics import Rollout, UpdateMetrics, rollout_metrics
from grpo.policy import LogProbs, Sample

B, G, T = 4, 3, 5
UPDATES = [[[0, 1], [2]], [[3, 0], [1, 2]]]  # the first takes three inputs, the second all four


def random_step():
    """Draw random tensors to compute metrics from. LogProbs of visible characters are 0."""
    g = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    mask = torch.rand(B, T, generator=g) < 0.6  # (B,T)
    reward, part = some(B, G, T), some(B, G, T)
    reward[1] = 0.3 + 1e-8 * some(G, T)  # equal but for rounding
    draws = mask[:, None]
    old, *now = (LogProbs(*2 * [draws * some(B, G, T)], *2 * [mask * some(B, T)]) for _ in range(3))
    names = ("loss", "pg_loss", "kl_penalty")
    losses = [[dict(zip(names, some(3))) for _ in (0, 1)] for _ in (0, 1)]
    bounded = draws & (some(2, B, G, T) > 0)
    return mask, reward, part, old, now, losses, bounded


def slow_metrics(mask, reward, part, old, now, losses, bounded, norms):
    """Average over all draws of all updates, and losses over the updates."""
    groups, judged = (
        [[x[b, j][mask[b]].mean().item() for j in range(G)] for b in range(B)]
        for x in (reward, part)
    )
    draws = [(b, j, t) for b, t in mask.nonzero().tolist() for j in range(G)]
    values = defaultdict(list)
    for k, update in enumerate(UPDATES):
        for b, j, t in draws:
            if b in sum(update, []):
                moved = (now[k].logp[b, j, t] - old.logp[b, j, t]).item()
                values["mean_kl"].append(now[k].kl[b, t].item())
                values["entropy"].append(now[k].entropy[b, t].item())
                values["mean_log_prob"].append(now[k].logp[b, j, t].item())
                values["approx_kl"].append(math.exp(moved) - 1 - moved)
                values["clip_ratio"].append(float(bounded[k][b, j, t]))
        for name in ("loss", "pg_loss", "kl_penalty"):
            values[name].append(sum(each[name].item() for each in losses[k]))
    return {name: statistics.mean(figures) for name, figures in values.items()} | {
        "grad_norm": statistics.mean(norms),
        "mean_reward": statistics.mean(sum(groups, [])),
        "std_reward": statistics.mean(map(statistics.pstdev, groups)),
        "frac_reward_zero_std": 1 / B,
        "reward_judge": statistics.mean(sum(judged, [])),
    }


def test_metrics_are_means_over_all_blanks_and_losses_over_updates():
    mask, reward, part, old, now, losses, bounded = random_step()
    norms = [0.5, 2.0]
    batch = make_batch(torch.zeros(B, T).long(), mask, BLANK, G, (0,))
    sample = Sample(torch.zeros(B, G, T).long())
    drawn = rollout_metrics(Rollout(batch, sample, old, reward, {"judge": part}, reward), None)
    of_step = UpdateMetrics()
    for k, update in enumerate(UPDATES):
        for rows, each in zip(update, losses[k]):
            of_step.add(now[k][rows], old[rows], each, bounded[k][rows], mask[rows])
        of_step.end_update(torch.tensor(norms[k]))
    have = drawn | of_step.result()
    assert [*have].index("reward_judge") < [*have].index("mean_reward")  # a cause before its effect
    want = slow_metrics(mask, reward, part, old, now, losses, bounded, norms)
    assert [have.pop(name) for name in ("different_completions", "accepts", "mean_advantage")][
        0
    ] == 1
    assert have == pytest.approx(want, rel=1e-5)


class ShortWords(WordRule):
    """Take only words of two or three of these letters for good ones."""

    name = "short_words"

    def __init__(self):
        super().__init__("cat on")


def test_the_metrics_of_fills_come_from_the_rule():
    """The share is that of all gaps of the step, and not a mean of shares of inputs."""
    mask = encode("so ___ on so", "so ___ __ so") == BLANK
    sample = encode("so cat on so", "so xxx on so", "so xxx on so", "so xxx xx so").view(2, 2, -1)
    batch = make_batch(encode(*["so cat on so"] * 2), mask, BLANK, 2, (0,))
    advantages = torch.arange(48).view(2, 2, 12).float()  # (B,G,T)
    rollout = Rollout(batch, Sample(sample), None, advantages, {}, advantages)
    have = rollout_metrics(rollout, ShortWords())
    assert have["short_words"] == pytest.approx((1 + 0 + 1 + 0) / (2 + 4))
    assert have["different_completions"] == 2
    at_blanks = [advantages[b, g, t].item() for b, t in mask.nonzero().tolist() for g in range(2)]
    assert have["mean_advantage"] == pytest.approx(sum(at_blanks) / len(at_blanks))
