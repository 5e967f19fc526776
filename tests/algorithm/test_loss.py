"""Compare every form of the loss with loops over b, g, t that are written from the papers.

Shapes: B masked inputs, G completions of each input, T characters.
"""

import math

import pytest
import torch

from data.per_word import number_words
from grpo.loss import grpo_loss, loss_weights
from grpo.policy import LogProbs
from grpo.run.config import Config

B, G, T = 3, 4, 7
LOSS_TYPES = ["grpo", "dapo", "bnpo", "dr_grpo", "sum"]
OBJECTIVES = [{"objective": name} for name in ("clip", "reinforce", "cispo", "gspo")]
EVERY_OBJECTIVE = pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda it: str(*it.values()))
MASK = torch.tensor(
    [[1, 1, 1, 0, 1, 1, 0], [0, 1, 0, 1, 0, 0, 0], [1, 0, 1, 1, 0, 1, 1]], dtype=torch.bool
)  # (B,T) micro-batch 0 has 2 inputs and 7 blanks, micro-batch 1 has 1 input and 5 blanks


def settings(**changes):
    """Make a config in which most numbers that the loss reads differ from their defaults."""
    own = {"clip_eps": 0.1, "clip_eps_high": 0.3, "entropy_coef": 0.2, "kl_beta": 0.3}
    own |= {"batch_size": 2, "group_size": G}
    return Config(**(own | changes))


def make_scores(mask, leaf=False, seed=0):
    """Make random `LogProbs` of completions, with zeros where mask (B,T) has no blank."""
    g = torch.Generator().manual_seed(seed)
    blank = mask[:, None].expand(-1, G, -1)  # (B,G,T)
    tensors = []
    for where, scale in ((blank, -2), (blank, -2), (mask, 1), (mask, 1)):
        x = scale * torch.rand(where.shape, generator=g, dtype=torch.float64) * where
        tensors.append(x.requires_grad_(leaf))
    return LogProbs(*tensors)


def make_advantages(words, each_word):
    """Draw an advantage for each word, or for each completion: -> (B,G,T)."""
    g = torch.Generator().manual_seed(2)
    each = torch.randn(len(words), G, 1 + T, generator=g, dtype=torch.float64)  # of word 0, 1, ...
    which = words if each_word else 0 * words
    return each.gather(-1, which[:, None].expand(-1, G, -1))


def slow_objective(logp, old_logp, A, t, completion, config):
    """Compute the objective of letter t: -> its value, and whether a bound acts on the letter.

    The formulas are those of the papers. logp and old_logp are (T,). `completion` lists the
    positions of all blanks. What .item() returns is a constant for the gradient.
    """
    rho = {s: (logp[s] - old_logp[s]).exp() for s in completion}
    low, high = 1 - config.clip_eps, 1 + config.clip_eps_high
    name = config.objective
    if name == "reinforce":
        return A * logp[t], False
    if name == "gspo":
        # The ratio is the geometric mean. Only logp[t] gives it a gradient, as in GSPO-token.
        mean = math.prod(rho[s].item() for s in completion) ** (1 / len(completion))
        rho[t] = mean * (logp[t] - logp[t].item()).exp()
    if name in ("clip", "gspo"):
        clipped = min(max(rho[t].item(), low), high)
        value = rho[t] * A if rho[t] * A <= clipped * A else torch.tensor(clipped * A)
        return value, not value.requires_grad
    if name == "cispo":
        return min(rho[t].item(), high) * A * logp[t], rho[t].item() > high


def slow_kl(d, exact, estimator):
    """Compute the KL penalty of one letter from d = ref_logp − logp, or from the exact KL."""
    return {"exact": exact, "k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}[estimator]


def slow_loss(now, old, advantages, words, config):
    """Compute the loss of an update letter by letter, and count where a bound acts."""
    loss, stopped = 0.0, 0
    n, length = words.shape
    lengths = [int((row > 0).sum()) for row in words]
    micro_batches = [
        sum(lengths[i : i + config.batch_size]) for i in range(0, n, config.batch_size)
    ]
    for b in range(n):
        of_micro_batch = micro_batches[b // config.batch_size]
        weight = {
            "grpo": 1 / (n * G * lengths[b]),
            "dapo": 1 / (G * sum(lengths)),
            "bnpo": 1 / (len(micro_batches) * G * of_micro_batch),
            "dr_grpo": 1 / (n * G * length),
            "sum": 1 / (n * G),
        }[config.loss_type]
        blanks = [t for t in range(length) if words[b, t]]
        for g in range(G):
            for t in blanks:
                A = advantages[b, g, t].item()
                value, stops = slow_objective(now.logp[b, g], old.logp[b, g], A, t, blanks, config)
                d = now.ref_logp[b, g, t].detach() - now.logp[b, g, t]
                kl = slow_kl(d, now.kl[b, t], config.kl_estimator)
                terms = -value + config.kl_beta * kl - config.entropy_coef * now.entropy[b, t]
                loss = loss + weight * terms
                stopped += stops
    return loss, stopped


def assert_equals_the_loops(now, old, advantages, words, config):
    """Compare the loss, gradients and `clipped` of an update in micro-batches with `slow_loss`."""
    mask = words > 0
    weights = loss_weights(mask, config)
    have, clipped = 0.0, 0
    for part in torch.arange(len(mask)).split(config.batch_size):
        inputs = (now[part], old[part], advantages[part], mask[part], weights[part])
        loss, losses, bounded = grpo_loss(*inputs, config)
        have, clipped = have + loss, clipped + bounded.sum()
        assert losses["loss"] == loss
    want, stopped = slow_loss(now, old, advantages, words, config)
    assert have.item() == pytest.approx(want.item(), rel=1e-6, abs=1e-7)
    assert clipped == stopped
    leaves = {"logp": now.logp, "kl": now.kl, "entropy": now.entropy}
    found, wanted = (
        torch.autograd.grad(loss, leaves.values(), allow_unused=True, materialize_grads=True)
        for loss in (have, want)
    )
    for name, a, b in zip(leaves, found, wanted):
        assert (a - b).abs().max() <= 1e-6 * b.abs().max(), f"the gradient of {name}"


@EVERY_OBJECTIVE
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("each_word", [True, False])
def test_loss_and_gradient_equal_the_loops(objective, loss_type, each_word):
    """Ratios differ from 1, and advantages have both signs. The second micro-batch is smaller."""
    config = settings(loss_type=loss_type, **objective)
    now, old = make_scores(MASK, leaf=True), make_scores(MASK, seed=1)
    words = number_words(~MASK, MASK)
    assert_equals_the_loops(now, old, make_advantages(words, each_word), words, config)


@pytest.mark.parametrize("estimator", ["exact", "k1", "k2", "k3"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_each_kl_estimator_equals_the_loops(estimator, loss_type):
    config = settings(kl_estimator=estimator, loss_type=loss_type)
    now, old = make_scores(MASK, leaf=True, seed=3), make_scores(MASK, seed=4)
    words = number_words(~MASK, MASK)
    assert_equals_the_loops(now, old, make_advantages(words, "word"), words, config)


@EVERY_OBJECTIVE
@pytest.mark.parametrize("A", [0.5, -0.5])
def test_a_bound_acts_from_its_edge_on(objective, A):
    """Each ratio lies a little inside or outside of one of the bounds. Words have one letter."""
    config = settings(**objective)
    p = 0.3  # the probability of each letter when it was drawn
    edges = (0.9, 1.3, math.exp(-0.1), math.exp(0.3), 2.0, (p + 0.3) / p, (p - 0.1) / p)
    ratios = [edge * side for edge in edges for side in (1 - 1e-6, 1 + 1e-6)]
    rho = torch.tensor(ratios, dtype=torch.float64)[:, None, None].expand(-1, G, -1)  # (n,G,1)
    logp, other = (p * rho).log(), 0 * rho[:, 0]
    now = LogProbs(*[x.clone().requires_grad_() for x in (logp, logp, other, other)])
    old = LogProbs(*[math.log(p) + 0 * x for x in (logp, logp, other, other)])
    words = torch.ones(len(rho), 1, dtype=torch.long)
    assert_equals_the_loops(now, old, torch.full_like(rho, A), words, config)


@EVERY_OBJECTIVE
def test_the_first_update_of_every_objective_has_the_gradient_of_reinforce(objective):
    """At the first update each ratio ρ is 1. The gradient by a letter's logp is −A · weight / G.

    A library shipped an objective that had no gradient at all.
    """
    config = settings(kl_beta=0, entropy_coef=0, loss_type="dapo", **objective)
    now, words = make_scores(MASK, leaf=True), number_words(~MASK, MASK)
    A = make_advantages(words, "word") * MASK[:, None]
    weights = MASK / MASK.sum()
    loss, *_ = grpo_loss(now, now.map(torch.detach), A, MASK, weights, config)
    (slope,) = torch.autograd.grad(loss, now.logp)
    torch.testing.assert_close(slope, -A * weights[:, None] / G)
