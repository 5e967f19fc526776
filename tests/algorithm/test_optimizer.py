"""Compare the optimizer with AdamW written by hand, and check the learning rate of each step."""

import pytest
import torch

from grpo.optimizer import Optimizer, learning_rate, make_adamw
from grpo.run.config import Config

SCHEDULE = {"learning_rate": 8e-3, "warmup_iters": 3, "max_iters": 11}
RATES = [2e-3, 4e-3, 6e-3, 8e-3]  # a linear warm-up, and from there on a cosine of eight steps
RATES += [8e-3 * (1 + c) / 2 for c in (0.92388, 0.70711, 0.38268, 0)]  # cos(i π/8)
RATES += [8e-3 * (1 - c) / 2 for c in (0.38268, 0.70711, 0.92388, 1)]


def test_the_rate_warms_up_and_falls_to_0_on_a_cosine():
    config = Config(**SCHEDULE)
    have = [learning_rate(step, config) for step in range(14)]
    assert have == pytest.approx([*RATES, 0, 0], rel=1e-4)
    sooner = Config(**SCHEDULE | {"max_iters": 100, "lr_decay_iters": 11})
    assert [learning_rate(step, sooner) for step in range(14)] == have
    cold = Config(**SCHEDULE | {"warmup_iters": 0})
    assert learning_rate(0, cold) == 8e-3, "the first rate of a run without warm-up"
    short = Config(**SCHEDULE | {"warmup_iters": 5, "lr_decay_iters": 2})
    have = [learning_rate(step, short) for step in range(4)]
    assert have == pytest.approx([8e-3 / 3, 2 * 8e-3 / 3, 0, 0]), "a shorter run only warms up"


def make(**settings):
    """Make a model of a matrix and a vector, and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    config = Config(**settings)
    return model, Optimizer(make_adamw(model, config), config.grad_clip)


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def slow_adamw(weights, gradients, rates, grad_clip):
    """Run AdamW (1711.05101, Algorithm 2) on a matrix of six numbers and a vector of two."""
    m = v = 0
    for i, (g, rate) in enumerate(zip(gradients, rates), 1):
        if grad_clip:
            g = g * min(1, grad_clip / g.norm().item())
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g**2
        weights = weights - rate * m / (1 - 0.9**i) / ((v / (1 - 0.99**i)).sqrt() + 1e-8)
    return weights


@pytest.mark.parametrize("grad_clip", [0.0, 1.5])
def test_steps_are_adamw_on_the_gradient_with_its_norm_clipped(grad_clip):
    """The second gradient is so large that clipping changes the result. `step` returns the norm of
    the whole gradient before the clip."""
    model, optimizer = make(grad_clip=grad_clip)
    g = torch.Generator().manual_seed(1)
    gradients = torch.randn(3, 8, generator=g).double() * torch.tensor([[0.1], [9.0], [0.3]])
    rates = [0.01, 0.02, 0.005]
    want = slow_adamw(weights_of(model), gradients, rates, grad_clip)
    for gradient, rate in zip(gradients, rates):
        optimizer.set_learning_rate(rate)
        for half in (0.25, 0.75):  # the gradients of micro-batches add up
            loss = (torch.cat([p.flatten() for p in model.parameters()]) * half * gradient).sum()
            loss.backward()
        norm = optimizer.step_if_finite(loss.detach())
        assert norm.item() == pytest.approx(gradient.norm().item()), "norm of the gradient"
    torch.testing.assert_close(weights_of(model), want, rtol=1e-6, atol=1e-9)
