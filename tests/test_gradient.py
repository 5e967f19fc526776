"""What no test may take on faith: expected gradients, by enumeration of every group.

Letters: T = 2 blanks, V = 3 characters, G completions, K values of the latent, N groups. A group is
what one step draws for one input; all N of them are laid side by side, as the inputs of one batch,
and weighed by their probability. Temperature and truncation are on.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch

from grpo import sampling
from grpo.advantage import group_advantages
from grpo.loss import Totals, grpo_loss, loss_weights
from grpo.plumbing.config import Config
from grpo.rollout import Inputs, operations, probability_of_equal_fills
from grpo.stats import log_softmax, restrict, stats

V, T, TEMPERATURE = 3, 2, 0.8
LOGITS = torch.tensor(
    [[[0.3, -0.5, 1.1], [0.9, 0.2, -0.4]], [[-0.6, 0.4, 0.2], [0.1, -0.7, 0.8]]],
    dtype=torch.float64,
)  # (2,T,V), one for each value of the latent
REFERENCE = torch.tensor(
    [[[0.1, 0.4, -0.3], [-0.2, 0.6, 0.5]], [[0.7, -0.1, 0.3], [0.2, -0.5, 0.4]]],
    dtype=torch.float64,
)  # (2,T,V)
KEPT = torch.tensor(
    [[[True, False, True], [True, True, True]], [[True, True, False], [False, True, True]]]
)  # (2,T,V), frozen
ALL = torch.ones_like(KEPT)
REWARD = torch.tensor(
    [[0.1, 0.9, 0.3], [0.5, 0.2, 0.8], [0.7, 0.4, 0.6]], dtype=torch.float64
)  # (V,V), of the fill (y_0, y_1)
SHAPES = [(1, 2), (2, 2), (2, 4)]  # (K,G)


def settings(**changes):
    """Plain policy gradient and no KL, but for the changes."""
    own = {
        "baseline": "leave_one_out",
        "scale_rewards": "none",
        "credit": "input",
        "kl_estimator": "exact",
        "entropy_coef": 0.0,
        "importance_sampling_level": "token",
        "temperature": TEMPERATURE,
    }
    return Config(**(own | changes))


def log_q(logits, kept):
    return restrict(log_softmax(logits, TEMPERATURE), kept)  # (K,T,V)


def fills(kept):
    """Every fill of one row's two blanks: kept (T,V) -> list of (y_0, y_1)."""
    return list(itertools.product(*(kept[t].nonzero().flatten().tolist() for t in range(T))))


def all_groups(kept, G):
    """Every group, its first G/K completions drawn by z = 0, the next by z = 1: -> (N,K,g,T)."""
    K = len(kept)
    by_completion = [fills(kept[z]) for z in range(K) for _ in range(G // K)]
    groups = torch.tensor(list(itertools.product(*by_completion)))  # (N,G,T)
    return groups.view(-1, K, G // K, T)


def probability(groups, logits, kept):
    """Of each group, its draws being independent, each from its own row: -> (N,)."""
    q = log_q(logits, kept).exp().detach()  # (K,T,V)
    K, g = groups.shape[1:3]
    z = torch.arange(K).view(K, 1, 1).expand(K, g, T)  # (K,g,T)
    blank = torch.arange(T).expand(K, g, T)  # (K,g,T)
    return q[z, blank, groups].flatten(1).prod(dim=1)  # (N,)


def of_fills(values, groups):
    """values (V,V) of a fill -> (N,G)."""
    return values[groups[..., 0], groups[..., 1]].flatten(1)


def in_rows(x, N):
    """(K,...) for each of N groups -> (N·K,...)."""
    return x.expand(N, *x.shape).flatten(0, 1)


def compared(rewards, mask, config):
    """The advantages (N,G,·) of rewards (N,G) or (N,G,T): each group is a whole step's."""
    rewards = rewards.view(*rewards.shape[:2], -1)  # (N,G,1) or (N,G,T)
    return torch.cat([group_advantages(r[None], mask[:1], config) for r in rewards])


def expected_gradient(logits, kept, groups, advantages, config, **how):
    """Σ over groups of P(group) · gradient of the step's loss, by the logits (K,T,V).

    advantages (N,G,1) or (N,G,T). `how`: drawn_from, if not the kept set that is differentiated;
    of, what makes the logits from those that are differentiated by; beta, the weight of the KL.
    """
    N, K, g, _ = groups.shape
    leaf = logits.clone().requires_grad_()
    z = how.get("of", torch.clone)(leaf)  # (K,T,V)
    mask = torch.ones(N * K, T, dtype=torch.bool)  # (N·K,T)
    reference = in_rows(REFERENCE[:K], N)  # (N·K,T,V)
    completions = groups.flatten(0, 1)  # (N·K,g,T)
    _, compute_stats = operations(config, K)
    now = compute_stats(in_rows(z, N), reference, completions, in_rows(kept, N), mask, TEMPERATURE)
    batch = SimpleNamespace(
        mask=mask,
        old_logp=now.logp.detach(),
        advantages=advantages.reshape(N * K, g, -1),
        learning=mask,
    )
    chance = probability(groups, z, how.get("drawn_from", kept))  # (N,)
    assert chance.sum().item() == pytest.approx(1)
    totals = Totals(K, torch.tensor(K * T), 1)  # of one group: its input has K rows
    weights = loss_weights(mask, "sum", g, totals)  # (N·K,T)
    weights = weights * chance.repeat_interleave(K)[:, None]
    loss, _ = grpo_loss(now, batch, weights, how.get("beta", 0.0), config)
    return torch.autograd.grad(loss, leaf)[0]  # (K,T,V)


def mixture(logits, kept):
    """q(y) = 1/K Σ_z Π_t q_z,t(y_t) of every fill: -> (V,V)."""
    q = log_q(logits, kept).exp()  # (K,T,V)
    return (q[:, 0, :, None] * q[:, 1, None, :]).mean(dim=0)


def gradient_of_expected_reward(logits, kept, reward=REWARD):
    leaf = logits.clone().requires_grad_()
    value = (mixture(leaf, kept) * reward).sum()
    return torch.autograd.grad(value, leaf)[0]  # (K,T,V)


def assert_same(have, want):
    torch.testing.assert_close(have, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("K, G", SHAPES)
@pytest.mark.parametrize("baseline", ["leave_one_out", "mean"])
@pytest.mark.parametrize("level", ["token", "none"])
def test_expected_gradient_is_that_of_the_expected_reward(K, G, baseline, level):
    """Of the mixture's, where there is a latent, each of whose values has G/K completions.

    leave_one_out: the reward of the others, drawn by whatever z, is independent of a draw, hence no
    bias. mean: r_j − 1/G Σ_i r_i = (1 − 1/G) r_j − 1/G Σ_{i≠j} r_i, hence 1 − 1/G of it, though the
    draws of a group have different distributions.
    """
    logits = LOGITS[:K]
    kept = KEPT[:K]
    config = settings(baseline=baseline, importance_sampling_level=level)
    groups = all_groups(kept, G)
    advantages = compared(of_fills(REWARD, groups), ALL[:, :, 0], config)
    have = expected_gradient(logits, kept, groups, advantages, config)
    factor = {"leave_one_out": 1.0, "mean": 1 - 1 / G}[baseline]
    want = gradient_of_expected_reward(logits, kept)
    assert want.abs().max() > 1e-2
    assert_same(-have, factor * want)


def test_a_group_of_one_value_is_compared_with_the_others_too():
    """Two values of the latent that each know one fill, of reward 0 and of reward 1: within its own
    value every draw is as good as the rest; over the whole group it is not."""
    kept = torch.zeros(2, T, V, dtype=torch.bool)  # (2,T,V)
    kept[0, :, 0] = True
    kept[1, :, 1] = True
    groups = all_groups(kept, 4)
    rewards = of_fills(torch.eye(V)[1].expand(V, V), groups)
    advantages = compared(rewards, ALL[:, :, 0], settings())
    assert advantages.flatten().tolist() == pytest.approx([-2 / 3, -2 / 3, 2 / 3, 2 / 3])


XTC = {"xtc_threshold": 0.2, "xtc_probability": 0.5}


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.4}, XTC, XTC | {"min_p": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("K", [1, 2])
def test_on_policy_gradient_with_each_sampler_option(options, penalty, K):
    """On every kept set that the sampler makes, coin by coin, and with the penalty: the gradient of
    E[r] under what is drawn."""
    logits = LOGITS[:K]
    masked = torch.tensor([[0, 2]])  # only for the penalty: 0 and 2 are visible
    uniforms = torch.rand(40 * K, 2, T, generator=torch.Generator().manual_seed(0))

    def penalised(x):
        return sampling.penalise(x, masked, penalty)

    mask = torch.ones(40 * K, T, dtype=torch.bool)  # (40·K,T)
    z = in_rows(penalised(logits), 40)  # (40·K,T,V)
    rows = masked.expand(40 * K, T)
    _, kept = sampling.sample_completions(z, rows, mask, uniforms, TEMPERATURE, **options)
    kept_sets = kept.view(40, K, T, V).unique(dim=0)
    assert (len(kept_sets) > 1) == ("xtc_probability" in options)
    for kept in kept_sets:
        groups = all_groups(kept, 2)
        advantages = compared(of_fills(REWARD, groups), ALL[:, :, 0], settings())
        have = expected_gradient(logits, kept, groups, advantages, settings(), of=penalised)
        leaf = logits.clone().requires_grad_()
        value = (mixture(penalised(leaf), kept) * REWARD).sum()
        want = torch.autograd.grad(value, leaf)[0]
        assert_same(-have, want)
        certain = all(len(fills(k)) == 1 for k in kept)
        assert certain or want.abs().max() > 1e-3


@pytest.mark.parametrize(
    "scored_on, baseline, right",
    [(KEPT, "none", True), (ALL, "none", False), (ALL, "leave_one_out", True)],
)
def test_sampling_from_one_distribution_and_differentiating_another(scored_on, baseline, right):
    """Drawn with truncation, scored without: wrong, as soon as the advantages of a group do not add
    up to 0. While they do (every ratio 1, a group baseline), the error cancels within the group,
    which is why it is so rarely noticed."""
    logits = LOGITS[:1]
    groups = all_groups(KEPT[:1], 2)
    advantages = of_fills(REWARD, groups)[..., None]
    if baseline != "none":
        advantages = compared(of_fills(REWARD, groups), ALL[:, :, 0], settings())
    have = expected_gradient(
        logits, scored_on[:1], groups, advantages, settings(), drawn_from=KEPT[:1]
    )
    error = (-have - gradient_of_expected_reward(logits, KEPT[:1])).abs().max()
    assert error < 1e-10 if right else error > 1e-2


def test_with_a_latent_truncation_must_be_scored_even_with_a_baseline():
    """Where the rows keep different sets, the error does not cancel within a group: its draws by
    different z's were cut differently."""
    groups = all_groups(KEPT, 2)
    advantages = compared(of_fills(REWARD, groups), ALL[:, :, 0], settings())
    want = gradient_of_expected_reward(LOGITS, KEPT)
    right = expected_gradient(LOGITS, KEPT, groups, advantages, settings())
    wrong = expected_gradient(LOGITS, ALL, groups, advantages, settings(), drawn_from=KEPT)
    assert_same(-right, want)
    assert (-wrong - want).abs().max() > 1e-2


def test_scaled_advantages_have_their_own_expectation():
    """Scaling weighs each group by 1/std: the expectation of Σ_j A_j ∇log q(y_j), A written out."""
    logits = LOGITS[:1]
    kept = KEPT[:1]
    config = settings(baseline="mean", scale_rewards="group")
    groups = all_groups(kept, 2)
    advantages = compared(of_fills(REWARD, groups), ALL[:, :, 0], config)
    have = expected_gradient(logits, kept, groups, advantages, config)

    leaf = logits.clone().requires_grad_()
    lq = log_q(leaf, kept)[0]  # (T,V)
    written_out = 0
    for group, chance in zip(groups, probability(groups, logits, kept)):
        first, second = group[0].tolist()
        a = REWARD[tuple(first)]
        b = REWARD[tuple(second)]
        A = (a - b) / 2 / (abs(a - b) / 2 + 1e-4)
        log_pi_first = lq[0, first[0]] + lq[1, first[1]]
        log_pi_second = lq[0, second[0]] + lq[1, second[1]]
        written_out = written_out + chance * (A * log_pi_first - A * log_pi_second) / 2
    assert_same(-have, torch.autograd.grad(written_out, leaf)[0])


@pytest.mark.parametrize("K", [1, 2])
def test_exact_kl_is_the_sum_over_all_fills(K):
    """Of each row: KL(q_z‖r_z) of whole inputs, and its gradient."""
    leaf = LOGITS[:K].clone().requires_grad_()
    log_p = log_softmax(leaf, TEMPERATURE)  # (K,T,V)
    log_r = log_softmax(REFERENCE[:K], TEMPERATURE)  # (K,T,V)
    log_fill = log_p[:, 0, :, None] + log_p[:, 1, None, :]  # (K,V,V)
    log_ref_fill = log_r[:, 0, :, None] + log_r[:, 1, None, :]  # (K,V,V)
    by_fills = (log_fill.exp() * (log_fill - log_ref_fill)).sum(dim=(1, 2))  # (K,)
    completions = torch.zeros(K, 2, T, dtype=torch.long)
    mask = torch.ones(K, T, dtype=torch.bool)
    now = stats(leaf, REFERENCE[:K], completions, ALL[:K], mask, TEMPERATURE)
    kl = now.kl.sum(dim=1)  # (K,)
    torch.testing.assert_close(kl, by_fills, rtol=0, atol=1e-12)
    have = torch.autograd.grad(kl.sum(), leaf)[0]
    want = torch.autograd.grad(by_fills.sum(), leaf)[0]
    torch.testing.assert_close(have, want, rtol=0, atol=1e-12)


def marginal_of_each_blank(logits):
    """The mixture's, at the temperature: (K,T,V) -> (T,V)."""
    return (logits / TEMPERATURE).softmax(dim=-1).mean(dim=0)


def gradient_of_penalty(logits, kl_of):
    """mean over z of KL(q_z‖r_z), or the KL of the mixtures' marginals, from their definitions."""
    leaf = logits.clone().requires_grad_()
    reference = REFERENCE[: len(logits)]
    if kl_of == "row":
        log_p = log_softmax(leaf, TEMPERATURE)  # (K,T,V)
        log_r = log_softmax(reference, TEMPERATURE)  # (K,T,V)
        value = (log_p.exp() * (log_p - log_r)).sum(dim=(1, 2)).mean()
    else:
        m = marginal_of_each_blank(leaf)  # (T,V)
        m_ref = marginal_of_each_blank(reference)  # (T,V)
        value = (m * (m / m_ref).log()).sum()
    return value.item(), torch.autograd.grad(value, leaf)[0]


@pytest.mark.parametrize("K, G", SHAPES)
@pytest.mark.parametrize("kl_of", ["row", "marginal"])
def test_gradient_of_the_kl_of_rows_and_of_marginals(K, G, kl_of):
    """The penalty is exact, so any group has its gradient: equal rewards leave it alone."""
    logits = LOGITS[:K]
    groups = all_groups(ALL[:K], G)[:1]
    mask = torch.ones(K, T, dtype=torch.bool)
    config = settings(kl_of=kl_of)
    _, compute_stats = operations(config, K)
    leaf = logits.clone().requires_grad_()
    now = compute_stats(leaf, REFERENCE[:K], groups[0], ALL[:K], mask, TEMPERATURE)
    batch = SimpleNamespace(
        mask=mask, old_logp=now.logp.detach(), advantages=torch.zeros(K, G // K, 1), learning=mask
    )
    weights = loss_weights(mask, "sum", G // K, Totals(K, torch.tensor(K * T), 1))
    loss, parts = grpo_loss(now, batch, weights, 1.0, config)
    value, want = gradient_of_penalty(logits, kl_of)
    assert parts["kl_penalty"].item() == pytest.approx(value, rel=1e-6)
    assert_same(torch.autograd.grad(loss, leaf)[0], want)


@pytest.mark.parametrize("K, G", [(1, 2), (2, 2)])
@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
def test_expected_gradient_of_each_kl_estimator(K, G, estimator):
    """On-policy, untruncated, of each row: k1's is 0, those of k2 and the exact KL are that of
    KL(π‖ref), k3's is that of KL(ref‖π)."""
    logits = LOGITS[:K]
    groups = all_groups(ALL[:K], G)
    nothing = torch.zeros(len(groups), G, 1, dtype=torch.float64)
    config = settings(kl_estimator=estimator)
    have = expected_gradient(logits, ALL[:K], groups, nothing, config, beta=1.0)
    leaf = logits.clone().requires_grad_()
    log_p = log_softmax(leaf, TEMPERATURE)
    log_r = log_softmax(REFERENCE[:K], TEMPERATURE)
    forward = (log_p.exp() * (log_p - log_r)).sum() / K
    reverse = (log_r.exp() * (log_r - log_p)).sum() / K
    want = {"exact": forward, "k1": 0 * forward, "k2": forward, "k3": reverse}[estimator]
    assert_same(have, torch.autograd.grad(want, leaf)[0])


@pytest.mark.parametrize("K", [1, 2])
def test_expected_entropy_bonus(K):
    """The mean over z of the rows' entropies."""
    logits = LOGITS[:K]
    groups = all_groups(ALL[:K], 2)
    nothing = torch.zeros(len(groups), 2, 1, dtype=torch.float64)
    have = expected_gradient(logits, ALL[:K], groups, nothing, settings(entropy_coef=1.0))
    leaf = logits.clone().requires_grad_()
    log_p = log_softmax(leaf, TEMPERATURE)
    want = torch.autograd.grad((log_p.exp() * log_p).sum() / K, leaf)[0]
    assert_same(have, want)


@pytest.mark.parametrize("K, G", SHAPES)
def test_credit_per_blank_climbs_each_blanks_own_reward(K, G):
    """With rewards (B,G,T), blank t's expected gradient is that of E[reward_t] with respect to its
    own logits."""
    logits = LOGITS[:K]
    kept = KEPT[:K]
    per_blank = [REWARD, REWARD.T * 0.5]  # reward of blank 0, of blank 1
    groups = all_groups(kept, G)
    rewards = torch.stack([of_fills(reward, groups) for reward in per_blank], dim=-1)  # (N,G,T)
    config = settings(credit="run")
    have = expected_gradient(logits, kept, groups, compared(rewards, ALL[:, :, 0], config), config)
    want = [gradient_of_expected_reward(logits, kept, per_blank[t])[:, t] for t in range(T)]
    assert_same(-have, torch.stack(want, dim=1))


@pytest.mark.parametrize("K, G", SHAPES)
def test_equal_fills_are_foretold(K, G):
    """Against the enumeration of all groups, with both blanks and with one."""
    logits = LOGITS[:K]
    kept = KEPT[:K] | torch.tensor([True, False, True])  # some fills are common to both rows
    groups = all_groups(kept, G)
    chance = probability(groups, logits, kept)  # (N,)
    same = (groups == groups[:, :1, :1]).flatten(1, 2).all(dim=1)  # (N,T) at each blank
    for mask in ([True, True], [True, False]):
        blank = torch.tensor([mask])  # (1,T)
        equal = (same | ~blank).all(dim=1)  # (N,)
        want = (chance * equal).sum()
        masked = torch.zeros(1, T, dtype=torch.long)
        inputs = Inputs(masked, blank, masked, torch.zeros(1, G, T), orders=None)
        have = probability_of_equal_fills(logits, kept, inputs, TEMPERATURE)
        assert 0 < want < 1
        torch.testing.assert_close(have, want[None])
