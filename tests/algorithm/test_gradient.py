"""Check expected gradients by enumerating every group.

A group is what one step draws for one input. The loss of each group is weighted by the group's
probability. Temperature and truncation are on. That a truncation allows what it should is for
test_sampling.py to check.

Shapes: T = 2 blanks, V = 3 characters, G = 2 completions, K = 2 values of the latent z. `leaves`
are the logits that we differentiate by. A `Product` has those of the characters (1,T,V). A `Latent`
has a prior (1,K), and characters (1,T,K,V).
"""

from functools import partial

import pytest
import torch
from conftest import numbers

from grpo.advantage import compute_advantages
from grpo.latent import Latent
from grpo.loss import OBJECTIVES, grpo_loss, loss_weights
from grpo.policy import Product, Sample
from grpo.run.config import Config

V, T, G, K, TAU = 3, 2, 2, 2, 0.8
MASK = torch.ones(1, T, dtype=torch.bool)


NOW = {Product: [numbers(0, 1, T, V)], Latent: [numbers(1, 1, K), numbers(2, 1, T, K, V)]}
REFERENCE = {Product: [numbers(3, 1, T, V)], Latent: [numbers(4, 1, K), numbers(5, 1, T, K, V)]}
TRUNCATED = torch.tensor([[[1, 0, 1], [1, 1, 1]], [[1, 1, 0], [0, 1, 1]]]).bool()[None]
KEPT = {Latent: TRUNCATED, Product: TRUNCATED[:, 0]}  # the characters that a blank can get
ALL = {policy: torch.ones_like(kept) for policy, kept in KEPT.items()}
REWARD = numbers(6, V, V)  # of the completion (y_0, y_1)
BOTH = pytest.mark.parametrize("policy", [Product, Latent])


def settings(**changes):
    """Make a config of plain policy gradient without a KL, with these changes."""
    own = {"loss_type": "sum", "baseline": "leave_one_out", "group_size": G, "kl_beta": 0.0}
    return Config(**own | changes)


def distribution(policy, leaves, n):
    """Make a policy whose logits are `leaves`, the same for each of n inputs."""
    logits = [x.expand(n, *x.shape[1:]) for x in leaves]
    return policy(*logits, torch.zeros(n, T), MASK.expand(n, T), Config(temperature=TAU))


def pairs(leaves, kept):
    """Compute P(z, y_0, y_1) by its definition: (K,V,V). A `Product` policy has K = 1."""
    *prior, characters = leaves
    pi = (prior[0][0] / TAU).softmax(dim=0) if prior else torch.ones(1, dtype=torch.float64)
    weights = (characters / TAU).exp() * kept
    q = (weights / weights.sum(dim=-1, keepdim=True)).view(T, -1, V)  # (T,K,V)
    return torch.einsum("z,za,zb->zab", pi, *q)


def chances(leaves, kept):
    """Compute the probability of each completion: (V,V)."""
    return pairs(leaves, kept).sum(dim=0)


def rewards_of(completions, reward=REWARD):
    """Look up the rewards of completions: (n,G,T) -> (n,G)."""
    return reward[completions[..., 0], completions[..., 1]]


def compared(completions, reward=REWARD, **changes):
    return compute_advantages(rewards_of(completions, reward), settings(**changes))


without_rewards = partial(rewards_of, reward=0 * REWARD)


def expected_gradient(policy, kept, config, advantages=compared, drawn_from=None):
    """Compute Σ over groups of P(group) · gradient of the step's loss, for each leaf.

    `advantages` computes the advantages of all groups from their completions (n,G,T). The
    completions are scored on the set `kept`. They are drawn from it too, or from the set
    `drawn_from`.
    """
    leaves = [x.clone().requires_grad_() for x in NOW[policy]]
    chance = chances(NOW[policy], kept if drawn_from is None else drawn_from)  # (V,V)
    completions = chance.nonzero()  # every completion that can be drawn: (m,T)
    groups = torch.cartesian_prod(*[torch.arange(len(completions))] * G)  # (n,G)
    y = completions[groups]  # (n,G,T)
    of_group = chance[y[..., 0], y[..., 1]].prod(dim=1)  # (n,)
    assert of_group.sum() == pytest.approx(1)

    n = len(y)
    mask = MASK.expand(n, T)
    reference = distribution(policy, REFERENCE[policy], n)
    drawn = Sample(y, kept.expand(n, *kept.shape[1:]))
    now = distribution(policy, leaves, n).log_probs(drawn, reference)
    old = now.map(torch.detach)
    weights = loss_weights(MASK, config) * of_group[:, None]  # (n,T)
    loss, _ = grpo_loss(now, old, advantages(y), mask, mask, weights, config)
    return torch.autograd.grad(loss, leaves)


def gradient_of(policy, value):
    """Compute the gradient of the function `value` at the tensors NOW[policy]."""
    leaves = [x.clone().requires_grad_() for x in NOW[policy]]
    return torch.autograd.grad(value(leaves), leaves)


def gradient_of_expected_reward(policy, kept):
    return gradient_of(policy, lambda leaves: (chances(leaves, kept) * REWARD).sum())


def assert_opposite(have, want, factor=1.0):
    """Check that `have` is −factor · `want`, because a loss falls where the reward rises."""
    for a, b in zip(have, want):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(-a, factor * b, rtol=0, atol=1e-10)


@BOTH
@pytest.mark.parametrize("baseline, factor", [("leave_one_out", 1.0), ("mean", 1 - 1 / G)])
@pytest.mark.parametrize("objective", [*OBJECTIVES])
def test_expected_gradient_is_that_of_the_expected_reward(policy, baseline, factor, objective):
    """With leave_one_out a completion's baseline doesn't depend on it, so there is no bias.

    With `mean` the advantage of completion j is r_j − 1/G Σ_i r_i = (1 − 1/G) r_j − 1/G Σ_{i≠j}
    r_i. So the gradient is 1 − 1/G times as large.
    """
    config = settings(baseline=baseline, objective=objective)
    kept = KEPT[policy]
    have = expected_gradient(policy, kept, config, lambda y: compared(y, baseline=baseline))
    assert_opposite(have, gradient_of_expected_reward(policy, kept), factor)


@pytest.mark.parametrize(
    "scored_on, advantages, right",
    [(KEPT, rewards_of, True), (ALL, rewards_of, False), (ALL, compared, True)],
)
def test_sampling_from_one_distribution_and_differentiating_another(scored_on, advantages, right):
    """Completions that are drawn with truncation and scored without it give a wrong gradient.

    The error cancels by luck as long as every ratio is 1 and the advantages of a group add up to 0,
    as they do with the group's own baseline. So it is rarely noticed.
    """
    kept = KEPT[Product]
    (have,) = expected_gradient(Product, scored_on[Product], settings(), advantages, kept)
    (want,) = gradient_of_expected_reward(Product, kept)
    error = (-have - want).abs().max()
    assert error < 1e-10 if right else error > 1e-2


def divergence(p, r):
    """Compute KL(p‖r) as a sum over all pairs of a latent z and a completion y."""
    return (p * (p / r).log()).sum()


@pytest.mark.parametrize(
    "policy, estimator",
    [*((Product, name) for name in ("exact", "k1", "k2", "k3")), (Latent, "exact"), (Latent, "k1")],
)
def test_expected_gradient_of_each_kl_estimator(policy, estimator):
    """The exact KL and k2 have the gradient of KL(π‖ref).

    k3 has the gradient of KL(ref‖π), and the gradient of k1 is 0. This holds on-policy and without
    truncation. The exact KL of a `Latent` is over pairs of z and a completion y.
    """
    config = settings(kl_estimator=estimator, kl_beta=1.0)
    have = expected_gradient(policy, ALL[policy], config, without_rewards)
    r = pairs(REFERENCE[policy], ALL[policy])  # (K,V,V)

    def value(leaves):
        p = pairs(leaves, ALL[policy])
        forward = divergence(p, r)
        return {"k1": 0 * forward, "k3": divergence(r, p)}.get(estimator, forward)

    torch.testing.assert_close(have, gradient_of(policy, value), rtol=0, atol=1e-10)


@BOTH
def test_expected_entropy_bonus(policy):
    have = expected_gradient(policy, ALL[policy], settings(entropy_coef=1.0), without_rewards)

    def entropy(leaves):
        p = pairs(leaves, ALL[policy])
        return -(p * p.log()).sum()

    assert_opposite(have, gradient_of(policy, entropy))


@pytest.mark.parametrize("loss_type, factor", [("sum", 1.0), ("grpo", 1 / T)])
def test_a_true_log_ratio_and_beta_1_ask_for_the_text(loss_type, factor):
    """The expected loss is KL(q‖p) and a constant, if the judge scores completions by log p/q_ref.

    p is what stands in the text. Its blanks need not be independent.
    """
    p = REWARD.flatten().softmax(dim=0).view(V, V)
    score = (p / chances(REFERENCE[Product], ALL[Product])).log()  # (V,V)
    config = settings(kl_beta=1.0, loss_type=loss_type)
    (have,) = expected_gradient(Product, ALL[Product], config, partial(compared, reward=score))
    (want,) = gradient_of(Product, lambda leaves: divergence(chances(leaves, ALL[Product]), p))
    torch.testing.assert_close(have, factor * want, rtol=0, atol=1e-10)
