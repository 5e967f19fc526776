"""
`grpo/kernel.cu` from PyTorch: compiled once, launched on the current stream, replaced by its definition where it cannot run.

Letters: B masked inputs, T characters, G group size, V vocabulary.

`sample_completions` and `stats` take and return what their definitions in `grpo/sampling.py` and `grpo/stats.py` do, zeros
wherever there is no blank. A blank whose logits hold NaN, +inf or nothing but -inf comes out of `stats` as NaN, and of
`sample_completions` with an empty kept set and still a blank. They differ only in a completion outside the vocabulary: it has
logp NaN here, and is an error there. Other rows are unaffected.

The compiler is NVRTC, through the public `cuda.bindings` that CUDA builds of torch bring along: no nvcc, no headers. What it
makes is kept in ~/.cache/grpo. Call `choose` before a CUDA graph is captured: it compiles.
"""
import ctypes
import functools
import hashlib
import json
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

from grpo import sampling
from grpo.stats import stats_backward, stats_forward

SOURCE = Path(__file__).with_name("kernel.cu")
THREADS, MAX_GROUP = 128, 1024
LAYOUTS = ((32, 8, 4), (96, 8, 12), (256, 32, 8), (1024, 32, 32))    # vocabulary at most, lanes to a row, columns to a lane
NUMBERS = {torch.float32: "float", torch.bfloat16: "bf16"}
PARAMETERS = {                                                       # kernel.cu's, in its order; B, T, G, V and the settings follow
    "sample_completions": "logits masked mask uniforms completions kept",
    "stats_forward": "logits ref_logits completions kept mask logp ref_logp kl entropy norms",
    "stats_backward": "g_logp g_kl g_entropy logits ref_logits completions kept mask kl entropy norms g_logits"}
SHAPES = dict(logits="BTV", ref_logits="BTV", g_logits="BTV", kept="BTV", completions="BGT", uniforms="BGT", logp="BGT", ref_logp="BGT",
              g_logp="BGT", masked="BT", mask="BT", kl="BT", entropy="BT", g_kl="BT", g_entropy="BT", norms="BTN")
DTYPES = dict(kept=torch.bool, mask=torch.bool, masked=torch.int64, completions=torch.int64)  # else that of logits or float32
NAMES = [f"{operation}<{number}, {lanes}, {columns}>" for operation in PARAMETERS
         for number in NUMBERS.values() for _, lanes, columns in LAYOUTS]


def checked(result):
    """The value of a call to cuda.bindings, which returns (error, value)."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"{type(error).__name__} {error.name}")
    return values[0] if values else None


def compile_kernel(flags):
    """kernel.cu -> a line of JSON {name: symbol}, then the cubin that holds the symbols."""
    from cuda.bindings import nvrtc
    program = checked(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"kernel.cu", 0, [], []))
    for name in NAMES:
        checked(nvrtc.nvrtcAddNameExpression(program, name.encode()))     # "make this one of the template"
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(error):
        log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))                   # writes into `log`, as GetCUBIN does below
        raise RuntimeError(log.decode().strip("\0\n"))
    symbols = {name: checked(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode() for name in NAMES}
    cubin = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return json.dumps(symbols).encode() + b"\n" + cubin


def cached(key, build):
    """build(), remembered in a file named by the hash of `key`; a damaged file is built again, a read-only folder does no harm."""
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "grpo", hashlib.sha256(key).hexdigest() + ".cubin")
    try:
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            return content[32:]
    except OSError:
        pass
    built = build()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(hashlib.sha256(built).digest() + built)
        unfinished.replace(path)                                          # atomic: a reader finds all of it, or nothing
    except OSError:
        pass
    return built


def use_context(driver, index):
    """Make PyTorch's context current: a thread on which PyTorch has not yet used CUDA, as backward's may be, has none."""
    if not int(checked(driver.cuCtxGetCurrent())):
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(index))))


@functools.cache
def load(index):
    """The kernel on one GPU -> ({name: CUfunction}, ""), or ({}, why it cannot run there)."""
    try:
        from cuda.bindings import driver, nvrtc
        flags = [b"--gpu-architecture=sm_%d%d" % torch.cuda.get_device_capability(index), b"--std=c++17"]
        version = b"%d.%d" % nvrtc.nvrtcVersion()[1:]
        symbols, cubin = cached(b"\0".join([SOURCE.read_bytes(), version, *flags]), lambda: compile_kernel(flags)).split(b"\n", 1)
        use_context(driver, index)
        module = checked(driver.cuModuleLoadData(cubin))
        return {name: checked(driver.cuModuleGetFunction(module, symbol.encode())) for name, symbol in json.loads(symbols).items()}, ""
    except (ImportError, OSError, RuntimeError) as error:                 # no cuda.bindings, no libnvrtc, an error they report
        return {}, f"{type(error).__name__}: {error}".splitlines()[0]


def unavailable(device):
    """Why the kernel cannot run on `device`; "" if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type!r}"
    return load(torch.cuda.current_device() if device.index is None else device.index)[1]


@functools.cache                                                          # once for each reason
def warn(reason):
    warnings.warn(f"the CUDA kernel is off and its PyTorch definition runs instead: {reason}", stacklevel=2)


def fused(device, V, G, dtype=torch.float32, must=False):
    """Does the kernel run? If not, warns where one would expect it; raises if it must."""
    reason = unavailable(device)
    if V > LAYOUTS[-1][0] or G > MAX_GROUP or dtype not in NUMBERS:
        reason = f"it takes {LAYOUTS[-1][0]} characters, {MAX_GROUP} completions, float32 or bfloat16, not {V}, {G}, {dtype}"
    if reason and must:
        raise ValueError(f"kernel='cuda' cannot run: {reason}; set kernel to 'auto' or 'torch'")
    if reason and device.type == "cuda":
        warn(reason)
    return not reason


def choose(kernel, device, vocab_size=1, group_size=1):
    """The setting 'auto', 'cuda' or 'torch' -> 'cuda' or 'torch', which will run. Compiles the kernel if that is the answer."""
    if kernel not in ("auto", "cuda", "torch"):
        raise ValueError(f"kernel must be 'auto', 'cuda' or 'torch', not {kernel!r}")
    return "cuda" if kernel != "torch" and fused(torch.device(device), vocab_size, group_size, must=kernel == "cuda") else "torch"


def launch(operation, tensors, numbers, G):
    """Check the tensors, then run kernel.cu's `operation` on them."""
    tensors = dict(zip(PARAMETERS[operation].split(), tensors))
    logits = tensors["logits"]
    size = dict(zip("BTVGN", (*logits.shape, G, 5)))
    for name, x in tensors.items():
        dtype = DTYPES.get(name, logits.dtype if name.endswith("logits") else torch.float32)
        found, wanted = (x.device, x.dtype, tuple(x.shape), x.is_contiguous()), (logits.device, dtype, tuple(map(size.get, SHAPES[name])), True)
        if found != wanted:
            raise ValueError(f"{name}: device, dtype, shape and is_contiguous() must be {wanted}, not {found}")
    lanes, columns = next(layout[1:] for layout in LAYOUTS if size["V"] <= layout[0])
    blocks = -(-size["B"] * size["T"] // (THREADS // lanes))              # rounded up
    values = [ctypes.c_void_p(x.data_ptr()) for x in tensors.values()] + [ctypes.c_int(size[letter]) for letter in "BTGV"]
    values += [ctypes.c_int(x) if isinstance(x, int) else ctypes.c_double(x) for x in numbers]
    if blocks:
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        run(f"{operation}<{NUMBERS[logits.dtype]}, {lanes}, {columns}>", blocks, pointers, logits.device)


def run(name, blocks, pointers, device):
    from cuda.bindings import driver
    with torch.cuda.device(device):
        use_context(driver, device.index)
        stream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
        function = load(device.index)[0][name]
        checked(driver.cuLaunchKernel(function, blocks, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0))


def compute(operation, tensors, numbers, G, outputs, definition):
    """outputs = operation(tensors, numbers): by the kernel, or where that cannot run by the definition."""
    logits = tensors[PARAMETERS[operation].split().index("logits")]
    if fused(logits.device, logits.shape[-1], G, logits.dtype):
        launch(operation, (*tensors, *outputs), numbers, G)
    else:
        for out, x in zip(outputs, definition(*tensors, *numbers)):       # copied: torch.compile was promised contiguous tensors
            out.copy_(x)
    return outputs


# The three operations as PyTorch sees them, each with a fake twin that knows the shapes of its outputs and no values.

def empty_sample(logits, masked, mask, uniforms, temperature, top_k, top_p, min_p):
    return uniforms.new_empty(uniforms.shape, dtype=torch.int64), logits.new_empty(logits.shape, dtype=torch.bool)  # (B,G,T), (B,T,V)


@torch.library.custom_op("grpo::sample_completions", mutates_args=())
def sample_op(logits: Tensor, masked: Tensor, mask: Tensor, uniforms: Tensor, temperature: float, top_k: int, top_p: float,
              min_p: float) -> tuple[Tensor, Tensor]:
    tensors, numbers = (logits, masked, mask, uniforms), (temperature, top_k, top_p, min_p)
    return compute("sample_completions", tensors, numbers, uniforms.shape[1], empty_sample(*tensors, *numbers), sampling.sample_completions)


def empty_stats(logits, ref_logits, completions, kept, mask, temperature):
    """logp, ref_logp (B,G,T), kl, entropy (B,T), and norms (B,T,5), which the kernel leaves for its own backward pass."""
    shapes = completions.shape, completions.shape, mask.shape, mask.shape, (*mask.shape, 5)
    return tuple(logits.new_empty(shape, dtype=torch.promote_types(logits.dtype, torch.float32)) for shape in shapes)


@torch.library.custom_op("grpo::stats", mutates_args=())
def stats_op(logits: Tensor, ref_logits: Tensor, completions: Tensor, kept: Tensor, mask: Tensor,
             temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tensors = logits, ref_logits, completions, kept, mask
    return compute("stats_forward", tensors, (temperature,), completions.shape[1], empty_stats(*tensors, temperature),
                   lambda *inputs: (*stats_forward(*inputs), logits.new_zeros(5)))


@torch.library.custom_op("grpo::stats_backward", mutates_args=())
def stats_backward_op(g_logp: Tensor, g_kl: Tensor, g_entropy: Tensor, logits: Tensor, ref_logits: Tensor, completions: Tensor,
                      kept: Tensor, mask: Tensor, kl: Tensor, entropy: Tensor, norms: Tensor, temperature: float) -> Tensor:
    tensors = g_logp.contiguous(), g_kl.contiguous(), g_entropy.contiguous(), logits, ref_logits, completions, kept, mask, kl, entropy, norms
    return compute("stats_backward", tensors, (temperature,), completions.shape[1], (logits.new_empty(logits.shape),),
                   lambda *inputs: (stats_backward(*inputs[:8], temperature),))[0]


def remember(ctx, inputs, output):
    *tensors, ctx.temperature = inputs
    ctx.save_for_backward(*tensors, *output[2:])                          # kl, entropy, norms


def backward(ctx, g_logp, _, g_kl, g_entropy, __):
    return stats_backward_op(g_logp, g_kl, g_entropy, *ctx.saved_tensors, ctx.temperature), None, None, None, None, None


sample_op.register_fake(empty_sample)
stats_op.register_fake(empty_stats)
stats_backward_op.register_fake(lambda g_logp, g_kl, g_entropy, logits, *others: logits.new_empty(logits.shape))
stats_op.register_autograd(backward, setup_context=remember)


def sample_completions(logits, masked, mask, uniforms, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **extras):
    """`grpo.sampling.sample_completions`, on CUDA in one pass over the logits; with extras, which the kernel does not know, by its definition."""
    if extras:
        return sampling.sample_completions(logits.detach(), masked, mask, uniforms, temperature, top_k, top_p, min_p, **extras)
    return sample_op(logits.detach(), masked, mask, uniforms, temperature, top_k, top_p, min_p)


def stats(logits, ref_logits, completions, kept, mask, temperature=1.0):
    """`grpo.stats.stats`, differentiable in `logits` alone; on CUDA one pass over the logits, and one for their gradient."""
    logp, ref_logp, kl, entropy, _ = stats_op(logits, ref_logits.detach(), completions, kept, mask, temperature)
    return logp, ref_logp.detach(), kl, entropy
