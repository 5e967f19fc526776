"""What no test may take on faith: expected gradients, by enumeration of every group. V = 3, two blanks, G = 2, temperature and truncation on."""

import itertools

import pytest
import torch

from grpo import sampling
from grpo.advantage import advantages
from grpo.loss import grpo_loss, loss_weights
from grpo.stats import restrict, stats

V, T, G, TEMPERATURE = 3, 2, 2, 0.8
MASK = torch.ones(1, T, dtype=torch.bool)
LOGITS = torch.tensor([[[0.3, -0.5, 1.1], [0.9, 0.2, -0.4]]], dtype=torch.float64)
REFERENCE = torch.tensor([[[0.1, 0.4, -0.3], [-0.2, 0.6, 0.5]]], dtype=torch.float64)
KEPT = torch.tensor([[[True, False, True], [True, True, True]]])  # frozen
ALL = torch.ones_like(KEPT)
REWARD = torch.tensor(
    [[0.1, 0.9, 0.3], [0.5, 0.2, 0.8], [0.7, 0.4, 0.6]], dtype=torch.float64
)  # of the fill (y_0, y_1)
WEIGHTS = loss_weights(MASK, "sum", G, inputs=1, blanks=T, micro_batches=1)


def log_q(logits, kept):
    return restrict(torch.log_softmax(logits / TEMPERATURE, dim=-1), kept)[0]  # (T,V)


def fills(kept):
    return list(itertools.product(*(kept[0, t].nonzero().squeeze(1).tolist() for t in range(T))))


def expected(kept, gradient_of_group):
    """Σ over groups of P(group) · gradient, the draws of a group being independent."""
    q, total = log_q(LOGITS, kept).exp(), 0
    for group in itertools.product(fills(kept), repeat=G):
        probability = torch.stack([q[t, y[t]] for y in group for t in range(T)]).prod()
        total = total + probability * gradient_of_group(torch.tensor(group)[None])
    return total


def gradient_of_loss(completions, kept, advantage, **options):
    logits = LOGITS.clone().requires_grad_()
    logp, ref_logp, kl, entropy = stats(logits, REFERENCE, completions, kept, MASK, TEMPERATURE)
    loss, _ = grpo_loss(
        logp, logp.detach(), ref_logp, kl, entropy, advantage, MASK, WEIGHTS, **options
    )
    return torch.autograd.grad(loss, logits)[0]


def gradient_of_expected_reward(kept, reward=REWARD):
    logits = LOGITS.clone().requires_grad_()
    q = log_q(logits, kept).exp()
    value = sum(q[0, a] * q[1, b] * reward[a, b] for a, b in fills(kept))
    return torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("baseline, factor", [("leave_one_out", 1.0), ("mean", 1 - 1 / G)])
@pytest.mark.parametrize("level", ["token", "none"])
def test_expected_gradient_is_that_of_the_expected_reward(baseline, factor, level):
    def of_group(completions):
        rewards = REWARD[completions[0, :, 0], completions[0, :, 1]][None]  # (1,G)
        return gradient_of_loss(
            completions,
            KEPT,
            advantages(rewards, baseline, "none")[..., None],
            kl_beta=0.0,
            importance_sampling_level=level,
        )

    torch.testing.assert_close(
        -expected(KEPT, of_group), factor * gradient_of_expected_reward(KEPT), rtol=0, atol=1e-10
    )


XTC = {"xtc_threshold": 0.2, "xtc_probability": 0.5}


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.4}, XTC, XTC | {"min_p": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_on_policy_gradient_with_each_sampler_option(options, penalty):
    """On every kept set that the sampler makes, coin by coin, and with the penalty: the gradient of E[r] under what is drawn, all groups at once."""
    masked = torch.tensor([[0, 2]])  # only for the penalty: 0 and 2 are visible
    uniforms = torch.rand(40, G, T, generator=torch.Generator().manual_seed(0))
    z = sampling.penalise(LOGITS, masked, penalty)
    kept_sets = sampling.sample_completions(
        z.expand(40, T, V),
        masked.expand(40, T),
        MASK.expand(40, T),
        uniforms,
        TEMPERATURE,
        **options,
    )[1].unique(dim=0)
    assert len(kept_sets) > 1 if "xtc_probability" in options else len(kept_sets) == 1
    for kept in kept_sets[:, None]:
        logits = LOGITS.clone().requires_grad_()
        z = sampling.penalise(logits, masked, penalty)
        q = log_q(z, kept).exp()
        groups = torch.tensor(list(itertools.product(fills(kept), repeat=G)))  # (N,G,T)
        probability = q[torch.arange(T), groups].prod(dim=-1).prod(dim=-1).detach()  # (N,)
        N = len(groups)
        logp, ref_logp, kl, entropy = stats(
            z.expand(N, T, V),
            REFERENCE.expand(N, T, V),
            groups,
            kept.expand(N, T, V),
            MASK.expand(N, T),
            TEMPERATURE,
        )
        A = (
            advantages(REWARD[groups[..., 0], groups[..., 1]], "leave_one_out", "none")
            * probability[:, None]
        )
        loss, _ = grpo_loss(
            logp,
            logp.detach(),
            ref_logp,
            kl,
            entropy,
            A[..., None],
            MASK.expand(N, T),
            WEIGHTS.expand(N, T),
            kl_beta=0.0,
        )
        reward = sum(q[0, a] * q[1, b] * REWARD[a, b] for a, b in fills(kept))
        have, want = (
            torch.autograd.grad(loss, logits, retain_graph=True)[0],
            torch.autograd.grad(reward, logits)[0],
        )
        torch.testing.assert_close(-have, want, rtol=0, atol=1e-10)
        assert len(fills(kept)) == 1 or want.abs().max() > 1e-3


@pytest.mark.parametrize(
    "scored_on, baseline, right", [(KEPT, "none", True), (ALL, "none", False), (ALL, "mean", True)]
)
def test_sampling_from_one_distribution_and_differentiating_another(scored_on, baseline, right):
    """Drawn with truncation, scored without: wrong, as soon as the advantages of a group do not add up to 0. While they do (every ratio 1,
    a group baseline), the error cancels within the group, which is why it is so rarely noticed."""

    def of_group(completions):
        rewards = REWARD[completions[0, :, 0], completions[0, :, 1]][None]
        advantage = (
            rewards if baseline == "none" else advantages(rewards, "mean", "none") * G / (G - 1)
        )
        return gradient_of_loss(completions, scored_on, advantage[..., None], kl_beta=0.0)

    error = (-expected(KEPT, of_group) - gradient_of_expected_reward(KEPT)).abs().max()
    assert error < 1e-10 if right else error > 1e-2


def test_scaled_advantages_have_their_own_expectation():
    """Scaling weighs each group by 1/std: the expectation of Σ_j A_j ∇log q(y_j), with A written out."""

    def of_group(completions):
        rewards = REWARD[completions[0, :, 0], completions[0, :, 1]][None]
        return gradient_of_loss(
            completions, KEPT, advantages(rewards, "mean", "group")[..., None], kl_beta=0.0
        )

    def written_out(completions):
        a, b = (REWARD[tuple(y)] for y in completions[0].tolist())
        A = (a - b) / 2 / (abs(a - b) / 2 + 1e-4)
        logits = LOGITS.clone().requires_grad_()
        lq = log_q(logits, KEPT)
        log_pi = [lq[0, y[0]] + lq[1, y[1]] for y in completions[0].tolist()]
        return torch.autograd.grad((A * log_pi[0] - A * log_pi[1]) / G, logits)[0]

    torch.testing.assert_close(
        -expected(KEPT, of_group), expected(KEPT, written_out), rtol=0, atol=1e-10
    )


def test_exact_kl_is_the_sum_over_all_fills():
    logits = LOGITS.clone().requires_grad_()
    p, r = (torch.log_softmax(x[0] / TEMPERATURE, dim=-1) for x in (logits, REFERENCE))
    by_fills = sum(
        (p[0, a] + p[1, b]).exp() * (p[0, a] + p[1, b] - r[0, a] - r[1, b])
        for a in range(V)
        for b in range(V)
    )
    kl = stats(logits, REFERENCE, torch.zeros(1, G, T, dtype=torch.long), ALL, MASK, TEMPERATURE)[
        2
    ].sum()
    torch.testing.assert_close(kl, by_fills, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(kl, logits)[0],
        torch.autograd.grad(by_fills, logits)[0],
        rtol=0,
        atol=1e-12,
    )


@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
def test_expected_gradient_of_each_kl_estimator(estimator):
    """On-policy, untruncated: k1's is 0, those of k2 and the exact KL are that of KL(π‖ref), k3's is that of KL(ref‖π)."""
    have = expected(
        ALL,
        lambda completions: gradient_of_loss(
            completions,
            ALL,
            torch.zeros(1, G, 1, dtype=torch.float64),
            kl_beta=1.0,
            kl_estimator=estimator,
        ),
    )
    logits = LOGITS.clone().requires_grad_()
    p, r = (torch.log_softmax(x / TEMPERATURE, dim=-1) for x in (logits, REFERENCE))
    forward, reverse = (p.exp() * (p - r)).sum(), (r.exp() * (r - p)).sum()
    want = {"exact": forward, "k1": 0 * forward, "k2": forward, "k3": reverse}[estimator]
    torch.testing.assert_close(have, torch.autograd.grad(want, logits)[0], rtol=0, atol=1e-10)


def test_expected_entropy_bonus():
    have = gradient_of_loss(
        torch.zeros(1, G, T, dtype=torch.long),
        ALL,
        torch.zeros(1, G, 1, dtype=torch.float64),
        kl_beta=0.0,
        entropy_coef=1.0,
    )
    logits = LOGITS.clone().requires_grad_()
    p = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    torch.testing.assert_close(
        have, torch.autograd.grad((p.exp() * p).sum(), logits)[0], rtol=0, atol=1e-12
    )


def test_credit_per_blank_climbs_each_blanks_own_reward():
    """With rewards (B,G,T), blank t's expected gradient is that of E[reward_t] with respect to its own logits."""
    per_blank = torch.stack([REWARD, REWARD.T * 0.5])  # reward of blank 0, of blank 1

    def of_group(completions):
        y0, y1 = completions[0, :, 0], completions[0, :, 1]
        rewards = torch.stack([per_blank[0][y0, y1], per_blank[1][y0, y1]], dim=-1)[None]  # (1,G,T)
        return gradient_of_loss(
            completions, KEPT, advantages(rewards, "leave_one_out", "none"), kl_beta=0.0
        )

    want = torch.stack(
        [gradient_of_expected_reward(KEPT, per_blank[t])[:, t] for t in range(T)], dim=1
    )
    torch.testing.assert_close(-expected(KEPT, of_group), want, rtol=0, atol=1e-10)
