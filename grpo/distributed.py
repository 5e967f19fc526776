"""Several processes work on one step: `torchrun --nproc_per_node=N train_grpo.py ...`.

N processes of A micro-batches each take the step that one process takes with N·A of them. Every
process draws the whole step's inputs and random numbers from the seed and keeps its share. The
weights of the loss count over the whole step, so gradients are added up and not averaged. Rewards
are gathered, so that a baseline or a scale over the step sees all of them. The first process logs
and saves. Without torchrun, nothing here does anything.
"""

import atexit
import os

import torch
import torch.distributed as dist


def n_processes():
    """Count the processes that torchrun started: 1 without it."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank():
    """Tell which of the processes this is, from 0."""
    return int(os.environ.get("RANK", 0))


def is_first():
    return rank() == 0


def join(device):
    """Meet the other processes."""
    if n_processes() > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)


def largest_of_processes(number):
    """Agree on the largest of the numbers that the processes call this with."""
    numbers = [number] * n_processes()
    if len(numbers) > 1:
        dist.all_gather_object(numbers, number)
    return max(numbers)


def share(x):
    """Take this process's rows of a tensor that has a row for every input of the step."""
    return x.chunk(n_processes())[rank()]


def gather(x):
    """Undo `share`: the rows of all processes, in their order."""
    if n_processes() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(n_processes())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def total_over_processes(x):
    """Sum a tensor over all processes. The tensor itself stays as it is."""
    if n_processes() == 1:
        return x
    total = x.clone()
    dist.all_reduce(total)
    return total
