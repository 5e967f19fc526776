"""Check how the reference follows the policy. That it stays where it is by default is for
test_one_file.py to check.
"""

import torch

from grpo.optimizer import update_reference
from grpo.run.config import Config


def models():
    """Make a reference and a policy: -> both, and the weights of the reference."""
    torch.manual_seed(0)
    reference = torch.nn.Linear(3, 2)
    policy = torch.nn.Linear(3, 2)
    return reference, policy, reference.weight.clone()


def test_ema_moves_every_step_and_leaves_the_policy():
    reference, policy, start = models()
    goal = policy.weight.clone()
    for done in (1, 2):
        update_reference(reference, policy, done, Config(reference_mode="ema", ema_alpha=0.75))
    left = 0.75**2
    torch.testing.assert_close(reference.weight, left * start + (1 - left) * goal)
    assert torch.equal(policy.weight, goal)


def test_periodic_copies_exactly_and_now_and_then():
    reference, policy, start = models()
    config = Config(reference_mode="periodic", reference_update_freq=3)
    for done, want in ((1, start), (2, start), (3, policy.weight)):
        update_reference(reference, policy, done, config)
        assert torch.equal(reference.weight, want)
