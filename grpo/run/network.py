"""Put a network on its device, and call it as a policy or as a judge.

Here every `auto` of the settings is resolved: device, dtype, compile and kernel. A policy maps
masked inputs to a distribution over their fills. A judge maps texts to log-odds.

Shapes: B masked inputs, T characters, N rows of tokens.
"""

import contextlib
import functools
import os
import sys
from dataclasses import replace

import torch

from data.user_mistake import refuse
from grpo import kernel
from grpo.latent import Latent
from grpo.policy import Policy, Product
from grpo.truncation import Truncated, truncates, with_penalty

SMALL = 500_000  # parameters; with so few, threads wait for each other longer than they compute


def set_threads(network: torch.nn.Module) -> None:
    """Compute on one CPU thread if the network is small. That also fixes the order of sums."""
    if sum(weights.numel() for weights in network.parameters()) < SMALL:
        torch.set_num_threads(1)


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


def make_judge(network, config, device):
    """Wrap a judge's network as a function: tokens (N,T) -> log-odds (N,T) on the same device."""
    call = on_device(network, device, settle(config, device))

    def judge(tokens):
        return call(tokens).to(tokens.device)

    return judge


def on_device(network, device, config):
    """Move a network to `device`, and return a function that calls it.

    The function takes the network's inputs on any device, and its result lies on `device`. It
    autocasts and is compiled as the settings say, which have no `auto` any more.
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


def settle(config, device, network=None):
    """Resolve each `auto` for a network on a device: -> `Config`. Only a generator has a kernel."""
    settled = replace(
        config,
        device=device.type,
        dtype=pick_dtype(config.dtype, device),
        compile=pick_compile(config.compile, device),
    )
    if network:
        settled = replace(settled, kernel=kernel.choose(settled, device, network))
    return settled


def pick_device(name):
    """Turn `auto`, or a device's name, into a torch.device.

    Under torchrun, `auto` and `cuda` mean this process's own GPU. Raises a Mistake for a device
    that is not on this machine.
    """
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if name == "cuda" or (name == "auto" and gpus):
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    elif name == "auto":
        name = "cpu"
    refuse(name == "mps", "device mps is not supported; use --device=cpu")
    there = ["cpu", *gpus]
    refuse(name not in there, f"device {name} is not on this machine; it has {', '.join(there)}")
    return torch.device(name)


def pick_dtype(name, device):
    """Turn `auto` into bfloat16 if the device has instructions for it, else into float32.

    On a CPU with such instructions, bfloat16 about halves the time of a step.
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu.get_capabilities().get("avx512_bf16")
    return "bfloat16" if native else "float32"


@contextlib.contextmanager
def uncompiled():
    """Run compiled networks as they are, because some shapes occur too seldom to compile for them.

    If nothing is compiled, this does not import the compiler, which would take some seconds.
    """
    stance = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:
        stance = torch.compiler.set_stance("force_eager")
    with stance:
        yield


@functools.cache
def can_compile(device_type):
    """Try out whether torch.compile works there. For a CPU it needs a C++ compiler with headers."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(64, device=device_type))
    except Exception:  # the error's type depends on what is missing or broken
        return False
    return True


def pick_compile(name, device):
    """Turn `auto` into "true" on CUDA if torch.compile works there, and otherwise into "false".

    On a CPU, compiling takes a minute, which is too long for a short run. Raises a Mistake if the
    user asks for "true" and torch.compile does not work.
    """
    wanted = name == "true" or (name == "auto" and device.type == "cuda")
    works = wanted and can_compile(device.type)
    refuse(
        name == "true" and not works,
        f"compile=true does not work on {device.type}, which needs a compiler (C++ with headers, or"
        " triton for cuda); set compile=false",
    )
    return "true" if works else "false"
