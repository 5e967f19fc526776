"""The reference that the KL holds the policy to. It is static, or follows the policy.

    ema         after every step, reference = (1 − ema_alpha) · reference + ema_alpha · policy
    periodic    after every reference_update_freq steps, reference = policy

TR-DPO (2404.09656) does both for DPO. A reference that follows lets the policy go further, one
trust region after another. So the KL limits its speed and no longer its distance.
"""

import copy

import torch


def make_reference(base, mode, state=None):
    """Return `base` if it will stay as it is, else a copy, with the weights `state` if given."""
    if mode == "static":
        return base
    reference = copy.deepcopy(base)
    if state:
        reference.load_state_dict(state)
    return reference


@torch.no_grad()
def update_reference(model, generator, done, config):
    """Move the reference's weights towards the policy's, after `done` steps."""
    if config.reference_mode == "ema":
        alpha = config.ema_alpha
    elif config.reference_mode == "periodic" and done % config.reference_update_freq == 0:
        alpha = 1.0
    else:
        return
    for r, p in zip(model.parameters(), generator.parameters()):
        r.lerp_(p.to(r.device), alpha)  # with alpha 1 exactly p
