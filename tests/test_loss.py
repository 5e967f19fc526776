"""Every form of the loss against loops over b, g, t written from the papers' formulas.

Letters: B masked inputs, T characters, G completions of each.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from grpo.advantage import group_advantages
from grpo.loss import (
    Totals,
    count,
    grpo_loss,
    kl_weight,
    loss_weights,
    most_uncertain,
    policy_loss,
)
from grpo.plumbing.config import Config
from grpo.stats import Stats

B, G, T = 3, 4, 5
BETA = 0.3
LOSS_TYPES = ["grpo", "dapo", "bnpo", "dr_grpo", "sum"]
ONE_BLANK = torch.ones(1, 1, dtype=torch.bool)  # (1,1)


def settings(**changes):
    """What the loss reads, none of it at its default."""
    own = {"clip_eps": 0.1, "clip_eps_high": 0.3, "entropy_coef": 0.2}
    return Config(**(own | changes))


def case(seed=0):
    """-> what the policy says now, and the micro-batch that it says it of."""
    g = torch.Generator().manual_seed(seed)
    logp = -2 * torch.rand(B, G, T, generator=g, dtype=torch.float64)  # (B,G,T)
    old_logp = -2 * torch.rand(B, G, T, generator=g, dtype=torch.float64)  # (B,G,T)
    ref_logp = -2 * torch.rand(B, G, T, generator=g, dtype=torch.float64)  # (B,G,T)
    kl = torch.rand(B, T, generator=g, dtype=torch.float64)  # (B,T)
    entropy = torch.rand(B, T, generator=g, dtype=torch.float64)  # (B,T)
    mask = torch.rand(B, T, generator=g) < 0.6  # (B,T)
    mask[:, 0] = True
    blank = mask[:, None]  # (B,1,T)
    now = Stats(logp * blank, ref_logp * blank, kl * mask, entropy * mask)
    advantages = torch.randn(B, G, 1, generator=g, dtype=torch.float64)  # (B,G,1)
    batch = SimpleNamespace(
        mask=mask, old_logp=old_logp * blank, advantages=advantages, learning=mask
    )
    return now, batch


def slow_policy_loss(logp, log_ratio, advantage, config):
    """Of one character."""
    if config.importance_sampling_level == "none":
        return -logp * advantage
    ratio = math.exp(log_ratio)
    bounded = min(ratio, config.clip_delta or math.inf)
    clipped = min(max(ratio, 1 - config.clip_eps), 1 + config.clip_eps_high)
    return -min(bounded * advantage, clipped * advantage)


def slow_kl(d, exact, estimator):
    """Of one character, d = log r - log q."""
    values = {"exact": exact, "k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}
    return values[estimator]


def slow_loss(now, batch, loss_type, config):
    total = 0.0
    blanks = int(batch.mask.sum())
    for b in range(B):
        length = int(batch.mask[b].sum())
        weight = {
            "grpo": 1 / (B * G * length),
            "dapo": 1 / (G * blanks),
            "bnpo": 1 / (G * blanks),
            "dr_grpo": 1 / (B * G * T),
            "sum": 1 / (B * G),
        }[loss_type]
        for g in range(G):
            difference = (now.logp - batch.old_logp)[b, g].tolist()
            mean = sum(difference[t] for t in range(T) if batch.mask[b, t]) / length
            for t in range(T):
                if not batch.mask[b, t]:
                    continue
                advantage = batch.advantages[b, g].expand(T)[t].item()
                log_ratio = difference[t]
                if config.importance_sampling_level == "sequence":
                    log_ratio = mean
                logp = now.logp[b, g, t].item()
                value = 0.0
                if batch.learning[b, t]:
                    value = slow_policy_loss(logp, log_ratio, advantage, config)
                d = now.ref_logp[b, g, t].item() - logp
                value += BETA * slow_kl(d, now.kl[b, t].item(), config.kl_estimator)
                value -= config.entropy_coef * now.entropy[b, t].item()
                total += weight * value
    return total


def loss_of(now, batch, loss_type, config):
    """The loss of a micro-batch that is a whole update."""
    weights = loss_weights(batch.mask, loss_type, G, count(batch.mask, 1))  # (B,T)
    return grpo_loss(now, batch, weights, BETA, config)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence", "none"])
@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
def test_loss_equals_the_loops(loss_type, level, estimator):
    now, batch = case()
    config = settings(importance_sampling_level=level, kl_estimator=estimator)
    have, parts = loss_of(now, batch, loss_type, config)
    assert have.item() == pytest.approx(slow_loss(now, batch, loss_type, config), rel=1e-6)
    assert parts["loss"].item() == have.item()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence", "none"])
@pytest.mark.parametrize(
    "baseline, scale, credit",
    [
        ("mean", "group", "input"),
        ("leave_one_out", "none", "input"),
        ("mean", "batch", "run"),
        ("leave_one_out", "group", "run"),
    ],
)
def test_loss_with_every_extra_equals_the_loops(loss_type, level, baseline, scale, credit):
    """The form of the advantages, credit per blank, two-sided clip, and policy gradient on the most
    uncertain blanks alone."""
    config = settings(
        baseline=baseline,
        scale_rewards=scale,
        credit=credit,
        importance_sampling_level=level,
        clip_delta=2.0,
    )
    now, batch = case(1)
    batch.old_logp = batch.old_logp - 1.5 * batch.mask[:, None]  # so that ratios beyond 2 occur
    width = T if credit == "run" else 1
    g = torch.Generator().manual_seed(3)
    rewards = torch.rand(B, G, width, dtype=torch.float64, generator=g)  # (B,G,T) or (B,G,1)
    batch.advantages = group_advantages(rewards, batch.mask, config)
    batch.learning = most_uncertain(now.entropy, batch.mask, 0.5)
    have, _ = loss_of(now, batch, loss_type, config)
    assert have.item() == pytest.approx(slow_loss(now, batch, loss_type, config), rel=1e-6)


def published(now, batch, loss_type, config, blanks_of_step):
    """As TRL documents it: a row for each completion, KL by k3, one micro-batch of two."""
    logp = now.logp.flatten(0, 1)  # (B·G,T)
    ref_logp = now.ref_logp.flatten(0, 1)  # (B·G,T)
    rows = batch.mask.repeat_interleave(G, dim=0).double()  # (B·G,T)
    A = batch.advantages.reshape(-1, 1)  # (B·G,1)
    log_weight = logp - batch.old_logp.flatten(0, 1)  # (B·G,T)
    if config.importance_sampling_level == "sequence":
        log_weight = ((log_weight * rows).sum(-1) / rows.sum(-1)).unsqueeze(-1)  # (B·G,1)
    unclipped = log_weight.exp()
    clipped = unclipped.clamp(1 - config.clip_eps, 1 + config.clip_eps_high)
    bounded = unclipped.clamp(max=config.clip_delta or math.inf)
    d = ref_logp - logp  # (B·G,T)
    each = -torch.minimum(bounded * A, clipped * A) + BETA * (d.exp() - d - 1)  # (B·G,T)
    return {
        "grpo": ((each * rows).sum(-1) / rows.sum(-1)).mean() / 2,
        "bnpo": (each * rows).sum() / rows.sum() / 2,
        "dr_grpo": (each * rows).sum() / (len(rows) * T) / 2,
        "dapo": (each * rows).sum() / blanks_of_step,
    }[loss_type]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("delta", [0.0, 1.5])
def test_loss_equals_the_published_formulas(loss_type, level, delta):
    """Two micro-batches with different numbers of blanks."""
    config = settings(
        importance_sampling_level=level, clip_delta=delta, kl_estimator="k3", entropy_coef=0.0
    )
    steps = [case(5), case(6)]
    blanks = sum(batch.mask.sum() for _, batch in steps)
    for now, batch in steps:
        weights = loss_weights(batch.mask, loss_type, G, Totals(2 * B, blanks, 2))  # (B,T)
        have, _ = grpo_loss(now, batch, weights, BETA, config)
        want = published(now, batch, loss_type, config, blanks * G)
        assert have.item() == pytest.approx(want.item(), rel=1e-6)


def test_most_uncertain_blanks():
    entropy = torch.tensor([[5.0, 1.0, 2.0], [9.0, 3.0, 4.0]])
    mask = torch.tensor([[True, True, True], [False, True, True]])
    have = most_uncertain(entropy, mask, 0.4)
    want = [[True, False, False], [False, False, True]]  # the visible 9.0 does not count
    assert have.tolist() == want
    assert torch.equal(most_uncertain(entropy, mask, 1.0), mask)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_add_up(loss_type):
    """Unequal numbers of blanks in the two halves: their losses still add up to the whole's (bnpo:
    to the mean of theirs)."""
    share = torch.tensor([[0.2], [0.3], [0.9], [0.8]])
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < share  # (4,6)
    mask[:, 0] = True
    whole = loss_weights(mask, loss_type, G, count(mask, 1))
    totals = count(mask, 2)
    halves = [loss_weights(half, loss_type, G, totals) for half in mask.chunk(2)]
    if loss_type == "bnpo":
        whole = torch.cat([half.float() / half.sum() / (2 * G) for half in mask.chunk(2)])
    torch.testing.assert_close(torch.cat(halves), whole)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_rows_of_a_latent_weigh_what_their_input_does(loss_type):
    """K rows with G/K completions each, in the place of one with G: the sum over completions of the
    weights of a blank stays."""
    K = 2
    mask = case()[1].mask
    rows = mask.repeat_interleave(K, dim=0)  # (B·K,T)
    whole = G * loss_weights(mask, loss_type, G, count(mask, 1))  # (B,T)
    by_row = G // K * loss_weights(rows, loss_type, G // K, count(rows, 1))  # (B·K,T)
    torch.testing.assert_close(by_row.view(B, K, T).sum(dim=1), whole)


def test_clip_stops_the_gradient_only_where_it_must():
    """Ratio 2 with A > 0 and ratio 0.5 with A < 0 are stopped; the other two go on."""
    logp = torch.tensor([2.0, 2.0, 0.5, 0.5]).log().view(1, 4, 1).requires_grad_()  # (1,4,1)
    A = torch.tensor([1.0, -1.0, 1.0, -1.0]).view(1, 4, 1)  # (1,4,1)
    config = Config(clip_eps=0.2, clip_eps_high=0.2)
    losses, stopped = policy_loss(logp, torch.zeros(1, 4, 1), A, ONE_BLANK, config)
    losses.sum().backward()
    assert stopped.flatten().tolist() == [True, False, False, True]
    assert torch.equal(logp.grad == 0, stopped)


def test_two_sided_clip_stops_large_ratios_of_bad_completions():
    logp = torch.tensor([2.0, 5.0, 5.0]).log().view(1, 3, 1).requires_grad_()  # (1,3,1)
    A = torch.tensor([-1.0, -1.0, 1.0]).view(1, 3, 1)  # (1,3,1)
    config = Config(clip_eps=0.2, clip_eps_high=0.2, clip_delta=4.0)
    losses, stopped = policy_loss(logp, torch.zeros(1, 3, 1), A, ONE_BLANK, config)
    losses.sum().backward()
    torch.testing.assert_close(losses.flatten().detach(), torch.tensor([2.0, 4.0, -1.2]))
    assert stopped.flatten().tolist() == [False, True, True]
    assert torch.equal(logp.grad == 0, stopped)


def test_the_weight_of_the_kl():
    """kl_beta at the target, sixteen times that at twice the target; visible characters, and rows
    instead of inputs, change nothing."""
    mask = torch.tensor([[True, True, False]])
    kl = torch.tensor([[0.6, 1.0, 0.0]])  # a mean of 0.8 a blank
    assert kl_weight(kl, mask, Config(kl_beta=0.2, kl_target=0.0)).item() == pytest.approx(0.2)
    for target, times in ((0.8, 1), (0.4, 16)):
        config = Config(kl_beta=0.2, kl_target=target)
        assert kl_weight(kl, mask, config).item() == pytest.approx(0.2 * times)
        rows = (kl.repeat(2, 1), mask.repeat(2, 1))
        assert kl_weight(*rows, config).item() == pytest.approx(0.2 * times)


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
    have = group_advantages(rewards[..., None], None, config).squeeze(-1)
    want = slow_advantages(rewards, baseline, scale)
    torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-9)


def test_visible_characters_do_not_count_in_the_scale_of_the_step():
    """credit=run: the standard deviation is that of the blanks alone."""
    mask = case()[1].mask
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
