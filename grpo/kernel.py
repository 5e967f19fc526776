"""
`grpo/kernel.cu` from PyTorch: compiled once, launched on the current stream, replaced by its
definition where it cannot run.

Letters: B masked inputs, T characters, G group size, V vocabulary.

`sample_completions` and `stats` take and return what their definitions in `grpo/sampling.py` and
`grpo/stats.py` do, zeros wherever there is no blank. A blank whose logits hold NaN, +inf or nothing
but -inf comes out of `stats` as NaN, and of `sample_completions` with an empty kept set and still a
blank. They differ only in a completion outside the vocabulary: it has logp NaN here, and is an
error there. Other rows are unaffected. Tensors that are not contiguous are copied.

The compiler is NVRTC, through the public `cuda.bindings` that CUDA builds of torch bring along: no
nvcc, no headers. What it makes is kept in ~/.cache/grpo. Call `choose` before a CUDA graph is
captured: it compiles.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import warnings
from pathlib import Path

import torch

from grpo import sampling
from grpo.plumbing.checkpoint import write
from grpo.stats import Stats, stats_backward, stats_forward

SOURCE = Path(__file__).with_name("kernel.cu")
THREADS = 128  # to a block
MAX_GROUP = 1024
LAYOUTS = (  # vocabulary at most, lanes to a row, columns to a lane
    (32, 4, 8),
    (96, 8, 12),
    (256, 8, 32),
    (1024, 32, 32),
)
MAX_VOCABULARY = LAYOUTS[-1][0]
NUMBERS = {torch.float32: "float", torch.bfloat16: "bf16"}
OPERATIONS = {  # kernel.cu's parameters: inputs, outputs, B T G V, settings
    "sample_completions": (
        "logits masked mask uniforms",
        "completions kept",
        "float temperature, int top_k, float top_p, float min_p",
    ),
    "stats_forward": (
        "logits ref_logits completions kept mask",
        "logp ref_logp kl entropy norms",
        "float temperature",
    ),
    "stats_backward": (
        "g_logp g_kl g_entropy logits ref_logits completions kept mask kl entropy norms",
        "g_logits",
        "float temperature",
    ),
}
TENSORS = {  # what each tensor holds, and its shape; N: the five numbers of kernel.cu's `norms`
    "number BTV": "logits ref_logits g_logits",  # float32 or bfloat16
    "float BGT": "uniforms logp ref_logp g_logp",
    "float BT": "kl entropy g_kl g_entropy",
    "float BTN": "norms",
    "long BGT": "completions",
    "long BT": "masked",
    "bool BTV": "kept",
    "bool BT": "mask",
}
KINDS = {name: kind.split() for kind, names in TENSORS.items() for name in names.split()}
NAMES = [
    f"{operation}<{number}, {lanes}, {columns}>"
    for operation in OPERATIONS
    for number in NUMBERS.values()
    for _, lanes, columns in LAYOUTS
]
C_TYPES = {int: ctypes.c_int, float: ctypes.c_double}
warn = functools.cache(warnings.warn)  # each text once


def checked(result):
    """The value of a call to cuda.bindings, which returns (error, value)."""
    error, *values = result
    if error:
        raise RuntimeError(f"{type(error).__name__} {error.name}")
    return values[0] if values else None


def compile_kernel(flags):
    """kernel.cu -> the symbol of each of NAMES, a line each, then the cubin that holds them."""
    from cuda.bindings import nvrtc

    program = checked(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"kernel.cu", 0, [], []))
    for name in NAMES:  # "make this one of the template"
        checked(nvrtc.nvrtcAddNameExpression(program, name.encode()))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if error:
        log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))  # writes into `log`, as GetCUBIN does below
        raise RuntimeError(log.decode().strip("\0\n"))
    cubin = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    symbols = [checked(nvrtc.nvrtcGetLoweredName(program, name.encode())) for name in NAMES]
    return b"\n".join([*symbols, cubin])


def is_private(path):
    """Is it this user's own, and may nobody else write to it?"""
    if os.name == "nt":  # which has neither such owners nor such modes
        return True
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def cached(key, build):
    """build(), remembered in a file named by the hash of `key`.

    What is damaged, or another user may have written, is built again: it would run on the GPU. A
    read-only folder does no harm.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "grpo")
    path = folder / (hashlib.sha256(key).hexdigest() + ".cubin")
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        whole = hashlib.sha256(content[32:]).digest() == content[:32]
        if whole and is_private(path) and is_private(folder):
            return content[32:]
    built = build()
    with contextlib.suppress(OSError):
        write(path, hashlib.sha256(built).digest() + built)
        path.chmod(0o600)
        folder.chmod(0o700)
    return built


@functools.cache
def primary_context(index):
    """The context in which PyTorch uses device `index`."""
    from cuda.bindings import driver

    return checked(driver.cuDevicePrimaryCtxRetain(index))


def in_context(index, call, *arguments):
    """call(*arguments) in PyTorch's context of device `index`.

    A thread may have another device's context, or, as that of a backward pass, none.
    """
    from cuda.bindings import driver

    checked(driver.cuCtxPushCurrent(primary_context(index)))
    try:
        return checked(call(*arguments))
    finally:
        checked(driver.cuCtxPopCurrent())


def load(device):
    """The kernel on a device -> ({name: CUfunction}, ""), or ({}, why it cannot run there)."""
    if device.type != "cuda":
        return {}, f"it needs a CUDA device, not {device.type!r}"
    return load_on(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def load_on(index):
    try:
        from cuda.bindings import driver, nvrtc

        architecture = b"sm_%d%d" % torch.cuda.get_device_capability(index)
        flags = [b"--gpu-architecture=" + architecture, b"--std=c++17"]
        version = b"%d.%d" % nvrtc.nvrtcVersion()[1:]
        key = b"\0".join([SOURCE.read_bytes(), version, *flags])
        *symbols, cubin = cached(key, lambda: compile_kernel(flags)).split(b"\n", len(NAMES))
        module = in_context(index, driver.cuModuleLoadData, cubin)
        functions = [checked(driver.cuModuleGetFunction(module, symbol)) for symbol in symbols]
        return dict(zip(NAMES, functions)), ""
    # No cuda.bindings, no libnvrtc, an error that they report.
    except (ImportError, OSError, RuntimeError) as error:
        return {}, f"{type(error).__name__}: {error}".splitlines()[0]


def choose(kernel, device, vocab_size=1, group_size=1, dtype=torch.float32):
    """The setting 'auto', 'cuda' or 'torch' -> 'cuda' or 'torch', which will run.

    Compiles the kernel if that is the answer. ValueError: 'cuda', and it cannot run.
    """
    if kernel == "torch":
        return kernel
    device = torch.device(device)
    reason = load(device)[1]
    if vocab_size > MAX_VOCABULARY or group_size > MAX_GROUP or dtype not in NUMBERS:
        reason = (
            f"it takes {MAX_VOCABULARY} characters, {MAX_GROUP} completions, float32 or bfloat16, "
            f"not {vocab_size}, {group_size}, {dtype}"
        )
    if not reason:
        return "cuda"
    if kernel == "cuda":
        raise ValueError(f"kernel='cuda' cannot run: {reason}; set kernel to 'auto' or 'torch'")
    if device.type == "cuda":
        warn(f"the CUDA kernel is off and its PyTorch definition runs instead: {reason}")
    return "torch"


def sizes(tensors):
    """B, T, G and V, as these inputs {name: tensor} say it: the logits, and the draws."""
    B, T, V = tensors["logits"].shape
    draws = "uniforms" if "uniforms" in tensors else "completions"
    return B, T, tensors[draws].shape[1], V


def expected(names, tensors):
    """{name: (dtype, shape)} of what is called so beside these inputs {name: tensor}."""
    B, T, G, V = sizes(tensors)
    number = tensors["logits"].dtype
    shapes = {"BTV": (B, T, V), "BGT": (B, G, T), "BT": (B, T), "BTN": (B, T, 5)}
    dtypes = {
        "number": number,
        "float": torch.promote_types(number, torch.float32),
        "long": torch.int64,
        "bool": torch.bool,
    }
    kinds = {name: KINDS[name] for name in names}
    return {name: (dtypes[dtype], shapes[shape]) for name, (dtype, shape) in kinds.items()}


def launch(operation, tensors, outputs, settings):
    """Check the inputs {name: tensor}, then run kernel.cu's `operation` on them."""
    logits = tensors["logits"]
    inputs = []
    for name, (dtype, shape) in expected(tensors, tensors).items():
        x = tensors[name]
        wanted = logits.device, dtype, shape
        found = x.device, x.dtype, x.shape
        if found != wanted:
            raise ValueError(f"{name}: device, dtype and shape must be {wanted}, not {found}")
        x = x.contiguous()
        if x.data_ptr() % 16:  # a wide read starts at a multiple of its width
            x = x.clone()
        inputs.append(x)
    B, T, G, V = sizes(tensors)
    addresses = [x.data_ptr() for x in inputs + outputs]
    numbers = [B, T, G, V, *settings]
    types = [ctypes.c_void_p] * len(addresses) + [C_TYPES[type(x)] for x in numbers]
    parameters = tuple(addresses + numbers), tuple(types)
    _, lanes, columns = next(layout for layout in LAYOUTS if V <= layout[0])
    blocks = -(-B * T * lanes // THREADS)  # rounded up
    if blocks:
        name = f"{operation}<{NUMBERS[logits.dtype]}, {lanes}, {columns}>"
        run(name, blocks, parameters, logits.device)


def run(name, blocks, parameters, device):
    """Launch kernel.cu's function `name`; parameters: the value of each, the C type of each."""
    from cuda.bindings import driver

    function = load(device)[0][name]
    stream = torch.cuda.current_stream(device).cuda_stream
    sizes = blocks, 1, 1, THREADS, 1, 1, 0  # of the grid, of a block, of memory to be shared
    launch_kernel = driver.cuLaunchKernel
    in_context(device.index, launch_kernel, function, *sizes, stream, parameters, 0)


def operator(operation, definition):
    """`operation` as PyTorch knows it, (inputs, settings) -> [outputs].

    By the kernel, or by its definition where that cannot run.
    """
    taken, made, settings = OPERATIONS[operation]
    taken = taken.split()
    made = made.split()

    def empty(*arguments):  # outputs without values: all that torch.compile needs to know
        tensors = dict(zip(taken, arguments))
        wanted = expected(made, tensors).values()
        return [arguments[0].new_empty(shape, dtype=dtype) for dtype, shape in wanted]

    def compute(*arguments):
        tensors = dict(zip(taken, arguments))
        _, _, G, V = sizes(tensors)
        logits = tensors["logits"]
        if choose("auto", logits.device, V, G, logits.dtype) == "torch":
            return [x.contiguous() for x in definition(*arguments)]
        outputs = empty(*arguments)
        launch(operation, tensors, outputs, arguments[len(taken) :])
        return outputs

    parameters = ", ".join([f"Tensor {name}" for name in taken] + [settings])
    library.define(f"{operation}({parameters}) -> Tensor[]")
    library.impl(operation, compute, "CompositeExplicitAutograd")  # on any device
    torch.library.register_fake(f"grpo::{operation}", empty, lib=library)
    return getattr(torch.ops.grpo, operation).default


def define_stats(*inputs):
    found = stats_forward(*inputs)
    norms = found.kl.new_zeros(*found.kl.shape, 5)  # (B,T,N) for the kernel's backward pass alone
    return *found, norms


def define_stats_backward(*inputs):
    return [stats_backward(inputs[:3], *inputs[3:8], inputs[-1])]


library = torch.library.Library("grpo", "FRAGMENT")
sample_op = operator("sample_completions", sampling.sample_completions)
stats_op = operator("stats_forward", define_stats)
stats_backward_op = operator("stats_backward", define_stats_backward)


class FusedStats(torch.autograd.Function):
    """`stats_op`, differentiable in `logits` alone, by `stats_backward_op`."""

    @staticmethod
    def forward(ctx, *inputs):
        logp, ref_logp, kl, entropy, norms = stats_op(*inputs)
        *tensors, ctx.temperature = inputs
        ctx.save_for_backward(*tensors, kl, entropy, norms)
        ctx.mark_non_differentiable(ref_logp)
        return logp, ref_logp, kl, entropy

    @staticmethod
    def backward(ctx, g_logp, _, g_kl, g_entropy):
        inputs = *ctx.saved_tensors, ctx.temperature
        (g_logits,) = stats_backward_op(g_logp, g_kl, g_entropy, *inputs)
        return g_logits, None, None, None, None, None


def sample_completions(
    logits, masked, mask, uniforms, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **extras
):
    """`grpo.sampling.sample_completions`, on CUDA in one pass over the logits.

    With extras, which the kernel does not know, by its definition.
    """
    arguments = logits.detach(), masked, mask, uniforms, temperature, top_k, top_p, min_p
    if extras:
        return sampling.sample_completions(*arguments, **extras)
    return tuple(sample_op(*arguments))


def stats(logits, ref_logits, completions, kept, mask, temperature=1.0):
    """`grpo.stats.stats`, differentiable in `logits` alone.

    On CUDA one pass over the logits, and one for their gradient.
    """
    return Stats(*FusedStats.apply(logits, ref_logits, completions, kept, mask, temperature))
