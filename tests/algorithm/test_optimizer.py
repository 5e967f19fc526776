"""Check gradients that are clipped, the learning rate, and a reference that follows.

That AdamW is what it should be, and that the reference stays by default, is for test_one_file.py to
check.
"""

import math

import pytest
import torch
from conftest import numbers

from grpo.optimizer import Optimizer, learning_rate, update_reference
from grpo.run.config import Config

RATES = [2e-3, 4e-3, 6e-3, 8e-3]  # a linear warm-up, and from there on a cosine of eight steps
RATES += [4e-3 * (1 + math.cos(i / 8 * math.pi)) for i in range(1, 9)]


@pytest.mark.parametrize("steps", [{"max_iters": 11}, {"max_iters": 100, "lr_decay_iters": 11}])
def test_the_rate_warms_up_and_falls_to_0_on_a_cosine(steps):
    config = Config(learning_rate=8e-3, warmup_iters=3, **steps)
    have = [learning_rate(step, config) for step in range(14)]
    assert have == pytest.approx([*RATES, 0, 0], rel=1e-4)


def test_a_long_schedule_never_rises_again():
    """It could begin anew after some steps that a short run doesn't reach."""
    config = Config(learning_rate=1.0, warmup_iters=5, max_iters=2000)
    rates = [learning_rate(step, config) for step in range(5, 2000)]
    assert rates == sorted(rates, reverse=True) and rates[0] == 1 and rates[-1] < 1e-5


@pytest.mark.parametrize("grad_clip", [0.0, 1.5])
def test_steps_follow_the_gradient_with_its_norm_clipped(grad_clip):
    """The second gradient is so large that clipping changes the result."""
    weights = torch.ones(8, requires_grad=True)
    optimizer = Optimizer(torch.optim.SGD([weights]), grad_clip)
    want = torch.ones(8)
    gradients = numbers(1, 3, 8) * torch.tensor([[0.1], [9.0], [0.3]])
    for gradient, rate in zip(gradients, (0.01, 0.02, 0.005)):
        optimizer.set_learning_rate(rate)
        loss = (weights * gradient).sum()
        loss.backward()
        length = gradient.norm().item()  # before the clip
        assert optimizer.step_if_finite(loss.detach()).item() == pytest.approx(length)
        want -= rate * gradient * (min(1, grad_clip / length) if grad_clip else 1)
    torch.testing.assert_close(weights.detach(), want)


@pytest.mark.parametrize(
    "settings, moved",
    [
        ({"reference_mode": "static"}, [0, 0, 0]),
        ({"reference_mode": "ema", "ema_alpha": 0.75}, [1 / 4, 7 / 16, 37 / 64]),
        ({"reference_mode": "periodic", "reference_update_freq": 3}, [0, 0, 1]),
    ],
)
def test_the_reference_moves_this_far_towards_the_policy(settings, moved):
    reference, policy = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    start, goal = reference.weight.clone(), policy.weight.clone()
    for done, share in enumerate(moved, 1):
        update_reference(reference, policy, done, Config(**settings))
        torch.testing.assert_close(reference.weight, start + share * (goal - start))
    assert torch.equal(policy.weight, goal)
