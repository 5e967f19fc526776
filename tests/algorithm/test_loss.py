"""Every form of the loss against loops over b, g, t written from the papers' formulas.

Letters: B masked inputs, T characters, G completions of each.
"""

import math

import pytest
import torch
from grpo.rollout import Inputs, Rollout

from grpo.advantage import group_advantages
from grpo.logprobs import LogProbs
from grpo.loss import grpo_loss, loss_weights, most_uncertain, policy_loss
from grpo.plumbing.config import Config
from grpo.sampling import Fills

B, G, T = 3, 4, 5
BETA = 0.3
LOSS_TYPES = ["grpo", "dapo", "bnpo", "dr_grpo", "sum"]
ONE_BLANK = torch.ones(1, 1, dtype=torch.bool)  # (1,1)


def settings(**changes):
    """What the loss reads, none of it at its default."""
    own = {"clip_eps": 0.1, "clip_eps_high": 0.3, "entropy_coef": 0.2, "kl_beta": BETA}
    return Config(**(own | changes))


def batch_of(mask, old, advantages):
    """A `Rollout` with what the loss reads of it."""
    nothing = torch.zeros(len(mask), 1)
    inputs = Inputs(*[nothing] * 5)
    return Rollout(inputs, Fills(nothing, nothing, mask), nothing, old, advantages, advantages)


def case(seed=0):
    """-> what the policy says now, and the batch that it says it of."""
    g = torch.Generator().manual_seed(seed)
    logp = -2 * torch.rand(B, G, T, generator=g, dtype=torch.float64)  # (B,G,T)
    old_logp = -2 * torch.rand(B, G, T, generator=g, dtype=torch.float64)  # (B,G,T)
    ref_logp = -2 * torch.rand(B, G, T, generator=g, dtype=torch.float64)  # (B,G,T)
    kl = torch.rand(B, T, generator=g, dtype=torch.float64)  # (B,T)
    entropy = torch.rand(B, T, generator=g, dtype=torch.float64)  # (B,T)
    mask = torch.rand(B, T, generator=g) < 0.6  # (B,T)
    mask[:, 0] = True
    blank = mask[:, None]  # (B,1,T)
    now = LogProbs(logp * blank, ref_logp * blank, kl * mask, entropy * mask)
    advantages = torch.randn(B, G, 1, generator=g, dtype=torch.float64)  # (B,G,1)
    return now, batch_of(mask, now._replace(logp=old_logp * blank), advantages)


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


def slow_loss(now, batch, learning, config):
    total = 0.0
    mask = batch.fills.mask
    blanks = int(mask.sum())
    for b in range(B):
        length = int(mask[b].sum())
        weight = {
            "grpo": 1 / (B * G * length),
            "dapo": 1 / (G * blanks),
            "bnpo": 1 / (G * blanks),
            "dr_grpo": 1 / (B * G * T),
            "sum": 1 / (B * G),
        }[config.loss_type]
        for g in range(G):
            difference = (now.logp - batch.old.logp)[b, g].tolist()
            mean = sum(difference[t] for t in range(T) if mask[b, t]) / length
            for t in range(T):
                if not mask[b, t]:
                    continue
                advantage = batch.advantages[b, g].expand(T)[t].item()
                log_ratio = difference[t]
                if config.importance_sampling_level == "sequence":
                    log_ratio = mean
                logp = now.logp[b, g, t].item()
                value = 0.0
                if learning[b, t]:
                    value = slow_policy_loss(logp, log_ratio, advantage, config)
                d = now.ref_logp[b, g, t].item() - logp
                value += BETA * slow_kl(d, now.kl[b, t].item(), config.kl_estimator)
                value -= config.entropy_coef * now.entropy[b, t].item()
                total += weight * value
    return total


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence", "none"])
@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
def test_loss_equals_the_loops(loss_type, level, estimator):
    now, batch = case()
    config = settings(loss_type=loss_type, importance_sampling_level=level, kl_estimator=estimator)
    have, terms = grpo_loss(now, batch, batch, config)
    want = slow_loss(now, batch, batch.fills.mask, config)
    assert have.item() == pytest.approx(want, rel=1e-6)
    assert terms["loss"].item() == have.item()


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
        loss_type=loss_type,
        baseline=baseline,
        scale_rewards=scale,
        credit=credit,
        importance_sampling_level=level,
        clip_delta=2.0,
        top_entropy_quantile=0.5,
    )
    now, batch = case(1)
    mask = batch.fills.mask
    old_logp = batch.old.logp - 1.5 * mask[:, None]  # so that ratios beyond 2 occur
    width = T if credit == "run" else 1
    g = torch.Generator().manual_seed(3)
    rewards = torch.rand(B, G, width, dtype=torch.float64, generator=g)  # (B,G,T) or (B,G,1)
    advantages = group_advantages(rewards, mask, config)
    batch = batch_of(mask, batch.old._replace(logp=old_logp), advantages)
    have, _ = grpo_loss(now, batch, batch, config)
    half = batch.old.entropy >= batch.old.entropy[mask].median()  # of an odd number of blanks
    assert mask.sum() % 2 == 1
    assert have.item() == pytest.approx(slow_loss(now, batch, mask & half, config), rel=1e-6)


def test_most_uncertain_blanks():
    entropy = torch.tensor([[5.0, 1.0, 4.5], [9.0, 3.0, 2.0]])
    mask = torch.tensor([[True, True, True], [False, True, True]])
    batch = batch_of(mask, LogProbs(*[entropy] * 4), torch.zeros(2, G, 1))
    want = torch.tensor([[True, False, True], [False, False, False]])  # the visible 9 is none
    assert torch.equal(most_uncertain(batch, batch, 0.4), want)
    for i, micro in enumerate(batch.split(1)):  # the threshold is the whole batch's
        assert torch.equal(most_uncertain(micro, batch, 0.4)[0], want[i])
    assert torch.equal(most_uncertain(batch, batch, 1.0), mask)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_add_up(loss_type):
    """Unequal numbers of blanks in the two halves: their losses still add up to the whole's (bnpo:
    to the mean of theirs)."""
    share = torch.tensor([[0.2], [0.3], [0.9], [0.8]])
    mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < share  # (4,6)
    mask[:, 0] = True
    batch = batch_of(mask, LogProbs(*[torch.zeros(4, 6)] * 4), torch.zeros(4, G, 1))
    whole = loss_weights(mask, batch, settings(loss_type=loss_type, batch_size=4))
    config = settings(loss_type=loss_type, batch_size=2)
    halves = [loss_weights(half, batch, config) for half in mask.chunk(2)]
    if loss_type == "bnpo":
        whole = torch.cat([half.float() / half.sum() / (2 * G) for half in mask.chunk(2)])
    torch.testing.assert_close(torch.cat(halves), whole)


def test_a_smaller_last_micro_batch_is_one_of_them():
    """bnpo: of 3 inputs in micro-batches of 2 and 1, half the loss is the last one's."""
    mask = torch.tensor([[True, True], [True, False], [True, True]])  # (3,2)
    batch = batch_of(mask, LogProbs(*[torch.zeros(3, 2)] * 4), torch.zeros(3, G, 1))
    config = settings(loss_type="bnpo", batch_size=2)
    weights = [loss_weights(part, batch, config).sum() for part in mask.split(2)]
    torch.testing.assert_close(G * torch.stack(weights), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize(
    "ratios, signs, delta, losses, stopped",
    [
        ([2, 2, 0.5, 0.5], [1, -1, 1, -1], 0.0, [-1.2, 2.0, -0.5, 0.8], [1, 0, 0, 1]),
        ([2, 5, 5], [-1, -1, 1], 4.0, [2.0, 4.0, -1.2], [0, 1, 1]),
    ],
)
def test_clips_stop_the_gradient_only_where_they_must(ratios, signs, delta, losses, stopped):
    """Of ratio 2 with A > 0, 0.5 with A < 0; with clip_delta, of large ones with A < 0."""
    logp = torch.tensor(ratios).log().view(1, -1, 1).requires_grad_()  # (1,G,1)
    A = torch.tensor(signs).view(1, -1, 1)  # (1,G,1)
    config = Config(clip_eps=0.2, clip_eps_high=0.2, clip_delta=delta)
    have, flags = policy_loss(logp, torch.zeros(logp.shape), A, ONE_BLANK, config)
    have.sum().backward()
    torch.testing.assert_close(have.flatten().detach(), torch.tensor(losses))
    assert flags.flatten().int().tolist() == stopped
    assert torch.equal(logp.grad == 0, flags)


def test_the_ratio_of_a_completion_has_the_gradient_of_each_blanks_own():
    """GSPO-token (2507.18071, section 4.3): of blank t it is −ρ·A[t], ρ the whole completion's."""
    mask = torch.tensor([[True, True, False]])  # (1,T)
    old = torch.tensor([[[-1.0, -2.0, 0.0]]])  # (1,1,T)
    logp = (old + torch.tensor([0.05, -0.01, 0.0])).requires_grad_()
    A = torch.tensor([[[2.0, -1.0, 0.0]]])  # (1,1,T)
    config = Config(importance_sampling_level="sequence")
    losses, _ = policy_loss(logp, old, A, mask, config)
    losses[..., :2].sum().backward()
    torch.testing.assert_close(logp.grad, -torch.tensor(0.02).exp() * A)
