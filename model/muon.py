"""Muon: for every matrix, a step in which all directions of its gradient weigh alike.

Source: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/); the scale of the step is
that of Liu et al. 2025 (2502.16982), so that a learning rate and a weight decay of AdamW's fit.
torch.optim.Muon with adjust_lr_fn="match_rms_adamw" is the same in bfloat16, which on a CPU that
does not multiply it takes longer than the whole rest of a pretraining step.
"""

import torch


def orthogonalise(g):
    """The matrix with the singular vectors of g, and singular values near 1: (m,n) -> (m,n).

    Five steps of Newton-Schulz, X <- aX + (bA + cA²)X with A = XXᵀ, in the type of g. Values of
    0.003 of the norm of g and more come to 0.7 to 1.2; smaller ones grow 485 times at most.
    """
    x = g.T if g.shape[0] > g.shape[1] else g  # the smaller A
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.T
        polynomial = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + polynomial @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum of the gradient, made orthogonal, and decoupled weight decay."""

    def __init__(self, matrices, lr, weight_decay, momentum=0.95):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(matrices, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr = group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                average = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                ahead = p.grad.lerp(average, group["momentum"])
                as_adamw = 0.2 * max(p.shape) ** 0.5  # the root mean square of its steps is 0.2
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(orthogonalise(ahead), alpha=-lr * as_adamw)
