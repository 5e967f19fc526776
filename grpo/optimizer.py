"""Update the policy with AdamW, set its learning rate, and guard against bad gradients."""

import math

import torch

from grpo.distributed import total_over_processes


def learning_rate(step, config):
    """Warm up linearly, then follow a cosine down to min_lr (1608.03983, equation 5)."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    decay_steps = (config.lr_decay_iters or config.max_iters) - config.warmup_iters
    progress = min(1.0, (step - config.warmup_iters) / max(1, decay_steps))
    falling = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to 0
    return config.min_lr + falling * (config.learning_rate - config.min_lr)


class Optimizer:
    """This adds up the gradients of all processes, clips the sum, and takes a step of AdamW.

    If the loss or the gradient of any process is not finite, it takes no step.
    """

    def __init__(self, model, config):
        decayed = [p for p in model.parameters() if p.dim() >= 2]  # matrices only
        others = [p for p in model.parameters() if p.dim() < 2]
        self.parameters = decayed + others
        self.adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
        )
        self.grad_clip = config.grad_clip

    def set_learning_rate(self, lr):
        for group in self.adamw.param_groups:
            group["lr"] = lr

    def step(self, loss):
        """Update the parameters if the loss and the gradient of every process are finite.

        The scalar `loss` is this process's own. Returns the norm of the gradient before the clip.
        """
        loss = total_over_processes(loss)
        for p in self.parameters:
            p.grad = total_over_processes(p.grad)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.grad_clip or math.inf)
        if (norm + loss).isfinite():  # here the CPU waits for the GPU
            self.adamw.step()
        self.adamw.zero_grad()
        return norm
