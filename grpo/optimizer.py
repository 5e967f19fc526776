"""Update the policy: learning rate, gradient clipping, AdamW. The reference follows, if asked."""

import math

import torch

from grpo import distributed
from grpo.distributed import total_over_processes

BETAS = (0.9, 0.99)  # how slowly AdamW forgets the mean gradient, and the mean squared gradient


def learning_rate(step: int, config) -> float:
    """Warm up linearly, then follow a cosine down to 0 (1608.03983, equation 5), and stay there."""
    steps = config.lr_decay_iters or config.max_iters
    if step >= steps:
        return 0.0
    warmup = min(config.warmup_iters, steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup) / (steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def make_adamw(network: torch.nn.Module, config) -> torch.optim.AdamW:
    """Make an AdamW (1711.05101) without weight decay: the KL is what holds the policy back."""
    return torch.optim.AdamW(
        network.parameters(), lr=config.learning_rate, betas=BETAS, weight_decay=0
    )


class Optimizer:
    """Add up the gradients of all processes, clip the sum, and take a step of `wrapped`.

    `wrapped` is an optimizer of PyTorch. It takes no step if the loss or the gradient of any
    process isn't finite.
    """

    def __init__(self, wrapped, grad_clip):
        self.wrapped = wrapped
        self.grad_clip = grad_clip
        self.parameters = [p for group in wrapped.param_groups for p in group["params"]]

    def set_learning_rate(self, lr):
        for group in self.wrapped.param_groups:
            group["lr"] = lr

    def step_if_finite(self, loss):
        """Update the parameters if the loss and the gradient of every process are finite.

        The scalar `loss` is this process's own. Returns the norm of the gradient before the clip.
        """
        if distributed.PROCESSES > 1:
            loss = total_over_processes(loss)
            for parameter in self.parameters:
                parameter.grad = total_over_processes(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.grad_clip or math.inf)
        if (norm + loss).isfinite():  # here the CPU waits for the GPU
            self.wrapped.step()
        self.wrapped.zero_grad()
        return norm


@torch.no_grad()
def update_reference(reference: torch.nn.Module, policy: torch.nn.Module, done: int, config):
    """After `done` steps, move the reference as reference_mode says (TR-DPO, 2404.09656).

    static    never
    ema       reference = ema_alpha · reference + (1 − ema_alpha) · policy, after every step
    periodic  reference = policy, every reference_update_freq steps

    With a reference that moves, the KL limits how fast the policy moves, and no longer how far it
    gets from where it began.
    """
    if config.reference_mode == "static":
        return
    if config.reference_mode == "periodic" and done % config.reference_update_freq:
        return
    kept = config.ema_alpha if config.reference_mode == "ema" else 0.0
    for r, p in zip(reference.parameters(), policy.parameters()):
        r.lerp_(p.to(r.device), 1 - kept)
