"""Put a network on its device, and call it as a policy or as a judge.

This is where the settings device, dtype, compile and kernel act.

Shapes: B masked inputs, T characters, N rows of tokens.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial

import torch

from data.user_mistake import Mistake
from grpo import kernel
from grpo.latent import Latent
from grpo.policy import Policy, Product
from grpo.truncation import truncates
from model.transformer import Generator, Judge

SINGLE_THREAD_BELOW = (
    500_000  # parameters; with fewer, threads wait for each other more than they compute
)
THREADS = torch.get_num_threads()  # what PyTorch uses by default


def set_threads(network: torch.nn.Module) -> None:
    """Compute on one CPU thread if the network is small. That also fixes the order of sums."""
    small = sum(weights.numel() for weights in network.parameters()) < SINGLE_THREAD_BELOW
    torch.set_num_threads(1 if small else THREADS)


def make_policy(network: Generator, config, device: torch.device) -> Policy:
    """Put a generator on its device, and wrap it as a `Policy`."""
    place(network, config, device)
    network.trunk.recompute = config.gradient_checkpointing
    distribution = partial(Latent if network.n_latent > 1 else Product, truncates=truncates(config))
    if kernel.usable(config, device, network):
        distribution = partial(Product, compute_log_probs=kernel.FusedLogProbs.apply)
    return Policy(network, distribution, config, autocast(config, device))


def make_judge(network: Judge, config, device: torch.device) -> Callable:
    """Put a judge on its device, and return it as a function: tokens (N,T) -> log-odds (N,T)."""
    place(network, config, device)
    return autocast(config, device)(network)  # torch.autocast is a decorator, too


def place(network: torch.nn.Module, config, device: torch.device) -> None:
    """Move a network to a device, and compile it if asked."""
    network.to(device)
    if config.compile:
        network.trunk.compile(dynamic=False)


def autocast(config, device: torch.device) -> torch.autocast:
    """Make a context in which networks compute in the dtype of the settings."""
    half = pick_dtype(config.dtype, device) == "bfloat16"
    return torch.autocast(device.type, torch.bfloat16, enabled=half)


def pick_device(name: str) -> torch.device:
    """Turn `auto` or a device's name into a device. Raises a Mistake for one that isn't here.

    Under torchrun, `auto` and `cuda` mean this process's own GPU.
    """
    here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name == "auto":
        name = "cuda" if len(here) > 1 else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if name not in here:  # mps has no float64, which we draw with
        raise Mistake(f"device={name} isn't one we can use here; use {' or '.join(here)}")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> str:
    """Turn `auto` into bfloat16 if the device has instructions for it, else into float32."""
    if name != "auto":
        return name
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu.get_capabilities().get("avx512_bf16")
    return "bfloat16" if native else "float32"


@contextlib.contextmanager
def uncompiled():
    """Run compiled networks as they are: some shapes are too rare to be worth compiling for.

    If nothing is compiled, this doesn't even import the compiler, which takes seconds.
    """
    stance = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:
        stance = torch.compiler.set_stance("force_eager")
    with stance:
        yield
