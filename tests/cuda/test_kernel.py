"""Compare the kernel with the PyTorch code in grpo/policy.py that it stands in for.

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

from data.user_mistake import Mistake
from grpo import kernel
from grpo.policy import ComputeLogProbs
from grpo.run.config import Config

HOST = b"""
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
        (Path(folder) / "host.cc").write_bytes(HOST + kernel.SOURCE.read_bytes())
        command = "g++ -O1 -Wall -Werror -fPIC -shared host.cc -o host.so"
        subprocess.run(command.split(), cwd=folder, check=True)
        return ctypes.CDLL(Path(folder) / "host.so")


class Bindings:
    """Imitate what kernel.py calls: no error, and the last argument comes back."""

    def nvrtcCompileProgram(self, *given):  # noqa: N802
        return (0,)

    def __getattr__(self, name):
        return lambda *given: (0, given[-1])


def stand_in(**changes):
    """Imitate cuda.bindings, with these functions in place of some."""
    both = Bindings()
    vars(both).update(changes)
    return SimpleNamespace(driver=both, nvrtc=both)


def stand_in_that_launches(library):
    """Make a launch two loops on the CPU."""
    words = ("blockIdx", "threadIdx", "blockDim")
    block, thread, size = (ctypes.c_uint.in_dll(library, word) for word in words)

    def launch(name, blocks, y, z, threads, _, __, shared, stream, arguments, extra):
        size.value = threads
        for block.value in range(blocks):
            for thread.value in range(threads):
                library[name.decode()](*(of_type(value) for value, of_type in zip(*arguments)))
        return (0,)

    return stand_in(cuLaunchKernel=launch)


@pytest.fixture
def install(monkeypatch):
    """Return a function that puts a stand-in, or None, in the place of cuda.bindings."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    kernel.load.cache_clear()
    yield lambda bindings: monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    kernel.load.cache_clear()


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=needs_gpu)])
def device(request, monkeypatch):
    """Run a test on the CPU and on a GPU, with garbage in what the kernel has to fill in."""
    if request.param == "cpu":
        if not shutil.which("g++"):
            pytest.skip("no g++")
        request.getfixturevalue("install")(stand_in_that_launches(compile_for_cpu()))
        stream = SimpleNamespace(cuda_stream="stream")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, shape: x.new_full(shape, 99))
    return torch.device(request.param)


def score(function, logits, *given):
    """Return the four scores, and the gradient of a sum in which each has a weight of its own."""
    leaf = logits.detach().clone().requires_grad_()
    scores = function.apply(leaf, *given)
    loss = sum(x.sin().sum() for x in scores if x.requires_grad)
    return *(x.detach() for x in scores), *torch.autograd.grad(loss, leaf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "V, blanks, temperature",
    [(2, 0.7, 1), (28, 0.7, 0.8), (28, 0, 1), (40, 1, 0.3), (96, 0.7, 2.5)],
)
def test_scores_and_gradients_are_those_of_pytorch(device, V, blanks, temperature, dtype):
    B, T, G = 3, 11, 16
    torch.manual_seed(V)
    logits = 3 * torch.randn(2, B, T, V)
    logits[..., -1] = -1e9  # the blank is never drawn
    mask = torch.rand(B, T) < blanks
    y = torch.randint(V - 1, (B, G, T)).where(mask[:, None], torch.randint(-1, V, (B, 1, T)))
    given = [x.to(device) for x in (*logits.to(dtype), y, mask)]  # -1 is padding
    scattered = [x.mT.contiguous().mT for x in given]  # the kernel has to copy them back
    found = score(kernel.FusedLogProbs, *scattered, temperature)
    want = score(ComputeLogProbs, *(x.double() for x in given[:2]), *given[2:], temperature)
    assert found[4].dtype == dtype
    for x, exact in zip(found, want):
        rtol = 5e-5 if x.dtype == torch.float32 else 2.0**-8
        torch.testing.assert_close(x.double(), exact, rtol=rtol, atol=5e-5)


ERROR = SimpleNamespace(name="CUDA_ERROR_NO_DEVICE")


def fail(error):
    raise error


def write_log(program, log):
    ctypes.memmove(log, b"kernel.cu(7): no\nmore", len(log))
    return (0,)


NO_NVRTC = stand_in(nvrtcCreateProgram=lambda *_: fail(RuntimeError("no libnvrtc")))
NO_COMPILING = stand_in(
    nvrtcCompileProgram=lambda *_: (ERROR,),
    nvrtcGetProgramLogSize=lambda _: (0, 21),
    nvrtcGetProgramLog=write_log,
)
NO_LOADING = stand_in(cuModuleLoadData=lambda _: (ERROR, None))


def usable(device="cuda", n_latent=1, **settings):
    network = SimpleNamespace(n_latent=n_latent)
    return kernel.usable(Config(**settings), torch.device(device), network)


@pytest.mark.parametrize(
    "changes, bindings, reason",
    [
        ({}, stand_in(), ""),
        ({"device": "cpu"}, stand_in(), "on cpu"),
        ({"n_latent": 2}, stand_in(), "latent"),
        ({"top_k": 5}, stand_in(), "truncation"),
        ({"xtc_probability": 0.1}, stand_in(), "truncation"),
        ({}, None, "cuda.bindings"),
        ({}, NO_NVRTC, "no libnvrtc"),
        ({}, NO_COMPILING, "kernel.cu(7): no"),
        ({}, NO_LOADING, "CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_the_kernel_runs_or_says_why_not(install, capsys, changes, bindings, reason):
    """A run on a GPU prints the reason in one line, and kernel=cuda raises it."""
    install(bindings)
    kernel.say_once.cache_clear()
    for _ in range(2):  # as for the policy and the reference
        assert usable(**changes) == (not reason)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == ("device" not in changes and bool(reason))
    assert all(reason in line for line in told)
    assert not usable(**changes, kernel="torch")
    if reason:
        with pytest.raises(Mistake, match=re.escape(reason)):
            usable(**changes, kernel="cuda")


@pytest.mark.parametrize("error", [TypeError, RuntimeError])
def test_a_bug_is_not_taken_for_something_that_the_machine_lacks(install, error):
    install(stand_in(cuModuleLoadData=lambda _: fail(error)))
    with pytest.raises(error):
        usable()
