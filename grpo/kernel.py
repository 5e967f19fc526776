"""`grpo/kernel.cu` from PyTorch: compiled once, launched on the current stream, replaced by its definition where it cannot run.

Letters: B masked inputs, T characters, G group size, V vocabulary.

`sample_completions` and `stats` take and return what their definitions in `grpo/sampling.py` and `grpo/stats.py` do, zeros
wherever there is no blank. A blank whose logits hold NaN, +inf or nothing but -inf comes out of `stats` as NaN, and of
`sample_completions` with an empty kept set and still a blank. They differ only in a completion outside the vocabulary: it has
logp NaN here, and is an error there. Other rows are unaffected. Tensors that are not contiguous are copied.

The compiler is NVRTC, through the public `cuda.bindings` that CUDA builds of torch bring along: no nvcc, no headers. What it
makes is kept in ~/.cache/grpo. Call `choose` before a CUDA graph is captured: it compiles.
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
from grpo.stats import stats_backward, stats_forward

SOURCE = Path(__file__).with_name("kernel.cu")
THREADS, MAX_GROUP = 128, 1024
LAYOUTS = (
    (32, 8, 4),
    (96, 8, 12),
    (256, 32, 8),
    (1024, 32, 32),
)  # vocabulary at most, lanes to a row, columns to a lane
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
SHAPES = dict(
    logits="BTV",
    ref_logits="BTV",
    g_logits="BTV",
    kept="BTV",
    completions="BGT",
    uniforms="BGT",
    logp="BGT",
    ref_logp="BGT",
    g_logp="BGT",
    masked="BT",
    mask="BT",
    kl="BT",
    entropy="BT",
    g_kl="BT",
    g_entropy="BT",
    norms="BTN",
)
DTYPES = dict(
    kept=torch.bool, mask=torch.bool, masked=torch.int64, completions=torch.int64
)  # else that of logits or float32
NAMES = [
    f"{operation}<{number}, {lanes}, {columns}>"
    for operation in OPERATIONS
    for number in NUMBERS.values()
    for _, lanes, columns in LAYOUTS
]
warn = functools.cache(warnings.warn)  # each text once


def checked(result):
    """The value of a call to cuda.bindings, which returns (error, value)."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"{type(error).__name__} {error.name}")
    return values[0] if values else None


def compile_kernel(flags):
    """kernel.cu -> the symbol of each of NAMES, a line each, then the cubin that holds them."""
    from cuda.bindings import nvrtc

    program = checked(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"kernel.cu", 0, [], []))
    for name in NAMES:
        checked(
            nvrtc.nvrtcAddNameExpression(program, name.encode())
        )  # "make this one of the template"
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    if int(error):
        log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, log))  # writes into `log`, as GetCUBIN does below
        raise RuntimeError(log.decode().strip("\0\n"))
    cubin = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return b"\n".join(
        [*(checked(nvrtc.nvrtcGetLoweredName(program, name.encode())) for name in NAMES), cubin]
    )


def cached(key, build):
    """build(), remembered in a file named by the hash of `key`; a damaged file is built again, a read-only folder does no harm."""
    path = Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache",
        "grpo",
        hashlib.sha256(key).hexdigest() + ".cubin",
    )
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            return content[32:]
    built = build()
    with contextlib.suppress(OSError):
        write(path, hashlib.sha256(built).digest() + built)
    return built


@contextlib.contextmanager
def context_of(index):
    """PyTorch's context of device `index`, current for a moment: a thread may have that of another device, or, as backward's, none."""
    from cuda.bindings import driver

    checked(driver.cuCtxPushCurrent(checked(driver.cuDevicePrimaryCtxRetain(index))))
    try:
        yield
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

        flags = [
            b"--gpu-architecture=sm_%d%d" % torch.cuda.get_device_capability(index),
            b"--std=c++17",
        ]
        key = b"\0".join([SOURCE.read_bytes(), b"%d.%d" % nvrtc.nvrtcVersion()[1:], *flags])
        *symbols, cubin = cached(key, lambda: compile_kernel(flags)).split(b"\n", len(NAMES))
        with context_of(index):
            module = checked(driver.cuModuleLoadData(cubin))
            return {
                name: checked(driver.cuModuleGetFunction(module, symbol))
                for name, symbol in zip(NAMES, symbols)
            }, ""
    except (
        ImportError,
        OSError,
        RuntimeError,
    ) as error:  # no cuda.bindings, no libnvrtc, an error they report
        return {}, f"{type(error).__name__}: {error}".splitlines()[0]


def choose(kernel, device, vocab_size=1, group_size=1, dtype=torch.float32):
    """The setting 'auto', 'cuda' or 'torch' -> 'cuda' or 'torch', which will run. Compiles the kernel if that is the answer."""
    if kernel == "torch":
        return kernel
    reason = load(torch.device(device))[1]
    if vocab_size > LAYOUTS[-1][0] or group_size > MAX_GROUP or dtype not in NUMBERS:
        reason = f"it takes {LAYOUTS[-1][0]} characters, {MAX_GROUP} completions, float32 or bfloat16, not {vocab_size}, {group_size}, {dtype}"
    if reason and kernel == "cuda":
        raise ValueError(f"kernel='cuda' cannot run: {reason}; set kernel to 'auto' or 'torch'")
    if reason and torch.device(device).type == "cuda":
        warn(f"the CUDA kernel is off and its PyTorch definition runs instead: {reason}")
    return "torch" if reason else "cuda"


def expected(names, tensors):
    """{name: (device, dtype, shape)} of what is called so beside these {name: tensor}; where their shapes disagree, beside the first of them."""
    device, number = tensors["logits"].device, tensors["logits"].dtype
    size = {
        letter: n
        for name in reversed(tensors)
        for letter, n in zip(SHAPES[name], tensors[name].shape)
    } | {"N": 5}
    dtype = {
        name: number if name.endswith("logits") else torch.promote_types(number, torch.float32)
        for name in names
    } | DTYPES
    return {
        name: (device, dtype[name], tuple(size[letter] for letter in SHAPES[name]))
        for name in names
    }


def launch(operation, tensors, settings):
    """Check the tensors {name: tensor}, then run kernel.cu's `operation` on them."""
    for name, wanted in expected(tensors, tensors).items():
        x = tensors[name] = tensors[name].contiguous()
        if (found := (x.device, x.dtype, tuple(x.shape))) != wanted:
            raise ValueError(f"{name}: device, dtype and shape must be {wanted}, not {found}")
    logits, (B, G, T), V = (
        tensors["logits"],
        tensors["completions"].shape,
        tensors["logits"].shape[2],
    )
    _, lanes, columns = next(layout for layout in LAYOUTS if V <= layout[0])
    values = [ctypes.c_void_p(x.data_ptr()) for x in tensors.values()] + [
        ctypes.c_int(n) for n in (B, T, G, V)
    ]
    values += [ctypes.c_int(x) if isinstance(x, int) else ctypes.c_double(x) for x in settings]
    pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    if blocks := -(-B * T // (THREADS // lanes)):  # rounded up
        run(
            f"{operation}<{NUMBERS[logits.dtype]}, {lanes}, {columns}>",
            blocks,
            pointers,
            logits.device,
        )


def run(name, blocks, pointers, device):
    from cuda.bindings import driver

    with context_of(device.index):
        stream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream)
        checked(
            driver.cuLaunchKernel(
                load(device)[0][name],
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                stream,
                ctypes.addressof(pointers),
                0,
            )
        )


def operator(operation, definition):
    """`operation` as PyTorch knows it, (inputs, settings) -> [outputs]: by the kernel, or by its definition where that cannot run."""
    taken, made, settings = OPERATIONS[operation]
    taken, made = taken.split(), made.split()

    def empty(*inputs):  # outputs without values: all that torch.compile needs to know
        return [
            inputs[0].new_empty(shape, dtype=dtype)
            for _, dtype, shape in expected(made, dict(zip(taken, inputs))).values()
        ]

    def compute(*inputs):
        outputs = empty(*inputs)
        tensors = dict(zip(taken + made, (*inputs[: len(taken)], *outputs)))
        logits = tensors["logits"]
        if (
            choose(
                "auto",
                logits.device,
                logits.shape[-1],
                tensors["completions"].shape[1],
                logits.dtype,
            )
            == "cuda"
        ):
            launch(operation, tensors, inputs[len(taken) :])
        else:
            for out, x in zip(outputs, definition(*inputs)):
                out.copy_(x)
        return outputs

    schema = f"({''.join(f'Tensor {name}, ' for name in taken)}{settings}) -> Tensor[]"
    op = torch.library.custom_op(f"grpo::{operation}", compute, mutates_args=(), schema=schema)
    op.register_fake(empty)
    return op


sample_op = operator("sample_completions", sampling.sample_completions)
stats_op = operator(
    "stats_forward", lambda *inputs: (*stats_forward(*inputs), inputs[0].new_zeros(5))
)  # norms: for the kernel's backward pass alone
stats_backward_op = operator(
    "stats_backward", lambda *inputs: [stats_backward(*inputs[:8], inputs[-1])]
)


def remember(ctx, inputs, output):
    *tensors, ctx.temperature = inputs
    ctx.save_for_backward(*tensors, *output[2:])  # kl, entropy, norms


def backward(ctx, gradients):
    g_logp, _, g_kl, g_entropy, _ = gradients
    return (
        *stats_backward_op(g_logp, g_kl, g_entropy, *ctx.saved_tensors, ctx.temperature),
        None,
        None,
        None,
        None,
        None,
    )


stats_op.register_autograd(backward, setup_context=remember)


def sample_completions(
    logits, masked, mask, uniforms, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, **extras
):
    """`grpo.sampling.sample_completions`, on CUDA in one pass over the logits; with extras, which the kernel does not know, by its definition."""
    arguments = logits.detach(), masked, mask, uniforms, temperature, top_k, top_p, min_p
    return (
        sampling.sample_completions(*arguments, **extras)
        if extras
        else tuple(sample_op(*arguments))
    )


def stats(logits, ref_logits, completions, kept, mask, temperature=1.0):
    """`grpo.stats.stats`, differentiable in `logits` alone; on CUDA one pass over the logits, and one for their gradient."""
    logp, ref_logp, kl, entropy, _ = stats_op(
        logits, ref_logits.detach(), completions, kept, mask, temperature
    )
    return logp, ref_logp.detach(), kl, entropy
