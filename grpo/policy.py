"""A network becomes a policy: a function from masked inputs to a distribution over their fills.

Shapes: B masked inputs, T characters, V vocabulary, K values of a latent, N rows of tokens.
"""

import torch

from data.user_mistake import refuse
from grpo.latent_policy import Latent
from grpo.product_policy import Product
from grpo.sampling import Sampling, penalise_repetition


class Policy:
    """Map a `Batch` to a distribution over its fills. `policy.network` is what learns.

    One call runs the network once on each masked input, batch_size inputs at a time. The network
    may live on another device than the batch.
    """

    def __init__(self, network, config, device):
        self.network = network
        self.call = on_device(network, device, config)
        self.config = config
        self.sampling = Sampling(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            xtc_threshold=config.xtc_threshold,
            xtc_probability=config.xtc_probability,
            fused=config.kernel == "cuda",
        )

    def __call__(self, batch):
        """Return the distribution over the fills of the batch: `Product`, or `Latent` for K > 1."""
        recompute = self.config.gradient_checkpointing and torch.is_grad_enabled()
        parts = batch.masked.split(self.config.batch_size)
        outputs = [self.call(part, recompute=recompute) for part in parts]  # a tuple for each part
        tensors = [torch.cat(pieces).to(batch.masked.device) for pieces in zip(*outputs)]
        penalty = self.config.repetition_penalty
        if penalty != 1:
            tensors[-1] = penalise_repetition(tensors[-1], batch.masked, batch.mask, penalty)
        distribution = Latent if self.network.n_latent > 1 else Product  # add your own kind here
        return distribution(*tensors, batch, self.sampling)


def make_judge(network, config, device):
    """Wrap a judge as a function: tokens (N,T) -> log-odds (N,T), on the tokens' device."""
    call = on_device(network, device, config)

    def judge(tokens):
        return call(tokens).to(tokens.device)

    return judge


def on_device(network, device, config):
    """Move a network to `device`, and return a function that calls it.

    The function takes tokens on any device, and its result lies on `device`. It autocasts and is
    compiled if the settings say so.
    """
    network.to(device)
    if config.compile == "true":
        network.trunk.compile(dynamic=False)
    half = config.dtype == "bfloat16"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=half)
    padded = bool(config.prompts_file)

    def call(tokens, **options):
        with autocast:
            return network(tokens.to(device), padded=padded, **options)

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
