"""Every form of the loss against loops over b, g, t written from the papers' formulas."""
import math

import pytest
import torch

from grpo.advantage import advantages
from grpo.loss import grpo_loss, loss_weights, policy_loss

B, G, T = 3, 4, 5


def make(seed=0):
    g = torch.Generator().manual_seed(seed)
    logp, old, ref = (-2 * torch.rand(B, G, T, generator=g, dtype=torch.float64) for _ in range(3))
    kl, entropy = (torch.rand(B, T, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(B, T, generator=g) < 0.6
    mask[:, 0] = True
    blank = mask[:, None]
    advantage = torch.randn(B, G, 1, generator=g, dtype=torch.float64)
    return logp * blank, old * blank, ref * blank, kl * mask, entropy * mask, advantage, mask


def slow_loss(logp, old, ref, kl, entropy, A, mask, loss_type, level, estimator, beta, coef, low, high):
    total, blanks = 0.0, int(mask.sum())
    for b in range(B):
        length = int(mask[b].sum())
        for g in range(G):
            mean_difference = sum(float(logp[b, g, t] - old[b, g, t]) for t in range(T) if mask[b, t]) / length
            for t in range(T):
                if not mask[b, t]:
                    continue
                a = float(A[b, g, 0])
                ratio = math.exp(mean_difference if level == "sequence" else float(logp[b, g, t] - old[b, g, t]))
                pg = -float(logp[b, g, t]) * a if level == "none" else -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
                d = float(ref[b, g, t] - logp[b, g, t])
                penalty = {"exact": float(kl[b, t]), "k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[estimator]
                value = pg + beta * penalty - coef * float(entropy[b, t])
                total += value * {"grpo": 1 / (B * G * length), "dapo": 1 / (G * blanks), "bnpo": 1 / (G * blanks),
                                  "dr_grpo": 1 / (B * G * T), "sum": 1 / (B * G)}[loss_type]
    return total


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "sum"])
@pytest.mark.parametrize("level", ["token", "sequence", "none"])
@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
def test_loss_equals_the_loops(loss_type, level, estimator):
    arguments = make()
    mask = arguments[-1]
    weights = loss_weights(mask, loss_type, G, inputs=B, blanks=mask.sum(), micro_batches=1)
    have, parts = grpo_loss(*arguments, weights, kl_beta=0.3, kl_estimator=estimator, entropy_coef=0.2, importance_sampling_level=level, clip_eps=0.1, clip_eps_high=0.3)
    assert have.item() == pytest.approx(slow_loss(*arguments, loss_type, level, estimator, 0.3, 0.2, 0.1, 0.3), rel=1e-6)
    assert parts["loss"].item() == have.item()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "sum"])
def test_micro_batches_add_up(loss_type):
    """Unequal numbers of blanks in the two halves: their losses still add up to the whole's (bnpo: to the mean of theirs)."""
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < torch.tensor([[0.2], [0.3], [0.9], [0.8]])
    mask[:, 0] = True
    whole = loss_weights(mask, loss_type, G, inputs=4, blanks=mask.sum(), micro_batches=1)
    halves = torch.cat([loss_weights(half, loss_type, G, inputs=4, blanks=mask.sum(), micro_batches=2) for half in mask.chunk(2)])
    if loss_type == "bnpo":
        whole = torch.cat([half.float() / half.sum() / (2 * G) for half in mask.chunk(2)])
    torch.testing.assert_close(halves, whole)


def test_clip_stops_the_gradient_only_where_it_must():
    """Ratio 2 with A > 0 and ratio 0.5 with A < 0 are stopped; the other two go on."""
    logp = torch.log(torch.tensor([2.0, 2.0, 0.5, 0.5])).view(1, 4, 1).requires_grad_()
    A = torch.tensor([1.0, -1.0, 1.0, -1.0]).view(1, 4, 1)
    losses, stopped = policy_loss(logp, torch.zeros(1, 4, 1), A, torch.ones(1, 1, dtype=torch.bool))
    losses.sum().backward()
    assert stopped.flatten().tolist() == [True, False, False, True]
    assert ((logp.grad == 0) == stopped).all()


def slow_advantages(rewards, baseline, scale):
    everything = [float(r) for row in rewards for r in row]
    mean = sum(everything) / len(everything)
    batch_std = math.sqrt(sum((r - mean) ** 2 for r in everything) / len(everything))
    out = []
    for row in rewards.tolist():
        m = sum(row) / G
        std = math.sqrt(sum((r - m) ** 2 for r in row) / G)
        divisor = {"group": std + 1e-4, "batch": batch_std + 1e-4, "none": 1.0}[scale]
        out.append([(r - (m if baseline == "mean" else (sum(row) - r) / (G - 1))) / divisor for r in row])
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_the_loops(baseline, scale):
    rewards = torch.rand(B, G, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(advantages(rewards, baseline, scale), slow_advantages(rewards, baseline, scale), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    rewards = torch.full((2, G), 0.7) + torch.rand(2, G) * 1e-7  # rounding noise
    rewards[1, 0] = 0.1
    A = advantages(rewards, "mean", scale)
    assert (A[0] == 0).all() and (A[1] != 0).all()
