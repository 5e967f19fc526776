"""Compare the kernel with the PyTorch functions in grpo/policy.py that it stands in for.

You don't need a GPU: once `__global__` means nothing, kernel.cu is plain C++, and two loops can
play the blocks and the threads. kernel.py runs unchanged, on a small stand-in for cuda.bindings. If
there is a GPU, the comparisons run on it as well.

Shapes: B masked inputs, T characters, G completions of each input, V vocabulary.
"""

import ctypes
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from conftest import make_batch

from data.user_mistake import Mistake
from grpo import kernel, policy

SOURCE = kernel.SOURCE.read_text(encoding="utf-8")
HOST = """
#define __global__
#define __device__
extern "C" {
double exp(double), log(double);
struct Index { unsigned x; } blockIdx, threadIdx, blockDim;
}
"""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@functools.cache
def compile_for_cpu():
    with TemporaryDirectory() as folder:
        (Path(folder) / "host.cc").write_text(HOST + SOURCE, encoding="utf-8")
        command = "g++ -O1 -Wall -Werror -fPIC -shared host.cc -o host.so"
        subprocess.run(command.split(), cwd=folder, check=True)
        return ctypes.CDLL(Path(folder) / "host.so")


def stand_in(library):
    """Imitate what kernel.py uses of cuda.bindings. A launch is two loops on the CPU."""
    words = ("blockIdx", "threadIdx", "blockDim")
    block, thread, size = (ctypes.c_uint.in_dll(library, word) for word in words)
    current = []  # the context, from when it's made current until a launch

    def launch(name, blocks, y, z, threads, _, __, shared, stream, arguments, extra):
        assert (current.pop(), y, z, shared, stream, extra) == ("context", 1, 1, 0, "stream", 0)
        (parameters,) = re.findall(rf"void {name}\((.*?)\)", SOURCE, re.DOTALL)
        numbers = {"int": ctypes.c_int, "double": ctypes.c_double}
        types = [numbers.get(p.split()[0], ctypes.c_void_p) for p in parameters.split(",")]
        assert list(arguments[1]) == types
        size.value = threads
        for block.value in range(blocks):
            for thread.value in range(threads):
                library[name](*(of_type(value) for value, of_type in zip(*arguments)))
        return (0,)

    nvrtc = SimpleNamespace(
        nvrtcCreateProgram=lambda *_: (0, "program"),
        nvrtcCompileProgram=lambda *_: (0,),
        nvrtcGetCUBINSize=lambda _: (0, 3),
        nvrtcGetCUBIN=lambda *_: (0,),
    )
    driver = SimpleNamespace(
        cuDevicePrimaryCtxRetain=lambda index: (0, "context"),
        cuCtxSetCurrent=lambda context: (current.append(context) or 0,),
        cuModuleLoadData=lambda binary: (0, "module"),
        cuModuleGetFunction=lambda module, name: (0, name.decode()),
        cuLaunchKernel=launch,
    )
    return SimpleNamespace(driver=driver, nvrtc=nvrtc)


@pytest.fixture
def on_cpu(monkeypatch):
    """Make kernel.py run on the CPU."""
    if not shutil.which("g++"):
        pytest.skip("no g++")

    kernel.load.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", stand_in(compile_for_cpu()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    stream = SimpleNamespace(cuda_stream="stream")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    yield
    kernel.load.cache_clear()


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=needs_gpu)])
def device(request, monkeypatch):
    """Run a test on the CPU and on a GPU, with garbage in what the kernel has to fill in."""
    if request.param == "cpu":
        request.getfixturevalue("on_cpu")
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, shape: x.new_full(shape, 99))
    return torch.device(request.param)


def make_inputs(device, B, T, G, V, blanks=0.7, dtype=torch.float32):
    """Make logits and ref_logits (B,T,V), masked and mask (B,T), and uniforms (B,G,T)."""
    torch.manual_seed(V)
    logits = 3 * torch.randn(2, B, T, V)
    logits[..., -1] = -1e9  # the blank is never drawn
    mask = torch.rand(B, T) < blanks
    masked = torch.randint(-1, V, (B, T))  # -1 is padding
    made = *logits.to(dtype), masked, mask, torch.rand(B, G, T)
    return [x.to(device) for x in made]


def scattered(x):
    """Copy x into another memory layout: the kernel has to copy it back."""
    return x.mT.contiguous().mT


def score(module, logits, *given):
    """Return the four scores, and the gradient of a random sum of them."""
    leaf = logits.detach().clone().requires_grad_()
    scores = module.compute_logprobs(leaf, *given)
    torch.manual_seed(0)
    loss = sum((x * torch.randn(x.shape).to(x)).sum() for x in scores if x.requires_grad)
    return *(x.detach() for x in scores), *torch.autograd.grad(loss, leaf)


@pytest.mark.parametrize("V, temperature", [(2, 1.0), (28, 0.8), (40, 1.0), (40, 0.3), (96, 2.5)])
def test_draws_are_those_of_pytorch(device, V, temperature):
    logits, _, *given = make_inputs(device, 40, 70, 64, V)  # 125,000 draws
    found = kernel.sample_completions(*map(scattered, (logits, *given)), temperature)
    assert torch.equal(found, policy.sample_completions(logits, *given, temperature))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("V, blanks", [(2, 0.7), (28, 0.7), (28, 0), (40, 1), (96, 0.7)])
def test_scores_and_gradients_are_those_of_pytorch(device, V, blanks, dtype):
    logits, ref_logits, *given = make_inputs(device, 3, 11, 16, V, blanks, dtype)
    y, mask = kernel.sample_completions(logits, *given, 0.8), given[1]  # (B,G,T), (B,T)
    found = score(kernel, *map(scattered, (logits, ref_logits, y, mask)), 0.8)
    want = score(policy, logits.double(), ref_logits.double(), y, mask, 0.8)
    assert found[4].dtype == dtype
    for x, exact in zip(found, want):
        rtol = 5e-5 if x.dtype == torch.float32 else 2.0**-8
        torch.testing.assert_close(x.double(), exact, rtol=rtol, atol=5e-5)


def config(**changes):
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "xtc_probability": 0.0}
    return SimpleNamespace(**off | {"temperature": 0.8, "kernel": "auto"} | changes)


def test_a_fused_product_is_a_product(device):
    torch.manual_seed(0)
    batch = make_batch(torch.randint(27, (2, 6)), torch.rand(2, 6) < 0.7, 27, 5, (0,))
    batch = batch.map(lambda x: x.to(device))
    logits, ref_logits = torch.randn(2, 2, 6, 28, device=device)  # each (B,T,V)
    results = []
    for kind in policy.Product, kernel.FusedProduct:
        q = kind(logits.requires_grad_(), batch, config())
        sample = q.sample()
        scores = q.log_probs(sample, kind(ref_logits, batch, config()))
        gradient = torch.autograd.grad(scores.logp.sum() - scores.kl.sum(), logits)
        results.append([sample.completions, *vars(scores).values(), *gradient])
    torch.testing.assert_close(*results)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_nvcc_compiles_it(tmp_path):
    targets = " ".join(f"-gencode arch=compute_{n},code=sm_{n}" for n in (80, 90))
    command = f"nvcc -fatbin -Werror all-warnings {targets} {kernel.SOURCE} -o kernel.fatbin"
    subprocess.run(command.split(), cwd=tmp_path, check=True)


def works(*_):
    return True


def fails(*_, **options):
    kernel.checked((SimpleNamespace(name="CUDA_ERROR_NO_DEVICE"), None))


@pytest.mark.parametrize(
    "device, changes, n_latent, load, reason, lines",
    [
        ("cuda", {}, 1, works, None, 0),
        ("cpu", {}, 1, works, "it needs a CUDA device, and this run is on cpu", 0),
        ("cuda", {}, 2, works, "no latent", 1),
        ("cuda", {"top_k": 5}, 1, works, "truncation", 1),
        ("cuda", {"top_p": 0.9}, 1, works, "truncation", 1),
        ("cuda", {"min_p": 0.1}, 1, works, "truncation", 1),
        ("cuda", {"xtc_probability": 0.1}, 1, works, "truncation", 1),
        ("cuda", {}, 1, fails, "RuntimeError: CUDA_ERROR_NO_DEVICE", 1),
        ("cuda", {}, 1, lambda *_: __import__("cuda.bindings.nothing"), "ModuleNotFoundError: ", 1),
        ("cuda", {}, 1, lambda *_: kernel.nothing, "AttributeError: ", 1),
        ("cuda", {}, 1, lambda: True, "TypeError: ", 1),
    ],
)
def test_the_kernel_runs_or_says_why_not(
    monkeypatch, capsys, device, changes, n_latent, load, reason, lines
):
    kernel.say_once.cache_clear()
    monkeypatch.setattr(kernel, "load", load)
    where = torch.device(device), SimpleNamespace(vocab_size=28, n_latent=n_latent)
    for _ in range(2):  # as for the policy and the reference
        assert kernel.usable(config(**changes), *where) == (not reason)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == lines and all(reason in line for line in told)
    assert not kernel.usable(config(kernel="torch", **changes), *where)
    if reason:
        line = f"^kernel=cuda can't run: .*{reason}.*; set kernel=auto or kernel=torch$"
        with pytest.raises(Mistake, match=line):
            kernel.usable(config(kernel="cuda", **changes), *where)
