"""Every form of the loss against loops over b, g, t written from the papers' formulas."""

import math

import pytest
import torch

from grpo.advantage import advantages
from grpo.loss import grpo_loss, loss_weights, most_uncertain, policy_loss

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


def slow_loss(
    logp,
    old,
    ref,
    kl,
    entropy,
    A,
    mask,
    loss_type,
    level,
    estimator,
    beta,
    coef,
    low,
    high,
    delta=math.inf,
    learning=None,
):
    total, blanks = 0.0, int(mask.sum())
    for b in range(B):
        length = int(mask[b].sum())
        for g in range(G):
            mean_difference = (
                sum(float(logp[b, g, t] - old[b, g, t]) for t in range(T) if mask[b, t]) / length
            )
            for t in range(T):
                if not mask[b, t]:
                    continue
                a = float(A[b, g, t if A.shape[2] > 1 else 0])
                ratio = math.exp(
                    mean_difference if level == "sequence" else float(logp[b, g, t] - old[b, g, t])
                )
                pg = (
                    -float(logp[b, g, t]) * a
                    if level == "none"
                    else -min(min(ratio, delta) * a, min(max(ratio, 1 - low), 1 + high) * a)
                )
                pg = 0.0 if learning is not None and not learning[b, t] else pg
                d = float(ref[b, g, t] - logp[b, g, t])
                penalty = {
                    "exact": float(kl[b, t]),
                    "k1": -d,
                    "k2": d * d / 2,
                    "k3": math.exp(d) - d - 1,
                }[estimator]
                value = pg + beta * penalty - coef * float(entropy[b, t])
                total += (
                    value
                    * {
                        "grpo": 1 / (B * G * length),
                        "dapo": 1 / (G * blanks),
                        "bnpo": 1 / (G * blanks),
                        "dr_grpo": 1 / (B * G * T),
                        "sum": 1 / (B * G),
                    }[loss_type]
                )
    return total


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "sum"])
@pytest.mark.parametrize("level", ["token", "sequence", "none"])
@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
def test_loss_equals_the_loops(loss_type, level, estimator):
    arguments = make()
    mask = arguments[-1]
    weights = loss_weights(mask, loss_type, G, inputs=B, blanks=mask.sum(), micro_batches=1)
    have, parts = grpo_loss(
        *arguments,
        weights,
        kl_beta=0.3,
        kl_estimator=estimator,
        entropy_coef=0.2,
        importance_sampling_level=level,
        clip_eps=0.1,
        clip_eps_high=0.3,
    )
    assert have.item() == pytest.approx(
        slow_loss(*arguments, loss_type, level, estimator, 0.3, 0.2, 0.1, 0.3), rel=1e-6
    )
    assert parts["loss"].item() == have.item()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "sum"])
@pytest.mark.parametrize("level", ["token", "sequence", "none"])
@pytest.mark.parametrize(
    "baseline, scale, per_blank",
    [
        ("mean", "group", False),
        ("leave_one_out", "none", False),
        ("mean", "batch", True),
        ("leave_one_out", "group", True),
    ],
)
def test_loss_with_every_extra_equals_the_loops(loss_type, level, baseline, scale, per_blank):
    """The form of the advantages, credit per blank, two-sided clip, and policy gradient on the most uncertain blanks alone."""
    logp, old, ref, kl, entropy, _, mask = make(1)
    old = old - 1.5 * mask[:, None]  # so that ratios beyond 2 occur
    rewards = torch.rand(
        B, G, T if per_blank else 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    A = advantages(rewards, baseline, scale, mask[:, None] if per_blank else None)
    learning = most_uncertain(entropy, mask, 0.5)
    weights = loss_weights(mask, loss_type, G, inputs=B, blanks=mask.sum(), micro_batches=1)
    have, _ = grpo_loss(
        logp,
        old,
        ref,
        kl,
        entropy,
        A,
        mask,
        weights,
        0.3,
        "exact",
        0.2,
        level,
        0.1,
        0.3,
        2.0,
        learning,
    )
    slow = slow_loss(
        logp,
        old,
        ref,
        kl,
        entropy,
        A,
        mask,
        loss_type,
        level,
        "exact",
        0.3,
        0.2,
        0.1,
        0.3,
        2.0,
        learning,
    )
    assert have.item() == pytest.approx(slow, rel=1e-6)


def published(
    logp, old, ref, A, mask, loss_type, level, beta, low, high, delta, blanks_of_step, steps
):
    """As TRL documents it: one row per completion, (B·G,T) tensors, KL by k3; `steps` micro-batches, of which this is one."""
    logp, old, ref = (x.flatten(0, 1) for x in (logp, old, ref))
    rows, A = mask.repeat_interleave(G, dim=0).double(), A.reshape(-1, 1)
    log_weight = logp - old
    if level == "sequence":
        log_weight = ((log_weight * rows).sum(-1) / rows.sum(-1)).unsqueeze(-1)
    unclipped = log_weight.exp()
    each = -torch.minimum(
        unclipped.clamp(max=delta) * A, unclipped.clamp(1 - low, 1 + high) * A
    ) + beta * ((ref - logp).exp() - (ref - logp) - 1)
    return {
        "grpo": ((each * rows).sum(-1) / rows.sum(-1)).mean() / steps,
        "bnpo": (each * rows).sum() / rows.sum() / steps,
        "dr_grpo": (each * rows).sum() / (len(rows) * T) / steps,
        "dapo": (each * rows).sum() / blanks_of_step,
    }[loss_type]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [math.inf, 1.5])
def test_loss_equals_the_published_formulas(loss_type, level, delta):
    """Two micro-batches with different numbers of blanks."""
    steps = [make(5), make(6)]
    blanks = sum(int(x[-1].sum()) for x in steps)
    for logp, old, ref, kl, entropy, A, mask in steps:
        weights = loss_weights(mask, loss_type, G, inputs=2 * B, blanks=blanks, micro_batches=2)
        have, _ = grpo_loss(
            logp,
            old,
            ref,
            kl,
            entropy,
            A,
            mask,
            weights,
            0.3,
            "k3",
            0.0,
            level,
            0.1,
            0.3,
            0.0 if delta == math.inf else delta,
        )
        assert have.item() == pytest.approx(
            published(
                logp, old, ref, A, mask, loss_type, level, 0.3, 0.1, 0.3, delta, blanks * G, 2
            ).item(),
            rel=1e-6,
        )


def test_most_uncertain_blanks():
    entropy, mask = (
        torch.tensor([[5.0, 1.0, 2.0], [9.0, 3.0, 4.0]]),
        torch.tensor([[True, True, True], [False, True, True]]),
    )
    assert most_uncertain(entropy, mask, 0.4).tolist() == [
        [True, False, False],
        [False, False, True],
    ]  # the visible 9.0 does not count
    assert torch.equal(most_uncertain(entropy, mask, 1.0), mask)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "sum"])
def test_micro_batches_add_up(loss_type):
    """Unequal numbers of blanks in the two halves: their losses still add up to the whole's (bnpo: to the mean of theirs)."""
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < torch.tensor(
        [[0.2], [0.3], [0.9], [0.8]]
    )
    mask[:, 0] = True
    whole = loss_weights(mask, loss_type, G, inputs=4, blanks=mask.sum(), micro_batches=1)
    halves = torch.cat(
        [
            loss_weights(half, loss_type, G, inputs=4, blanks=mask.sum(), micro_batches=2)
            for half in mask.chunk(2)
        ]
    )
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


def test_two_sided_clip_stops_large_ratios_of_bad_completions():
    logp = torch.log(torch.tensor([2.0, 5.0, 5.0])).view(1, 3, 1).requires_grad_()
    A = torch.tensor([-1.0, -1.0, 1.0]).view(1, 3, 1)
    losses, stopped = policy_loss(
        logp, torch.zeros(1, 3, 1), A, torch.ones(1, 1, dtype=torch.bool), clip_delta=4.0
    )
    losses.sum().backward()
    torch.testing.assert_close(losses.flatten().detach(), torch.tensor([2.0, 4.0, -1.2]))
    assert stopped.flatten().tolist() == [False, True, True] and ((logp.grad == 0) == stopped).all()


def slow_advantages(rewards, baseline, scale):
    everything = [float(r) for row in rewards for r in row]
    mean = sum(everything) / len(everything)
    batch_std = math.sqrt(sum((r - mean) ** 2 for r in everything) / len(everything))
    out = []
    for row in rewards.tolist():
        m = sum(row) / G
        std = math.sqrt(sum((r - m) ** 2 for r in row) / G)
        divisor = {"group": std + 1e-4, "batch": batch_std + 1e-4, "none": 1.0}[scale]
        out.append(
            [(r - (m if baseline == "mean" else (sum(row) - r) / (G - 1))) / divisor for r in row]
        )
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_equal_the_loops(baseline, scale):
    rewards = torch.rand(B, G, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(
        advantages(rewards, baseline, scale),
        slow_advantages(rewards, baseline, scale),
        rtol=1e-6,
        atol=1e-9,
    )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(scale):
    rewards = torch.full((2, G), 0.7) + torch.rand(2, G) * 1e-7  # rounding noise
    rewards[1, 0] = 0.1
    A = advantages(rewards, "mean", scale)
    assert (A[0] == 0).all() and (A[1] != 0).all()
