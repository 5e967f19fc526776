"""Check the reference, which is the base model itself or a copy that follows the policy."""

import torch

from grpo.plumbing.config import Config
from grpo.reference import make_reference, update_reference


def models():
    """Make a base model and a policy."""
    torch.manual_seed(0)
    base = torch.nn.Linear(3, 2)
    policy = torch.nn.Linear(3, 2)
    return base, policy


def test_a_static_reference_is_the_base_model():
    base, policy = models()
    reference = make_reference(base, "static")
    before = base.weight.clone()
    update_reference(reference, policy, 1, Config(reference_mode="static"))
    assert reference is base
    assert torch.equal(base.weight, before)


def test_ema_moves_every_step_and_leaves_the_base_model():
    base, policy = models()
    reference = make_reference(base, "ema")
    start = base.weight.clone()
    for done in (1, 2):
        update_reference(reference, policy, done, Config(reference_mode="ema", ema_alpha=0.25))
    left = 0.75**2
    torch.testing.assert_close(reference.weight, left * start + (1 - left) * policy.weight)
    assert torch.equal(base.weight, start)


def test_periodic_copies_exactly_and_now_and_then():
    base, policy = models()
    reference = make_reference(base, "periodic")
    config = Config(reference_mode="periodic", reference_update_freq=3)
    for done, want in ((1, base), (2, base), (3, policy)):
        update_reference(reference, policy, done, config)
        assert torch.equal(reference.weight, want.weight)
