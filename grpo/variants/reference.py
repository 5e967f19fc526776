"""Let the reference, which the KL keeps the policy close to, follow the policy.

Each mode is a function of the networks `reference` and `generator`, of the number of steps that
were made, and of the settings. To add one of your own, write such a function and a line in
REFERENCE_MODES. If the reference follows, the KL limits how fast the policy moves, and no longer
how far it gets from the base model. The two that follow are from TR-DPO (2404.09656).
"""

import torch


def move(reference, generator, share):
    """Move each weight of the reference by a share of its way to the policy's; 1 copies it."""
    for r, p in zip(reference.parameters(), generator.parameters()):
        r.lerp_(p.to(r.device), share)


def static(reference, generator, done, config):
    """The reference never changes."""


def ema(reference, generator, done, config):
    """reference = (1 − ema_alpha) · reference + ema_alpha · policy, after every step."""
    move(reference, generator, config.ema_alpha)


def periodic(reference, generator, done, config):
    """reference = policy, after every reference_update_freq steps."""
    if done % config.reference_update_freq == 0:
        move(reference, generator, 1.0)


REFERENCE_MODES = {"static": static, "ema": ema, "periodic": periodic}


@torch.no_grad()
def update_reference(reference, generator, done, config):
    """After `done` steps, change the network `reference` as the setting reference_mode says."""
    REFERENCE_MODES[config.reference_mode](reference, generator, done, config)
