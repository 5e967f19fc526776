import torch

from grpo.reference import make_reference, update_reference


def models():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)


def test_a_static_reference_is_the_untouched_one():
    untouched, policy = models()
    reference = make_reference(untouched, "static")
    before = untouched.weight.clone()
    update_reference(reference, policy, 1, "static", 0.5, 1)
    assert reference is untouched and torch.equal(untouched.weight, before)


def test_ema_moves_every_step_and_leaves_the_untouched_one():
    untouched, policy = models()
    reference, start = make_reference(untouched, "ema"), untouched.weight.clone()
    for done in (1, 2):
        update_reference(reference, policy, done, "ema", 0.25, 50)
    torch.testing.assert_close(reference.weight, 0.75**2 * start + (1 - 0.75**2) * policy.weight)
    assert torch.equal(untouched.weight, start)


def test_periodic_copies_exactly_and_now_and_then():
    untouched, policy = models()
    reference = make_reference(untouched, "periodic")
    for done in range(1, 4):
        update_reference(reference, policy, done, "periodic", 0.01, 3)
        assert torch.equal(reference.weight, policy.weight if done == 3 else untouched.weight)


def test_its_weights_come_back():
    untouched, policy = models()
    reference = make_reference(untouched, "ema", policy.state_dict())
    assert torch.equal(reference.weight, policy.weight) and not torch.equal(
        untouched.weight, policy.weight
    )
