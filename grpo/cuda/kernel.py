"""Compile `kernel.cu` when a run starts, and launch it on the current stream.

`sample_completions` and `logprobs` do what the PyTorch code in `grpo/policy.py` does, and
`FusedProduct` calls them. The only exception is a token outside the vocabulary at a blank. The
kernel gives it the logp NaN, but PyTorch raises an error. `choose` decides whether a run uses the
kernel or PyTorch. NVRTC, CUDA's compiler library, compiles the three functions of kernel.cu for the
number type and the vocabulary of the run. NVRTC needs neither nvcc nor headers, and writes nothing
to disk. Inputs may have any memory layout, because `launch` converts or copies what the kernel
cannot read.

Shapes: B masked inputs, T characters, G group size, V vocabulary.
"""

import functools
import sys
from ctypes import c_double, c_int, c_void_p
from pathlib import Path

import torch

from data.user_mistake import Mistake
from grpo import policy
from grpo.policy import Fills, Product, Scores

SOURCE = Path(__file__).with_name("kernel.cu")
THREADS = 128  # in a block
# {largest V: (lanes, columns)}. The function `layout` says what lanes and columns are.
LAYOUTS = {32: (4, 8), 96: (8, 12)}
NUMBERS = {torch.float32: "float", torch.bfloat16: "bf16"}
# {function: (inputs, outputs)}, with a code for each tensor. The first letter of a code is the type
# (f: float32, i: int64, b: bool, x: that of the logits), and the rest is the shape.
OPERATIONS = {
    "sample_completions": ("xBTV iBT bBT fBGT", "iBGT bBTV"),
    "logprobs_forward": ("xBTV xBTV iBGT bBTV bBT", "fBGT fBGT fBT fBT fBT5"),
    "logprobs_backward": ("xBTV xBTV iBGT bBTV bBT fBT fBT fBT5 fBGT fBT fBT", "xBTV"),
}


def choose(config, device, network):
    """Compile the kernel if a generator can use it, and return "cuda". Otherwise return "torch".

    Raises a Mistake if config.kernel asks for "cuda" and the kernel cannot run.
    """
    vocab_size = network.vocab_size
    if config.kernel == "torch":
        return "torch"
    if device.type != "cuda":
        reason = f"it needs a CUDA device, not {device.type!r}"
    elif vocab_size > max(LAYOUTS):
        reason = f"it takes a vocabulary of at most {max(LAYOUTS)} characters, not {vocab_size}"
    elif network.n_latent > 1:
        reason = f"it cannot handle a latent, and the generator has n_latent={network.n_latent}"
    elif config.xtc_probability:
        reason = "it has no XTC: xtc_probability must be 0"
    else:
        try:
            load(device.index or 0, getattr(torch, config.dtype), layout(vocab_size))
            if agrees(config, device, vocab_size):
                return "cuda"
            reason = "its results differ from those of PyTorch on this device"
        except (ImportError, OSError, RuntimeError) as error:  # no cuda.bindings, no NVRTC, ...
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if config.kernel == "cuda":
        raise Mistake(f"kernel='cuda' cannot run: {reason}; set kernel to 'auto' or 'torch'")
    if device.type == "cuda":
        say_once(f"the CUDA kernel cannot run, PyTorch does its work: {reason}")
    return "torch"


@functools.cache
def say_once(line):
    """Print a line, but not again for the next of a run's networks."""
    print(line, file=sys.stderr)


def agrees(config, device, vocab_size):
    """Tell whether the kernel draws what PyTorch draws, and scores it alike, in a small batch.

    The draws are whole numbers and have to be equal. Scores and gradients may differ by rounding.
    """
    numbers = torch.Generator().manual_seed(0)
    shape = (2, 8, vocab_size)  # B, T, V
    logits, ref_logits = (
        torch.randn(shape, generator=numbers).to(device, getattr(torch, config.dtype))
        for _ in range(2)
    )
    mask = (torch.arange(16).view(2, 8) % 3 > 0).to(device)  # (B,T)
    uniforms = torch.rand(2, 5, 8, 2, generator=numbers).to(device)  # (B,G,T,2)
    outputs = []
    for sample, score in (
        (policy.sample_completions, policy.compute_logprobs),
        (sample_completions, logprobs),
    ):
        completions, kept = sample(logits, mask.long(), mask, uniforms, config)
        leaf = logits.clone().requires_grad_()
        scores = score(leaf, ref_logits, completions, kept, mask, config.temperature)
        (gradient,) = torch.autograd.grad(sum(x.sum() for x in scores), leaf)
        outputs.append([completions.double(), kept.double(), *scores, gradient.float()])
    return all(torch.allclose(a, b, rtol=1e-2, atol=1e-3) for a, b in zip(*outputs))


def layout(vocab_size):
    """Choose how many lanes (threads) share a row of logits, and how many columns each takes."""
    return LAYOUTS[min(most for most in LAYOUTS if vocab_size <= most)]


def checked(result):
    """Return the value in a result (error, value) of cuda.bindings, or raise a RuntimeError."""
    error, *values = result
    if error:
        raise RuntimeError(error.name)
    return values[0] if values else None


@functools.cache
def load(index, dtype, layout):
    """Compile kernel.cu for GPU number `index`: -> (CUDA context, {operation: CUfunction})."""
    from cuda.bindings import driver, nvrtc

    lanes, columns = layout
    form = f"<{NUMBERS[dtype]}, {lanes}, {columns}>"
    names = [(operation + form).encode() for operation in OPERATIONS]
    program = checked(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"kernel.cu", 0, [], []))
    for name in names:  # ask for this instance of the template
        checked(nvrtc.nvrtcAddNameExpression(program, name))
    architecture = b"--gpu-architecture=sm_%d%d" % torch.cuda.get_device_capability(index)
    (error,) = nvrtc.nvrtcCompileProgram(program, 2, [architecture, b"--std=c++17"])
    if error:
        log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))  # writes the message into `log`
        raise RuntimeError(log.decode())
    cubin = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))

    context = checked(driver.cuDevicePrimaryCtxRetain(index))
    checked(driver.cuCtxSetCurrent(context))
    module = checked(driver.cuModuleLoadData(cubin))
    functions = {}
    for operation, name in zip(OPERATIONS, names):
        symbol = checked(nvrtc.nvrtcGetLoweredName(program, name))
        functions[operation] = checked(driver.cuModuleGetFunction(module, symbol))
    return context, functions


def launch(operation, inputs, *settings):
    """Run a function of kernel.cu and return its outputs. The first of `inputs` is the logits."""
    from cuda.bindings import driver

    taken, made = (kinds.split() for kinds in OPERATIONS[operation])
    logits = inputs[0]
    B, T, V = logits.shape
    G = next(x.shape[1] for x, kind in zip(inputs, taken) if kind[1:] == "BGT")
    shapes = {"BTV": (B, T, V), "BGT": (B, G, T), "BT": (B, T), "BT5": (B, T, 5)}
    types = {"x": logits.dtype, "f": torch.float32, "i": torch.int64, "b": torch.bool}
    tensors = []
    for x, kind in zip(inputs, taken):  # give each the shape and type that the kernel reads
        x = x.to(logits.device, types[kind[0]]).expand(shapes[kind[1:]]).contiguous()
        tensors.append(x.clone() if x.data_ptr() % 16 else x)  # 16-byte reads need alignment
    outputs = [logits.new_empty(shapes[kind[1:]], dtype=types[kind[0]]) for kind in made]

    addresses = [x.data_ptr() for x in tensors + outputs]
    c_types = [c_void_p] * len(addresses) + [c_int] * 4 + [c_double] * len(settings)
    lanes, _ = layout(V)
    blocks = -(-B * T * lanes // THREADS)  # rounded up
    sizes = blocks, 1, 1, THREADS, 1, 1, 0  # grid, block, bytes of dynamic shared memory
    stream = torch.cuda.current_stream(logits.device).cuda_stream
    context, functions = load(logits.device.index, logits.dtype, layout(V))
    checked(driver.cuCtxSetCurrent(context))  # autograd's backward thread may have no context
    parameters = (*addresses, B, T, G, V, *settings), tuple(c_types)
    checked(driver.cuLaunchKernel(functions[operation], *sizes, stream, parameters, 0))
    return outputs


def sample_completions(logits, masked, mask, uniforms, config):
    """Do what `grpo.policy.sample_completions` does: -> completions (B,G,T), kept (B,T,V)."""
    settings = (config.temperature, config.top_k, config.top_p, config.min_p)
    return launch("sample_completions", (logits, masked, mask, uniforms[..., 0]), *settings)


class FusedLogProbs(torch.autograd.Function):
    """Do what `grpo.policy.compute_logprobs` does, and return the same four tensors."""

    @staticmethod
    def forward(ctx, *inputs):
        *tensors, ctx.temperature = inputs
        logp, ref_logp, kl, entropy, norms = launch("logprobs_forward", tensors, ctx.temperature)
        ctx.save_for_backward(*tensors, kl, entropy, norms)
        ctx.mark_non_differentiable(ref_logp)
        return logp, ref_logp, kl, entropy

    @staticmethod
    def backward(ctx, g_logp, _, g_kl, g_entropy):
        inputs = *ctx.saved_tensors, g_logp, g_kl, g_entropy
        (g_logits,) = launch("logprobs_backward", inputs, ctx.temperature)
        return g_logits, None, None, None, None, None


logprobs = FusedLogProbs.apply  # takes logits, ref_logits, completions, kept, mask, temperature


class FusedProduct(Product):
    """A `Product` whose two operations are done by the kernel."""

    def sample(self, uniforms):
        where = (self.batch.masked, self.batch.mask, uniforms)
        return Fills(*sample_completions(self.logits, *where, self.config))

    def score(self, fills, reference):
        drawn = (fills.completions, fills.kept, self.batch.mask)
        return Scores(*logprobs(self.logits, reference.logits, *drawn, self.config.temperature))
