"""Check how gradients add up and are clipped, and the learning rate of each step.

That AdamW is what it should be is for test_one_file.py to check.
"""

import pytest
import torch

from grpo.optimizer import Optimizer, learning_rate
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


@pytest.mark.parametrize("grad_clip", [0.0, 1.5])
def test_steps_follow_the_gradient_with_its_norm_clipped(grad_clip):
    """The second gradient is so large that clipping changes the result. `step` returns the norm of
    the whole gradient before the clip."""
    weights = [torch.ones(6, requires_grad=True), torch.ones(2, requires_grad=True)]
    optimizer = Optimizer(torch.optim.SGD(weights), grad_clip)
    want = torch.ones(8)
    g = torch.Generator().manual_seed(1)
    gradients = torch.randn(3, 8, generator=g) * torch.tensor([[0.1], [9.0], [0.3]])
    for gradient, rate in zip(gradients, (0.01, 0.02, 0.005)):
        optimizer.set_learning_rate(rate)
        for part in (0.25, 0.75):  # the gradients of micro-batches add up
            loss = (torch.cat(weights) * part * gradient).sum()
            loss.backward()
        length = gradient.norm().item()
        assert optimizer.step_if_finite(loss.detach()).item() == pytest.approx(length)
        clipped = gradient * min(1, grad_clip / length) if grad_clip else gradient
        want -= rate * clipped
    torch.testing.assert_close(torch.cat(weights), want, rtol=1e-6, atol=1e-9)
