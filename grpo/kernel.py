"""Let a CUDA kernel compute log q and its gradient in place of the code in `grpo/policy.py`.

The kernel is two short functions in kernel.cu, and each does in one launch what takes PyTorch many.
That makes them up to five times as fast, and a whole step hardly any faster (config/README.md has
the numbers). `usable` decides, when a run starts, whether to use it. NVRTC, CUDA's compiler as a
library, compiles it then, so there's no build step and nothing to install besides PyTorch's own
CUDA packages.

Shapes: B masked inputs, T characters, G completions of each input, V vocabulary.
"""

import functools
import sys
from ctypes import c_double, c_int, c_void_p
from pathlib import Path

import torch

from data.user_mistake import Mistake
from grpo.truncation import truncates

SOURCE = Path(__file__).with_name("kernel.cu")
THREADS = 32  # per block; small blocks spread a small batch over more of the GPU


class Unusable(Exception):
    """This machine lacks something that the kernel needs. The message says what."""


def usable(config, device, network) -> bool:
    """Try to compile the kernel, and tell whether it computes log q in this run.

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
        except Unusable as error:
            reason = str(error).splitlines()[0]
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
        raise Unusable(f"CUDA says {error.name}")
    return values[0] if values else None


@functools.cache
def load(index):
    """Compile kernel.cu for GPU number `index`. Returns its CUDA context, and the module.

    Raises `Unusable` if cuda.bindings, NVRTC or the driver is missing, or won't compile or load it.
    """
    try:
        from cuda.bindings import driver, nvrtc

        created = nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"kernel.cu", 0, [], [])
    except ImportError as error:
        raise Unusable(f"cuda.bindings can't be imported ({error})") from None
    except RuntimeError as error:  # raised by the first call if there's no such library
        raise Unusable(f"NVRTC can't be loaded ({error})") from None
    program = checked(created)
    architecture = b"--gpu-architecture=sm_%d%d" % torch.cuda.get_device_capability(index)
    (error,) = nvrtc.nvrtcCompileProgram(program, 1, [architecture])
    if error:
        log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))  # fills in `log`
        raise Unusable(f"NVRTC can't compile it: {log.decode()}")
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


class FusedLogProbs(torch.autograd.Function):
    """Do what `policy.ComputeLogProbs` does, gradient included."""

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
