"""Let several processes work on one step: `torchrun --nproc_per_node=N train_grpo.py ...`.

If each of N processes takes A micro-batches, the step is the same as with one process that takes
N·A micro-batches. Every process draws the whole step's inputs and random numbers from the seed and
keeps its share. The loss gives each blank a weight, which is normalised over all processes. So we
add up the gradients of the processes and do not average them. Some values need the whole step, such
as the metrics and the standard deviation that scale_rewards=batch divides by. For these we gather
or add up the tensors of all processes. Only the first process logs and saves. Without torchrun
there is a single process, and these functions change nothing.
"""

import atexit
import os

import torch
import torch.distributed as dist


def n_processes():
    """Return how many processes torchrun started, or 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank():
    """Return the number of this process, counted from 0."""
    return int(os.environ.get("RANK", 0))


def is_first():
    return rank() == 0


def join_processes(device):
    """Make `device` this process's current GPU, and connect with the processes of torchrun."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if n_processes() > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)


def wait_for_all():
    """Return once every process has come here."""
    if n_processes() > 1:
        dist.barrier()


def largest_of_processes(number):
    """Return the largest number that any process passes. All of them have to call this."""
    numbers = [number] * n_processes()
    if len(numbers) > 1:
        dist.all_gather_object(numbers, number)
    return max(numbers)


def share(x):
    """Take this process's rows of a tensor that has a row for every input of the step."""
    return x.chunk(n_processes())[rank()]


def gather(x):
    """Undo `share`: join the rows of all processes, in the order of the processes."""
    if n_processes() == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(n_processes())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def total_over_processes(x):
    """Return the sum of x over all processes, and leave x as it is."""
    if n_processes() == 1:
        return x
    total = x.clone()
    dist.all_reduce(total)
    return total
