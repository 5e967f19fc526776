"""Several processes, one step: `torchrun --nproc_per_node=N train_grpo.py ...`.

N processes of A micro-batches each take the step that one process takes with N·A of them. Every
process draws the whole step's inputs and uniforms from the seed and keeps its share; the weights
of the loss count over the whole step, so gradients are added up, not averaged; rewards are
gathered, so that a baseline or a scale over the step sees all of them. The first process logs and
saves. Without torchrun everything here does nothing.
"""

import atexit
import os

import torch
import torch.distributed as dist


def world():
    """How many processes torchrun started, and which of them this is."""
    return int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))


def is_first():
    return world()[1] == 0


def join(device):
    """Meet the other processes."""
    if world()[0] > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)


def agree(number):
    """The largest of the numbers that the processes call this with."""
    numbers = [number] * world()[0]
    if len(numbers) > 1:
        dist.all_gather_object(numbers, number)
    return max(numbers)


def share(x):
    """Of something with a row for every input of the step, the rows of this process."""
    size, rank = world()
    return x.chunk(size)[rank]


def gather(x):
    """The inverse of `share`: the rows of all processes, in their order."""
    size, _ = world()
    if size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)  # size times as many rows


def add_up(tensors):
    """Replace each tensor by its sum over all processes."""
    if world()[0] > 1:
        for x in tensors:
            dist.all_reduce(x)
