"""Let a CUDA kernel draw and compute log q in place of the PyTorch code in `grpo/policy.py`.

The kernel is three short functions in kernel.cu, and each does in one launch what takes PyTorch
many. That makes them up to five times as fast, and a whole step hardly any faster (config/README.md
has the numbers). `usable` decides, when a run starts, whether to use it. NVRTC, CUDA's compiler as
a library, compiles it then, so there's no build step and nothing to install besides PyTorch's own
CUDA packages.

Shapes: B masked inputs, T characters, G completions of each input, V vocabulary.
"""

import functools
import sys
from ctypes import c_double, c_int, c_void_p
from pathlib import Path

import torch

from data.user_mistake import Mistake
from grpo.policy import Product
from grpo.truncation import truncates

SOURCE = Path(__file__).with_name("kernel.cu")
THREADS = 32  # per block; small blocks spread a small batch over more of the GPU
# what another machine may raise: it has no cuda.bindings, no NVRTC, another version of these, ...
UNUSABLE = ImportError, OSError, RuntimeError, AttributeError, TypeError


def usable(config, device, network) -> bool:
    """Tell whether the kernel draws and scores in this run.

    Raises a Mistake if config.kernel insists on "cuda" and the kernel can't do it.
    """
    if config.kernel == "torch":
        return False
    if device.type != "cuda":
        reason = f"it needs a CUDA device, and this run is on {device.type}"
    elif network.n_latent > 1 or truncates(config):
        reason = "it knows no latent and no truncation"
    else:
        try:
            load(device.index)
            return True
        except UNUSABLE as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if config.kernel == "cuda":
        raise Mistake(f"kernel=cuda can't run: {reason}; set kernel=auto or kernel=torch")
    if device.type == "cuda":
        line = f"the CUDA kernel can't run, so PyTorch does its work: {reason}"
        say_once(line, file=sys.stderr)
    return False


say_once = functools.cache(print)  # a run has several networks, and one line is enough


def checked(result):
    """Unpack what a function of cuda.bindings returns: (error, value), or just (error,)."""
    error, *values = result
    if error:
        raise RuntimeError(error.name)
    return values[0] if values else None


@functools.cache
def load(index):
    """Compile kernel.cu for GPU number `index`. Returns its CUDA context, and the module."""
    from cuda.bindings import driver, nvrtc

    program = checked(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"kernel.cu", 0, [], []))
    architecture = b"--gpu-architecture=sm_%d%d" % torch.cuda.get_device_capability(index)
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [architecture])
    if error:
        log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))  # fills in `log`
        raise RuntimeError(log.decode())
    binary = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, binary))  # fills in `binary`

    context = checked(driver.cuDevicePrimaryCtxRetain(index))  # the one PyTorch uses
    checked(driver.cuCtxSetCurrent(context))
    return context, checked(driver.cuModuleLoadData(binary))


def launch(name, G, temperature, *tensors):
    """Run a function of kernel.cu, one thread per position. The first tensor is the logits."""
    from cuda.bindings import driver

    B, T, V = tensors[0].shape
    device = tensors[0].device
    tensors = [x.contiguous() for x in tensors]
    values = *(x.data_ptr() for x in tensors), B, G, T, V, temperature
    types = *[c_void_p] * len(tensors), *[c_int] * 4, c_double
    blocks = (B * T + THREADS - 1) // THREADS
    sizes = blocks, 1, 1, THREADS, 1, 1, 0  # of the grid, of a block, of shared memory
    stream = torch.cuda.current_stream(device).cuda_stream
    context, module = load(device.index)
    checked(driver.cuCtxSetCurrent(context))  # autograd calls us from a thread that may have none
    function = checked(driver.cuModuleGetFunction(module, name.encode()))
    checked(driver.cuLaunchKernel(function, *sizes, stream, (values, types), 0))


def sample_completions(logits, masked, mask, uniforms, temperature):
    """Do what `policy.sample_completions` does."""
    completions = masked.new_empty(uniforms.shape)  # (B,G,T)
    tensors = logits.float(), masked, mask, uniforms, completions
    launch("sample_completions", uniforms.shape[1], temperature, *tensors)
    return completions


class FusedLogProbs(torch.autograd.Function):
    """Do what `policy.compute_logprobs` does, gradient included."""

    @staticmethod
    def forward(ctx, logits, ref_logits, completions, mask, temperature):
        inputs = logits.float(), ref_logits.float(), completions, mask
        shapes = completions.shape, completions.shape, mask.shape, mask.shape
        logp, ref_logp, kl, entropy = outputs = [inputs[0].new_empty(shape) for shape in shapes]
        ctx.settings = completions.shape[1], temperature
        launch("logprobs_forward", *ctx.settings, *inputs, *outputs)
        ctx.save_for_backward(*inputs, kl, entropy)
        ctx.mark_non_differentiable(ref_logp)
        return logp, ref_logp, kl, entropy

    @staticmethod
    def backward(ctx, g_logp, _, g_kl, g_entropy):
        tensors = *ctx.saved_tensors, g_logp, g_kl, g_entropy
        g_logits = g_logp.new_empty(tensors[0].shape)  # (B,T,V)
        launch("logprobs_backward", *ctx.settings, *tensors, g_logits)
        return g_logits, None, None, None, None  # autograd casts it back to bfloat16 if need be


compute_logprobs = FusedLogProbs.apply


class FusedProduct(Product):
    """A `Product` that draws and scores with the kernel."""

    sample_completions = staticmethod(sample_completions)
    compute_logprobs = staticmethod(compute_logprobs)
