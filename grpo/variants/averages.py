"""How the losses of the blanks are averaged: alternatives to GRPO's mean of means.

Each average is a function of the mask (b,T) of an update's inputs, as float, and of the settings.
It returns the weight of each blank (b,T), by which its loss is multiplied before all are added up.
The G completions of an input have equal weights, so a weight holds a factor 1/G. To add one of your
own, write such a function and a line in LOSS_TYPES. The name of the line is then a value of the
setting `loss_type`.

Shapes: b inputs of an update, T characters, G completions of each.
"""

import torch

from grpo.distributed import n_processes, total_over_processes


def dapo(mask, config):
    """Average all blanks of the update. In DAPO (2503.14476, equation 8) it is those of a group."""
    blanks = total_over_processes(mask.sum()).clamp(min=1)
    return mask / (blanks * config.group_size)


def bnpo(mask, config):
    """Average all blanks of each micro-batch, then the micro-batches (TRL's name).

    So the loss depends on how an update is cut into micro-batches, unlike all the others.
    """
    parts = mask.split(config.batch_size)
    means = torch.cat([part / part.sum().clamp(min=1) for part in parts])  # (b,T)
    return means / (len(parts) * n_processes() * config.group_size)


def total(mask, config):
    """Add up the blanks of each completion, then average the completions.

    This is the estimate that follows from the policy gradient theorem.
    """
    return mask / (len(mask) * n_processes() * config.group_size)


def dr_grpo(mask, config):
    """Divide `sum` by the constant T: Dr. GRPO (2503.20783)."""
    return total(mask, config) / mask.shape[1]


LOSS_TYPES = {"dapo": dapo, "bnpo": bnpo, "sum": total, "dr_grpo": dr_grpo}
