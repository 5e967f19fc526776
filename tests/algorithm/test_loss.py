"""Compare every form of the loss with loops over b, g, t that are written from the papers.

Shapes: B masked inputs, G completions of each input, T characters.
"""

import math
from collections import Counter
from itertools import product

import pytest
import torch
from conftest import BLANK, encode, numbers

from grpo.loss import OBJECTIVES, blanks_that_learn, grpo_loss, loss_weights
from grpo.policy import LogProbs
from grpo.run.config import Config

B, G = 4, 4
# (B,T) micro-batch 0 has 3 inputs and 7 blanks, micro-batch 1 has 1 input and 5 blanks
MASK = encode("___a__a", "a_a_aaa", "aaaaaaa", "_a__a__") == BLANK
LEARNS = MASK & (encode("__a__a_") == BLANK)  # (B,T) four blanks don't


def settings(**changes):
    """Make a config in which most numbers that the loss reads differ from their defaults."""
    own = {"clip_eps": 0.1, "clip_eps_high": 0.3, "entropy_coef": 0.2, "kl_beta": 0.3}
    return Config(**own | {"batch_size": 3} | changes)


def make_scores(leaf=False, seed=0):
    """Make random `LogProbs` of completions, with zeros where there's no blank."""
    tensors = [-2 * numbers(seed, B, G, 7).abs() * MASK[:, None] for seed in (seed, seed + 1)]
    tensors += [numbers(seed, B, 7).abs() * MASK for seed in (seed + 2, seed + 3)]
    return LogProbs(*(x.requires_grad_(leaf) for x in tensors))


ADVANTAGES = numbers(8, B, G)


def slow_objective(logp, old_logp, A, t, completion, config):
    """Compute the objective of character t: -> its value, and whether it's at a bound.

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
    if name != "cispo":
        clipped = min(max(rho[t].item(), low), high)
        value = rho[t] * A if rho[t] * A <= clipped * A else torch.tensor(clipped * A)
        return value, not value.requires_grad
    return min(rho[t].item(), high) * A * logp[t], rho[t].item() > high


def slow_figures(now, old, config):
    """Compute the figures of an update character by character."""
    T = MASK.shape[1]
    lengths = MASK.sum(dim=1).tolist()
    sums = Counter()
    for b, g, t in product(range(B), range(G), range(T)):
        if not MASK[b, t]:
            continue
        weight = {
            "grpo": 1 / (B * G * lengths[b]),
            "dapo": 1 / (G * sum(lengths)),
            "dr_grpo": 1 / (B * G * T),
            "sum": 1 / (B * G),
        }[config.loss_type]
        logp, entropy = now.logp[b, g, t], now.entropy[b, t]
        d, moved = now.ref_logp[b, g, t].detach() - logp, logp - old.logp[b, g, t]
        sums.update(blanks=1 / G, mean_log_prob=logp / G, approx_kl=(moved.exp() - 1 - moved) / G)
        sums.update(mean_kl=now.kl[b, t] / G, entropy=entropy / G)
        kl = {"exact": now.kl[b, t], "k1": -d, "k2": d * d / 2, "k3": d.exp() - d - 1}
        penalty = weight * config.kl_beta * kl[config.kl_estimator]
        sums.update(kl_penalty=penalty, loss=penalty - weight * config.entropy_coef * entropy)
        if LEARNS[b, t]:
            blanks = MASK[b].nonzero().flatten().tolist()
            scores = now.logp[b, g], old.logp[b, g], ADVANTAGES[b, g].item()
            objective, at_bound = slow_objective(*scores, t, blanks, config)
            sums.update(pg_loss=-weight * objective, loss=-weight * objective)
            sums.update(clip_ratio=at_bound / G)
    return sums


@pytest.mark.parametrize(
    "objective, estimator",
    [("clip", "exact"), ("reinforce", "k1"), ("cispo", "k2"), ("gspo", "k3")],
)
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "sum"])
def test_figures_and_gradient_equal_the_loops(objective, estimator, loss_type):
    """Ratios differ from 1, and advantages have both signs. The second micro-batch is smaller."""
    config = settings(loss_type=loss_type, objective=objective, kl_estimator=estimator)
    now, old = make_scores(leaf=True), make_scores(seed=4)
    weights = loss_weights(MASK, config)
    have, loss = Counter(), 0
    for part in torch.arange(B).split(config.batch_size):
        inputs = (now, old, ADVANTAGES, LEARNS, MASK, weights)
        loss_of_part, figures = grpo_loss(*(x[part] for x in inputs), config)
        loss = loss + loss_of_part
        have.update(figures)
    want = slow_figures(now, old, config)
    assert have.keys() == want.keys()
    for name, x in want.items():
        value = torch.as_tensor(x).item()
        assert have[name].item() == pytest.approx(value, rel=1e-6, abs=1e-7), name
    leaves = now.logp, now.kl, now.entropy
    gradients = [
        torch.autograd.grad(x, leaves, allow_unused=True, materialize_grads=True)
        for x in (loss, want["loss"])
    ]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("objective", [*OBJECTIVES])
def test_the_first_update_of_every_objective_has_the_gradient_of_reinforce(objective):
    """At the first update each ratio ρ is 1. The gradient by a character's logp is −A · weight / G.

    A library shipped an objective that had no gradient at all.
    """
    config = settings(kl_beta=0, entropy_coef=0, objective=objective)
    now, A, weights = make_scores(leaf=True), ADVANTAGES, MASK / MASK.sum()
    loss, _ = grpo_loss(now, now.map(torch.detach), A, MASK, MASK, weights, config)
    (slope,) = torch.autograd.grad(loss, now.logp)
    torch.testing.assert_close(slope, -A[..., None] * weights[:, None] / G)


@pytest.mark.parametrize(
    "share, learns",
    [
        (0.4, [[0, 1, 1, 0], [1, 0, 0, 0]]),  # two of five blanks, and one more by a tie
        (0.2, [[0, 1, 0, 0], [0, 0, 0, 0]]),
        (1.0, [[1, 1, 1, 0], [1, 1, 0, 0]]),
    ],
)
def test_only_the_most_uncertain_blanks_learn(share, learns):
    """Only blanks count. The entropy of a visible character is ignored, however large it is."""
    entropy = torch.tensor([[0.1, 0.9, 0.5, 9.0], [0.5, 0.2, 9.0, 9.0]])  # (B,T)
    config = Config(top_entropy_quantile=share)
    assert blanks_that_learn(entropy, entropy < 9, config).int().tolist() == learns
