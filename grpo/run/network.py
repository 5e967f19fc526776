"""Put a network on its device, and call it as a policy or as a judge.

This is where every `auto` of the settings becomes something: device, dtype, compile, kernel.

Shapes: B masked inputs, T characters, N rows of tokens.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from data.user_mistake import Mistake
from grpo import kernel
from grpo.latent import Latent
from grpo.policy import Policy, Product
from grpo.truncation import Truncated, truncates, with_penalty

SMALL = 500_000  # parameters; with fewer, threads wait for each other more than they compute
THREADS = torch.get_num_threads()  # what PyTorch uses by default


def set_threads(network: torch.nn.Module) -> None:
    """Compute on one CPU thread if the network is small. That also fixes the order of sums."""
    small = sum(weights.numel() for weights in network.parameters()) < SMALL
    torch.set_num_threads(1 if small else THREADS)


def make_policy(network: torch.nn.Module, config, device: torch.device) -> Policy:
    """Put a generator on its device, and wrap it as a `Policy`."""
    settled = settle(config, device, network)
    kind = Truncated if truncates(config) else Product
    if network.n_latent > 1:
        kind = Latent
    if settled.kernel == "cuda":
        kind = kernel.FusedProduct
    if config.repetition_penalty != 1:
        kind = with_penalty(kind, network.blank)
    return Policy(network, on_device(network, device, settled), kind, settled)


def make_judge(network: torch.nn.Module, config, device: torch.device) -> Callable:
    """Wrap a judge's network as a function: tokens (N,T) -> log-odds (N,T), on the same device."""
    call = on_device(network, device, settle(config, device))

    def judge(tokens: Tensor) -> Tensor:
        return call(tokens).to(tokens.device)

    return judge


def on_device(network: torch.nn.Module, device: torch.device, config) -> Callable:
    """Move a network to `device`, and return a function that calls it there.

    The function takes the network's inputs on any device. It autocasts and is compiled as `config`
    says, which has no `auto` anymore.
    """
    network.to(device)
    if config.compile == "true":
        network.trunk.compile(dynamic=False)
    half = config.dtype == "bfloat16"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=half)
    padded = bool(config.prompts_file)

    def call(*inputs, **options):
        with autocast:
            return network(*(x.to(device) for x in inputs), padded=padded, **options)

    return call


def settle(config, device: torch.device, network: torch.nn.Module | None = None):
    """Return the settings with each `auto` resolved. Only generators use the kernel."""
    settled = replace(
        config,
        device=device.type,
        dtype=pick_dtype(config.dtype, device),
        compile=pick_compile(config.compile, device),
    )
    if network:
        settled = replace(settled, kernel=kernel.choose(settled, device, network))
    return settled


def pick_device(name: str) -> torch.device:
    """Turn `auto` or a device's name into a device. Raises a Mistake for one that isn't here.

    Under torchrun, `auto` and `cuda` mean this process's own GPU.
    """
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if name == "cuda" or (name == "auto" and gpus):
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    elif name == "auto":
        name = "cpu"
    if name not in ("cpu", *gpus):
        raise Mistake(f"device={name} isn't on this machine; use {' or '.join(['cpu', *gpus])}")
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


@functools.cache
def can_compile(device_type: str) -> bool:
    """Try whether torch.compile works. On a CPU it needs a C++ compiler with headers."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(64, device=device_type))
    except Exception:  # the error's type depends on what's missing or broken
        return False
    return True


def pick_compile(name: str, device: torch.device) -> str:
    """Turn `auto` into "true" on CUDA if torch.compile works there, else into "false".

    On a CPU compiling takes a minute, too long for a short run. Raises a Mistake if the user asks
    for "true" and torch.compile doesn't work.
    """
    wanted = name == "true" or (name == "auto" and device.type == "cuda")
    works = wanted and can_compile(device.type)
    if name == "true" and not works:
        raise Mistake(
            f"compile=true doesn't work on {device.type}: it needs a compiler (C++ with headers, or"
            " triton for cuda); set compile=false"
        )
    return "true" if works else "false"
