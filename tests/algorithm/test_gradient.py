"""What no test may take on faith: expected gradients, by enumeration of every group.

Letters: T = 2 blanks, V = 3 characters, G = 2 completions. A group is what one step draws for one
input; the loss of each is weighed by the group's probability. Temperature and truncation are on.
"""

import itertools

import pytest
import torch
from grpo.policy import logprobs
from grpo.rollout import Rollout

from grpo import sampling
from grpo.advantage import group_advantages
from grpo.logprobs import log_softmax, restrict
from grpo.loss import grpo_loss
from grpo.plumbing.config import Config
from grpo.sampling import Fills

V, T, G, TEMPERATURE = 3, 2, 2, 0.8
LOGITS = torch.tensor([[[0.3, -0.5, 1.1], [0.9, 0.2, -0.4]]], dtype=torch.float64)  # (1,T,V)
REFERENCE = torch.tensor([[[0.1, 0.4, -0.3], [-0.2, 0.6, 0.5]]], dtype=torch.float64)  # (1,T,V)
KEPT = torch.tensor([[[True, False, True], [True, True, True]]])  # (1,T,V), frozen
ALL = torch.ones_like(KEPT)
MASK = torch.ones(1, T, dtype=torch.bool)
REWARD = torch.tensor(
    [[0.1, 0.9, 0.3], [0.5, 0.2, 0.8], [0.7, 0.4, 0.6]], dtype=torch.float64
)  # (V,V), of the fill (y_0, y_1)


def settings(**changes):
    """Plain policy gradient and no KL, but for the changes."""
    own = {
        "loss_type": "sum",
        "baseline": "leave_one_out",
        "scale_rewards": "none",
        "credit": "input",
        "temperature": TEMPERATURE,
        "kl_beta": 0.0,
    }
    return Config(**(own | changes))


def log_q(logits, kept):
    return restrict(log_softmax(logits, TEMPERATURE), kept)  # (1,T,V)


def all_fills(kept):
    """Every fill of the two blanks: (y_0, y_1)."""
    return list(itertools.product(*(kept[0, t].nonzero().flatten().tolist() for t in range(T))))


def all_groups(logits, kept):
    """Every group of G independent draws, and its probability: (G,T), a number."""
    q = log_q(logits, kept).exp().detach()[0]  # (T,V)
    groups = []
    for group in itertools.product(all_fills(kept), repeat=G):
        chance = 1.0
        for first, second in group:
            chance *= (q[0, first] * q[1, second]).item()
        groups.append((torch.tensor(group), chance))
    assert sum(chance for _, chance in groups) == pytest.approx(1)
    return groups


def rewards_of(group):
    """(G,T) -> (1,G,1)."""
    return REWARD[group[:, 0], group[:, 1]].view(1, G, 1)


def compared(group):
    return group_advantages(rewards_of(group), MASK, settings())


def without_rewards(group):
    return torch.zeros(1, G, 1, dtype=torch.float64)


def expected_gradient(kept, config, advantages=compared, drawn_from=None):
    """Σ over groups of P(group) · gradient of the step's loss, by LOGITS: (1,T,V).

    advantages: of a group (G,T) -> (1,G,1) or (1,G,T). drawn_from: a kept set other than the one
    that is differentiated.
    """
    leaf = LOGITS.clone().requires_grad_()
    expected = 0
    for group, chance in all_groups(leaf, kept if drawn_from is None else drawn_from):
        now = logprobs(leaf, REFERENCE, Fills(group[None], kept, MASK), config)
        old = now._replace(logp=now.logp.detach())
        fills = Fills(group[None], kept, MASK)
        batch = Rollout(None, fills, REFERENCE, old, None, advantages(group))
        loss, _ = grpo_loss(now, batch, batch, config)
        expected = expected + chance * loss
    return torch.autograd.grad(expected, leaf)[0]


def gradient_of(value):
    """Of a function of the logits (1,T,V)."""
    leaf = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(value(leaf), leaf)[0]


def expected_reward(logits, kept, reward=REWARD):
    q = log_q(logits, kept).exp()[0]  # (T,V)
    return (q[0][:, None] * q[1] * reward).sum()


def assert_same(have, want):
    torch.testing.assert_close(have, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("baseline, factor", [("leave_one_out", 1.0), ("mean", 1 - 1 / G)])
@pytest.mark.parametrize("level", ["token", "none"])
def test_expected_gradient_is_that_of_the_expected_reward(baseline, factor, level):
    """leave_one_out: the reward of the others is independent of a draw, hence no bias.
    mean: r_j − 1/G Σ_i r_i = (1 − 1/G) r_j − 1/G Σ_{i≠j} r_i, hence 1 − 1/G of it."""
    config = settings(baseline=baseline, importance_sampling_level=level)
    have = expected_gradient(
        KEPT, config, lambda group: group_advantages(rewards_of(group), MASK, config)
    )
    want = gradient_of(lambda logits: expected_reward(logits, KEPT))
    assert want.abs().max() > 1e-2
    assert_same(-have, factor * want)


XTC = {"xtc_threshold": 0.2, "xtc_probability": 0.5}


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.4}, XTC, XTC | {"min_p": 0.2}],
    ids=str,
)
def test_on_policy_gradient_with_each_sampler_option(options):
    """On every kept set that the sampler makes: the gradient of E[r]."""
    uniforms = torch.rand(40, G, T, generator=torch.Generator().manual_seed(0))
    mask = MASK.expand(40, T)
    rows = LOGITS.expand(40, T, V)
    _, kept = sampling.sample_completions(rows, mask, mask, uniforms, TEMPERATURE, **options)
    kept_sets = kept.unique(dim=0)
    assert (len(kept_sets) > 1) == ("xtc_probability" in options)
    for kept in kept_sets:
        have = expected_gradient(kept[None], settings())
        want = gradient_of(lambda logits: expected_reward(logits, kept[None]))  # noqa: B023
        assert_same(-have, want)


@pytest.mark.parametrize(
    "scored_on, advantages, right",
    [(KEPT, rewards_of, True), (ALL, rewards_of, False), (ALL, compared, True)],
)
def test_sampling_from_one_distribution_and_differentiating_another(scored_on, advantages, right):
    """Drawn with truncation, scored without: wrong, as soon as the advantages of a group do not add
    up to 0. While they do (every ratio 1, a group baseline), the error cancels within the group,
    which is why it is so rarely noticed."""
    have = expected_gradient(scored_on, settings(), advantages, drawn_from=KEPT)
    want = gradient_of(lambda logits: expected_reward(logits, KEPT))
    error = (-have - want).abs().max()
    assert error < 1e-10 if right else error > 1e-2


def kl_of_fills(log_p, log_r):
    """KL of whole fills, by the sum over all of them: (1,T,V) twice."""
    log_fill = log_p[0, 0][:, None] + log_p[0, 1]  # (V,V)
    log_ref_fill = log_r[0, 0][:, None] + log_r[0, 1]  # (V,V)
    return (log_fill.exp() * (log_fill - log_ref_fill)).sum()


@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
def test_expected_gradient_of_each_kl_estimator(estimator):
    """On-policy, untruncated: k1's is 0, those of k2 and the exact KL are that of KL(π‖ref), k3's
    is that of KL(ref‖π)."""
    config = settings(kl_estimator=estimator, kl_beta=1.0)
    have = expected_gradient(ALL, config, without_rewards)
    log_r = log_softmax(REFERENCE, TEMPERATURE)

    def value(logits):
        log_p = log_softmax(logits, TEMPERATURE)
        forward = kl_of_fills(log_p, log_r)
        reverse = kl_of_fills(log_r, log_p)
        return {"exact": forward, "k1": 0 * forward, "k2": forward, "k3": reverse}[estimator]

    assert_same(have, gradient_of(value))


def test_expected_entropy_bonus():
    have = expected_gradient(ALL, settings(entropy_coef=1.0), without_rewards)

    def minus_entropy(logits):
        log_p = log_softmax(logits, TEMPERATURE)
        return (log_p.exp() * log_p).sum()

    assert_same(have, gradient_of(minus_entropy))


def test_credit_per_blank_climbs_each_blanks_own_reward():
    """With rewards (B,G,T), blank t's expected gradient is that of E[reward_t] with respect to its
    own logits."""
    config = settings(credit="run")
    per_blank = [REWARD, REWARD.T * 0.5]  # reward of blank 0, of blank 1

    def advantages(group):
        rewards = [reward[group[:, 0], group[:, 1]] for reward in per_blank]  # (G,) each
        return group_advantages(torch.stack(rewards, dim=1)[None], MASK, config)  # (1,G,T)

    have = expected_gradient(KEPT, config, advantages)
    for t, reward in enumerate(per_blank):
        want = gradient_of(lambda logits: expected_reward(logits, KEPT, reward))  # noqa: B023
        assert_same(-have[:, t], want[:, t])
