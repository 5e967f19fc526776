"""AdamW, its learning rate, and what may go wrong in an update: huge or non-finite gradients."""

import math

import torch

from grpo.plumbing.distributed import add_up


def learning_rate(step, config):
    """Linear warm-up, then a cosine from learning_rate to min_lr (1608.03983, equation 5)."""
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    decay_steps = (config.lr_decay_iters or config.max_iters) - config.warmup_iters
    progress = min(1.0, (step - config.warmup_iters) / max(1, decay_steps))
    falling = 0.5 * (1 + math.cos(math.pi * progress))  # from 1 to 0
    return config.min_lr + falling * (config.learning_rate - config.min_lr)


class Optimizer:
    """AdamW whose gradients are added up over processes, clipped, and dropped if not finite."""

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
        self.loss = 0  # of this update so far, all micro-batches

    def set_learning_rate(self, lr):
        for group in self.adamw.param_groups:
            group["lr"] = lr

    def backward(self, loss):
        """Add the gradient of one micro-batch's loss."""
        loss.backward()
        self.loss = self.loss + loss.detach()

    def step(self):
        """Update the parameters -> the gradient's norm before clipping."""
        add_up([*(p.grad for p in self.parameters), self.loss])
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.grad_clip or math.inf)
        if (norm + self.loss).isfinite():  # waits for a GPU, once an update
            self.adamw.step()
        self.adamw.zero_grad()
        self.loss = 0
        return norm
