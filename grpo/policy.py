"""Put a network on its device, and call it as a policy or as a judge.

A policy maps masked inputs to a distribution over their fills. A judge maps texts to log-odds.

Shapes: B masked inputs, T characters, N rows of tokens.
"""

import functools
from dataclasses import replace

import torch

from data.user_mistake import refuse
from grpo.cuda.kernel import choose
from grpo.latent_policy import Latent
from grpo.product_policy import Product
from grpo.sampling import penalise_repetition


class Policy:
    """Map a `Batch` to a distribution over its fills. `policy.network` is what learns.

    One call runs the network once on each masked input, batch_size inputs at a time. The network
    may live on another device than the batch.
    """

    def __init__(self, network, config, device):
        dtype = pick_dtype(config.dtype, device)
        compiled = pick_compile(config.compile, device)
        config = replace(config, dtype=dtype, compile=compiled)
        fused = choose(config, device, network.trunk.config.vocab_size, network.n_latent)
        # What `auto` means on this device. A checkpoint keeps it beside the settings.
        self.settled = {"device": device.type, "dtype": dtype, "compile": compiled, "kernel": fused}
        self.network = network
        self.call = on_device(network, device, config)
        self.config = replace(config, kernel=fused)

    def __call__(self, batch):
        """Return a `Latent` if the network has a latent, or else a `Product`."""
        recompute = self.config.gradient_checkpointing and torch.is_grad_enabled()
        parts = (x.split(self.config.batch_size) for x in (batch.masked, batch.words))
        outputs = [self.call(*part, recompute=recompute) for part in zip(*parts)]
        tensors = [torch.cat(pieces).to(batch.masked.device) for pieces in zip(*outputs)]
        penalty = self.config.repetition_penalty
        if penalty != 1:
            where = (batch.masked, batch.mask, self.network.blank)
            tensors[-1] = penalise_repetition(tensors[-1], *where, penalty)
        distribution = Latent if self.network.n_latent > 1 else Product  # add your own kind here
        return distribution(*tensors, batch, self.config)


def make_judge(network, config, device):
    """Wrap a judge's network as a function: tokens (N,T) -> log-odds (N,T) on the same device."""
    call = on_device(network, device, config)

    def judge(tokens):
        return call(tokens).to(tokens.device)

    return judge


def on_device(network, device, config):
    """Move a network to `device`, and return a function that calls it.

    The function takes the network's inputs on any device, and its result lies on `device`. It
    autocasts and is compiled as the settings say.
    """
    network.to(device)
    if pick_compile(config.compile, device) == "true":
        network.trunk.compile(dynamic=False)
    half = pick_dtype(config.dtype, device) == "bfloat16"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=half)
    padded = bool(config.prompts_file)

    def call(*inputs, **options):
        with autocast:
            return network(*(x.to(device) for x in inputs), padded=padded, **options)

    return call


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


@functools.cache
def can_compile():
    """Try out whether torch.compile works. For a CPU it needs a C++ compiler with headers."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(64))
    except Exception:  # the error's type depends on what is missing or broken
        return False
    return True


def pick_compile(name, device):
    """Turn `auto` into "true" on CUDA if torch.compile works there, and otherwise into "false".

    On a CPU, compiling takes a minute, which is too long for a short run. Raises a Mistake if the
    user asks for "true" and torch.compile does not work.
    """
    wanted = name == "true" or (name == "auto" and device.type == "cuda")
    works = wanted and can_compile()
    refuse(name == "true" and not works, "compile=true needs a C++ compiler; set compile=false")
    return "true" if works else "false"
