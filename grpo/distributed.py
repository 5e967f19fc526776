"""Let several processes share a step: `torchrun --nproc_per_node=N train_grpo.py ...`.

N processes with A micro-batches each take the same step as one process with N·A micro-batches.
Every process draws all inputs and random numbers of the step from the seed, and keeps its share.
The weights of the loss are normalized over all processes, so we add their gradients up instead of
averaging them. Anything that needs the whole step, such as the metrics, is gathered or summed. Only
the first process logs and saves. Without torchrun there's one process, and nothing here changes
what it computes.
"""

import atexit
import os

import torch
import torch.distributed as dist
from torch import Tensor

PROCESSES = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets both
RANK = int(os.environ.get("RANK", 0))  # this process's number


def is_first() -> bool:
    return RANK == 0


def join_processes(device: torch.device) -> None:
    """Make `device` this process's current GPU, and connect to the other processes."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if PROCESSES > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)


def largest_of_processes(number: int, device: torch.device) -> int:
    """Return the largest number that any process passes. All of them have to call this."""
    largest = torch.tensor(number, device=device)
    if PROCESSES > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def local_rows(x: Tensor) -> Tensor:
    """Take this process's rows of a tensor with a row for every input of the step."""
    return x.chunk(PROCESSES)[RANK]


def gather(x: Tensor) -> Tensor:
    """Undo `local_rows`: join the rows of all processes, in their order."""
    if PROCESSES == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(PROCESSES)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def total_over_processes(x: Tensor) -> Tensor:
    """Return the sum of x over all processes, and leave x alone."""
    if PROCESSES == 1:
        return x
    total = x.clone()
    dist.all_reduce(total)
    return total
