"""Compare the metrics of a step with loops. Shapes: B inputs, T characters, G completions."""

import math
from collections import defaultdict
from statistics import fmean, pstdev

import pytest
import torch
from conftest import BLANK, encode, make_batch

from data.rules import WordRule
from grpo.metrics import Rollout, UpdateMetrics, rollout_metrics, to_floats
from grpo.policy import LogProbs, Sample

B, G, T = 4, 3, 5
UPDATES = [[[0, 1], [2]], [[3, 0], [1, 2]]]  # the first takes three inputs, the second all four
FIGURES = ("loss", "pg_loss", "kl_penalty", "clip_ratio")


def some(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_metrics_of_updates_are_means_over_all_blanks_and_losses_over_updates():
    """The loop goes over all draws of all updates. `clip_ratio` is a mean over blanks, too."""
    mask = some(0, B, T) < 0.3  # (B,T)
    at = mask[:, None]
    old, *now = (
        LogProbs(*2 * [at * some(seed, B, G, T)], *2 * [mask * some(seed, B, T)])
        for seed in (1, 2, 3)
    )
    norms, of_step, values = [0.5, 2.0], UpdateMetrics(), defaultdict(list)
    for k, update in enumerate(UPDATES):
        losses = defaultdict(float)
        for rows in update:
            figures = dict(zip(FIGURES, some(4 + rows[0], 4)))
            of_step.add(now[k][rows], old[rows], figures, mask[rows])
            for name, x in figures.items():
                losses[name] += x.item()
            for b, t in mask.nonzero().tolist():
                for j in range(G) if b in rows else []:
                    moved = (now[k].logp[b, j, t] - old.logp[b, j, t]).item()
                    values["entropy"].append(now[k].entropy[b, t].item())
                    values["mean_log_prob"].append(now[k].logp[b, j, t].item())
                    values["mean_kl"].append(now[k].kl[b, t].item())
                    values["approx_kl"].append(math.exp(moved) - 1 - moved)
        of_step.end_update(torch.tensor(norms[k]))
        for name in FIGURES:
            values[name].append(losses[name])
    want = {name: fmean(numbers) for name, numbers in values.items()} | {"grad_norm": fmean(norms)}
    blanks = len(values["entropy"]) / G
    want["clip_ratio"] = sum(values["clip_ratio"]) / blanks
    assert to_floats(of_step.result()) == pytest.approx(want, rel=1e-5)


FILLED = [["cat"] * 3 + ["xat"] * 10 + ["xxx"] * 3, ["cat"] + ["cut"] * 15]  # (2,16)


def test_metrics_of_a_rollout_are_those_of_the_loops():
    completions = encode(*(f"so {word} so" for group in FILLED for word in group)).view(2, 16, -1)
    masked = encode("so ___ so", "so ___ so")
    batch = make_batch(masked, masked == BLANK, BLANK, 16, (0,))
    reward, scores, advantages = some(0, 3, 2, 16)  # each (2,16)
    reward[1] = 0.3 + 1e-8 * reward[1]  # equal but for rounding
    rollout = Rollout(batch, Sample(completions), None, reward, {"judge": scores}, advantages)

    groups, each = reward.tolist(), [word for group in FILLED for word in group]
    accepted = (scores > 0).flatten().tolist()
    want = {
        "reward_judge": scores.mean().item(),
        "mean_reward": fmean(sum(groups, [])),
        "std_reward": fmean(map(pstdev, groups)),
        "frac_reward_zero_std": 1 / 2,
        "different_completions": fmean([3, 2]),
        "mean_advantage": fmean(sum(advantages.tolist(), [])),
        "valid": each.count("cat") / 32,
        "accepts": fmean(accepted),
        "fooled": fmean(yes for yes, word in zip(accepted, each) if word != "cat"),
    }
    have = to_floats(rollout_metrics(rollout, WordRule("so a cat")))
    assert have == pytest.approx(want, rel=1e-6)
    assert [*have] == [*want], "a cause comes before its effect"
    assert want.keys() - rollout_metrics(rollout, None).keys() == {"valid", "fooled"}
