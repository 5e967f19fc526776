"""Let the reference, which the KL keeps the policy close to, follow the policy.

    static      the reference never changes
    ema         after every step, reference = (1 − ema_alpha) · reference + ema_alpha · policy
    periodic    after every reference_update_freq steps, reference = policy

The last two are from TR-DPO (2404.09656). If the reference follows, the KL limits how fast the
policy moves, and no longer how far it gets from the base model.
"""

import torch


@torch.no_grad()
def update_reference(reference, generator, done, config):
    """After `done` steps, move the network `reference` towards the network `generator`."""
    if config.reference_mode == "ema":
        alpha = config.ema_alpha
    elif config.reference_mode == "periodic" and done % config.reference_update_freq == 0:
        alpha = 1.0
    else:
        return
    for r, p in zip(reference.parameters(), generator.parameters()):
        r.lerp_(p.to(r.device), alpha)  # alpha = 1 copies p exactly
