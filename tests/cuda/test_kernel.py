"""The kernel is compared with its definitions in grpo/policy.py.

The tests run on a CPU, and also on a GPU if there is one. On a CPU, g++ compiles kernel.cu together
with fiber.h, which turns CUDA's threads into fibers. `kernel.py` is the same on both, but on a CPU
a stand-in replaces `cuda.bindings`.

Shapes: B masked inputs, T characters, G group size, V vocabulary.
"""

import ctypes
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from conftest import early, make_batch

from data.user_mistake import Mistake
from grpo import policy
from grpo.cuda import kernel
from grpo.policy import Product
from grpo.run.config import Config
from grpo.run.network import Policy
from model.transformer import Generator, TransformerConfig

EPS = 2.0**-24  # float32: half a unit in the last place of 1
INF, NAN = float("inf"), float("nan")
NAMES = [
    f"{operation}<{number}, {lanes}, {columns}>"
    for operation in kernel.OPERATIONS
    for number in kernel.NUMBERS.values()
    for lanes, columns in kernel.LAYOUTS.values()
]
HEADER = f'#include "{Path(__file__).with_name("fiber.h")}"\n'
GPU = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def compiled(folder, source, flags):
    """Compile fiber.h and then `source` with g++: -> the path of the program or library."""
    (folder / "source.cc").write_text(HEADER + source, encoding="utf-8")
    command = f"g++ -std=c++20 -O0 -Wno-unknown-pragmas {flags} source.cc -o made"
    subprocess.run(command.split(), cwd=folder, check=True)
    return folder / "made"


def stand_in(library):
    """Imitate the part of cuda.bindings that kernel.py uses. A launch runs `library` on the CPU."""
    here = threading.local()  # each thread has a context of its own, or none

    def launch(name, x, y, z, threads, _, __, shared, stream, parameters, extra):
        assert (here.context, y, z, shared, stream, extra) == ("context", 1, 1, 0, 7, 0)
        words = [c_type(value) for value, c_type in zip(*parameters)]
        addresses = [word.value for word in words if isinstance(word, ctypes.c_void_p)]
        assert not any(address % 16 for address in addresses)  # a wide read may start there
        pointers = (ctypes.c_void_p * len(words))(*map(ctypes.addressof, words))
        assert library.run(name, x, threads, pointers)
        return (0,)

    names = []
    nvrtc = SimpleNamespace(
        names=names,
        nvrtcCreateProgram=lambda *_: (0, "program"),
        nvrtcAddNameExpression=lambda _, name: (names.append(name),),
        nvrtcCompileProgram=lambda *_: (0,),
        nvrtcGetCUBINSize=lambda _: (0, 0),
        nvrtcGetCUBIN=lambda *_: (0,),
        nvrtcGetLoweredName=lambda _, name: (0, name),
    )
    driver = SimpleNamespace(
        cuDevicePrimaryCtxRetain=lambda index: (0, "context"),
        cuCtxSetCurrent=lambda context: (setattr(here, "context", context),),
        cuModuleLoadData=lambda cubin: (0, "module"),
        cuModuleGetFunction=lambda _, symbol: (0, symbol),
        cuLaunchKernel=launch,
    )
    return SimpleNamespace(driver=driver, nvrtc=nvrtc)


def compile_for_fibers():
    """Compile kernel.cu to a library with run(name, blocks, threads, arguments).

    Returns its bytes, or None if there is no g++.
    """
    if not shutil.which("g++"):
        return None
    calls = [f'if (!strcmp(name, "{n}")) return launch({n}, blocks, threads, all);' for n in NAMES]
    run = "bool run(const char* name, unsigned blocks, unsigned threads, void** all)"
    source = kernel.SOURCE.read_text(encoding="utf-8")
    source = f'{source}\nextern "C" {run} {{ {"".join(calls)} return false; }}'
    with TemporaryDirectory() as folder:
        return compiled(Path(folder), source, "-O1 -Wall -Werror -fPIC -shared").read_bytes()


fibers = early("fibers", compile_for_fibers)


@pytest.fixture(scope="session")
def library(fibers, tmp_path_factory):
    if fibers is None:
        pytest.skip("no g++")
    path = tmp_path_factory.mktemp("fibers") / "made"
    path.write_bytes(fibers)
    return ctypes.CDLL(path)


@pytest.fixture
def bindings(library, monkeypatch):
    bindings = stand_in(library)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    kernel.load.cache_clear()
    yield bindings
    kernel.load.cache_clear()


@pytest.fixture(params=["fibers", pytest.param("gpu", marks=needs_gpu)])
def device(request):
    """Run a test on fibers and on a GPU.

    In its deterministic mode, PyTorch fills new tensors with NaN or with the largest integer. So a
    test fails if the kernel forgets to write a number.
    """
    if request.param == "fibers":
        request.getfixturevalue("bindings")
    torch.use_deterministic_algorithms(True)
    yield GPU if request.param == "gpu" else torch.device("cpu")
    torch.use_deterministic_algorithms(False)


def scattered(x):
    """Copy x with a gap after each number in memory."""
    return x.unsqueeze(-1).repeat(*[1] * x.dim(), 2)[..., 0]


def shifted(x):
    """Copy x into memory that begins one number after a multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)


def inputs(B, T, G, V, blanks=0.7, dtype=torch.float32):
    """Make logits, ref_logits (B,T,V), completions (B,G,T), kept (B,T,V) and mask (B,T)."""
    torch.manual_seed(V)
    logits = 3 * torch.randn(B, T, V)
    ref_logits = logits + torch.randn(B, T, V)
    if V > 2:
        logits[..., 1] = ref_logits[..., 1] = -INF  # a banned character
    logits, ref_logits = logits.to(dtype), ref_logits.to(dtype)
    mask = torch.rand(B, T) < blanks
    completions, kept = policy.sample_completions(
        logits,
        torch.zeros(B, T).long(),
        mask,
        torch.rand(B, G, T, 2),
        Config(temperature=0.8, top_p=0.9),
    )
    return logits, ref_logits, completions, kept, mask


def check(device, *given, temperature=0.8):
    """Compare forward and backward with the definitions in float64.

    The error that is allowed in a row grows with its largest finite |log-probability|. A result
    must be NaN exactly where the definition gives NaN. Three runs, with the tensors laid out
    differently in memory, must give the same bits.
    """
    logits, ref_logits, completions, kept, mask = given
    gradients = [torch.randn(x.shape) for x in (completions, mask, mask)]
    wide = logits.double(), ref_logits.double(), completions, kept, mask, temperature
    logs = torch.stack([policy.log_softmax(x, temperature) for x in wide[:2]])  # (2,B,T,V)
    finite = logs.nan_to_num(0, neginf=0).abs()
    room = 4 * EPS * (1 + finite.amax(dim=(0, 3))) * mask  # (B,T)
    pull = gradients[0].abs().sum(dim=1) + gradients[1].abs() + gradients[2].abs()  # (B,T)
    want = list(policy.logprobs_forward(*wide))
    want.append(policy.logprobs_backward([g.double() for g in gradients], *wide))
    rooms = [room[:, None], room[:, None], room, room, (room * pull)[..., None] / temperature]
    if logits.dtype == torch.bfloat16:
        rooms[4] = rooms[4] + 2.0**-8 * want[4].abs()

    runs = []
    for change in torch.clone, scattered, shifted:
        leaf = logits.clone().to(device).requires_grad_()
        rest = [change(x.to(device)) for x in given[1:]]
        logp, ref_logp, kl, entropy = kernel.logprobs(change(leaf), *rest, temperature)
        assert not ref_logp.requires_grad
        pulled = [change(g.to(device)) for g in gradients]
        torch.autograd.backward((logp, kl, entropy), pulled)
        runs.append([x.detach().cpu() for x in (logp, ref_logp, kl, entropy, leaf.grad)])
    names = "logp", "ref_logp", "kl", "entropy", "gradient"
    for name, x, y, allowed, *others in zip(names, runs[0], want, rooms, *runs[1:]):
        near = (x == y) | ((x - y).abs() <= allowed) | (x.isnan() & y.isnan())
        assert near.all(), name
        for other in others:
            torch.testing.assert_close(x, other, rtol=0, atol=0, equal_nan=True)
    return runs[0]


@both_types
@pytest.mark.parametrize("V", [1, 32, 33, 96])
def test_logprobs_agree_with_float64(device, V, dtype):
    for G, blanks in (1, 0.7), (33, 0.7), (5, 0), (64, 1):
        check(device, *inputs(3, 7, G, V, blanks, dtype))


@both_types
def test_extreme_and_broken_rows(device, dtype):
    logits, ref_logits, completions, kept, mask = inputs(1, 15, 1500, 28, 1, dtype)
    logits[0, 0] = ref_logits[0, 0] = -INF  # only character 5 is possible: log p = KL = H = 0
    logits[0, 0, 5] = ref_logits[0, 0, 5] = 2.0
    logits[0, 1] = 3e4 * torch.randn(28)
    logits[0, 2], ref_logits[0, 2] = 1e-30 * torch.randn(28), 1e-38
    logits[0, 3] = ref_logits[0, 3]  # KL 0
    ref_logits[0, 4] = -60 * logits[0, 4].clamp(min=-9)  # its softmax is 0 for every kept character
    logits[0, 5] = 1e30  # so large that adding log 27 to it changes nothing
    ref_logits[0, 6] += 1e4
    logits[0, :, 1] = -INF  # ban this character again
    completions, kept = policy.sample_completions(
        logits,
        completions[:, 0],
        mask,
        torch.rand(1, 1500, 15, 2),
        Config(temperature=0.5, top_p=0.95),
    )
    kept[0, 7] = kept[0, 7].roll(3)  # so the likeliest character and some draws are not kept
    logits[0, 8] = -INF
    logits[0, 9, 20], logits[0, 10, 3], ref_logits[0, 11, 4] = NAN, INF, NAN
    logits[0, 12] = NAN
    logp, ref_logp, kl, entropy, gradient = check(
        device, logits, ref_logits, completions, kept, mask, temperature=0.5
    )
    assert (logp[0, :, 0] == 0).all() and kl[0, 0] == entropy[0, 0] == kl[0, 3] == 0
    assert (ref_logp[0, :, 4] > -1e4).all()
    broken = [8, 9, 10, 12]  # rows 9 and 10 have one bad logit, in rows 8 and 12 all are bad
    assert gradient[0].isnan().all(dim=-1).nonzero()[:, 0].tolist() == broken
    assert entropy[0].isnan().nonzero()[:, 0].tolist() == broken


def test_a_thread_without_a_context_gets_one(device):
    given = inputs(3, 7, 2, 28)
    check(device, *given)  # this loads the kernel, and the other thread only launches it
    with ThreadPoolExecutor() as other:
        other.submit(check, device, *given).result()


def at_the_edges(logits, temperature):
    """Make uniforms on both sides of each character's cumulative weight: (B,T,V) -> (B,2V,T).

    If a weight is off by one, one of these uniforms draws another character.
    """
    ends = policy.integer_weights(logits, temperature).cumsum(dim=-1)  # (B,T,V)
    total = ends[..., -1:]  # (B,T,1)
    last_before = (ends - 1).clamp(min=0)  # (B,T,V)
    first_after = torch.minimum(ends, total - 1)  # (B,T,V)
    target = torch.cat([last_before, first_after], dim=-1)  # (B,T,2V)
    # The sampler computes ⌊uniform · total⌋. We find the smallest uniform that gives `target`.
    smallest = (target * 2**24 + total - 1) // total  # (B,T,2V)
    return (smallest.clamp(max=2**24 - 1).double() / 2**24).float().transpose(1, 2)


SETTINGS = [  # temperature, top_k, top_p, min_p
    (0.9, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.7, 40, 0.7, 0.01),
    (1.0, 2000, 0.0, 0.0),
]


@both_types
@pytest.mark.parametrize("V", [1, 32, 33, 96])
def test_the_sampler_keeps_and_draws_the_same(device, V, dtype):
    torch.manual_seed(V)
    logits = 2 * torch.randn(3, 17, V)
    logits[0] = (2 * logits[0]).round() / 2  # many ties
    logits[1, :, ::3] = -INF if V > 1 else 0
    logits[2, 0] = 3.0  # all tied
    logits[2, 1], logits[2, 2] = 1e4 * torch.randn(V), 1e-30 * torch.randn(V)  # huge, tiny
    logits[2, 3], logits[2, 3, V // 2] = -INF, -7  # only one is possible
    if V > 2:
        # In row 0, two weights are next to min_p's threshold, 0.1 · 2^21. In row 1, the first
        # weight is just below top_p's threshold, 0.9 times the sum of the row.
        weights = [[2**21, 209715, 209716], [2**21, 233017, 0], [2**21, 2**21 - 1, 1]]
        logits[2, 4:7] = -INF
        logits[2, 4:7, :3] = (torch.tensor(weights).double() / 2**21).log().float()
    logits = logits.to(dtype)
    edges = at_the_edges(logits, 0.9)  # (3,2V,17)
    uniforms = torch.cat([torch.rand(3, 7, 17), edges], dim=1)
    uniforms[:, 5], uniforms[:, 6] = 0, 1 - EPS  # the ends of the range
    logits[2, 7], logits[2, 8], logits[2, 9, 0], logits[2, 10, V // 2] = -INF, NAN, INF, NAN
    masked, mask = torch.randint(V, (3, 17)), torch.rand(3, 17) < 0.9
    for i, (temperature, top_k, top_p, min_p) in enumerate(SETTINGS):
        given = logits, masked, mask, uniforms[:, i:, :, None].expand(-1, -1, -1, 2)
        options = Config(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        want = policy.sample_completions(*given, options)
        for change in torch.clone, scattered, shifted:
            have = kernel.sample_completions(*[change(x.to(device)) for x in given], options)
            for name, x, y in zip(("completions", "kept"), have, want):
                assert torch.equal(x.cpu(), y), name


@pytest.mark.parametrize("chosen", ["cuda", "torch"])
def test_a_policys_distributions_know_which_kernel_the_run_chose(monkeypatch, chosen):
    monkeypatch.setattr(kernel, "choose", lambda *_: chosen)
    network = Generator(TransformerConfig(12, 6, 1, 1, 8, blank=11))
    batch = make_batch(torch.randint(11, (2, 6)), torch.rand(2, 6) < 0.7, 11, 5, (0,))
    q = Policy(network, Config(), torch.device("cpu"))(batch)
    assert type(q) is {"cuda": kernel.FusedProduct, "torch": Product}[chosen]


def test_a_fused_product_samples_and_scores_by_the_kernel(device, monkeypatch):
    torch.manual_seed(0)
    batch = make_batch(torch.randint(11, (2, 6)), torch.rand(2, 6) < 0.7, 11, 5, (0,))
    batch = batch.map(lambda x: x.to(device))
    logits, ref_logits = torch.randn(2, 2, 6, 12, device=device)  # each (B,T,V)
    launched, launch = [], kernel.launch
    monkeypatch.setattr(kernel, "launch", lambda *all: launched.append(all[0]) or launch(*all))
    found = []
    for fused in (False, True):
        how = Config(temperature=0.8, top_p=0.9)
        kind = kernel.FusedProduct if fused else Product
        leaf = logits.clone().requires_grad_()
        q = kind(leaf, batch, how)
        fills = q.sample(batch.uniforms)
        scores = q.score(fills, kind(ref_logits, batch, how))
        (scores.logp.sum() + scores.kl.sum() - scores.entropy.sum()).backward()
        found.append(vars(fills) | vars(scores) | {"gradient": leaf.grad})
        assert launched == (list(kernel.OPERATIONS) if fused else [])
    torch.testing.assert_close(found[1], found[0])


MEMORY = r"""
#include <stdint.h>
#include <stdlib.h>
const int V = 8, G = 8, ROWS = 3 * 32;    // of three blocks, the last one not quite full; T = 1
float z[ROWS * V], r[ROWS * V], u[ROWS * G];
long long masked[ROWS];
bool mask[ROWS];
struct Outputs {
    long long draws[ROWS * G];
    bool kept[ROWS * V];
    float logp[ROWS * G], ref_logp[ROWS * G], kl[ROWS], entropy[ROWS], norms[ROWS * 5];
    float gradient[ROWS * V];
} near, far;

template <class... P>
void run(long long skip, void (*kernel)(P...), std::type_identity_t<P>... values) {
    void* arguments[] = {(void*)&values...};
    if (launch(kernel, (skip + ROWS) / 32, THREADS, arguments, skip / 32)) return;
    fputs(fiber_error, stderr);
    exit(1);
}

void all(Outputs& o, long long skip) {    // as the rows from number `skip` on
    auto V_ = [=](auto* x) { return (decltype(x))((uintptr_t)x - skip * V * sizeof *x); };
    auto G_ = [=](auto* x) { return (decltype(x))((uintptr_t)x - skip * G * sizeof *x); };
    auto N_ = [=](auto* x) { return (decltype(x))((uintptr_t)x - skip * 5 * sizeof *x); };
    auto I_ = [=](auto* x) { return (decltype(x))((uintptr_t)x - skip * sizeof *x); };
    const int B = skip + ROWS - 5;
    run(skip, sample_completions<float, 4, 8>, V_(z), I_(masked), I_(mask), G_(u), G_(o.draws),
        V_(o.kept), B, 1, G, V, 1.0, 6, 0.95, 0.01);
    run(skip, logprobs_forward<float, 4, 8>, V_(z), V_(r), G_(o.draws), V_(o.kept), I_(mask),
        G_(o.logp), G_(o.ref_logp), I_(o.kl), I_(o.entropy), N_(o.norms), B, 1, G, V, 1.0);
    run(skip, logprobs_backward<float, 4, 8>, V_(z), V_(r), G_(o.draws), V_(o.kept), I_(mask),
        I_(o.kl), I_(o.entropy), N_(o.norms), G_(o.logp), I_(o.kl), I_(o.entropy), V_(o.gradient),
        B, 1, G, V, 1.0);
}

int main() {
    for (float& x : z) x = 4.f * rand() / RAND_MAX;
    for (float& x : r) x = 4.f * rand() / RAND_MAX;
    for (float& x : u) x = rand() % 1000 / 1000.f;
    for (bool& x : mask) x = rand() % 4;
    all(near, 0);
    all(far, ((1LL << 32) / 5 / 32 + 1) * 32);    // where even `norms` has passed 2^32 numbers
    return memcmp(&near, &far, sizeof near) ? 2 : 0;
}"""
SYNC = "__syncwarp();\n    if (!p.there) return;"

FAULTS = [  # what stands in kernel.cu, what is planted there, what the sanitizer says of it
    ("", "", ""),
    (SYNC, SYNC.replace("__syncwarp();", ""), "data race"),
    ("norms + (long long)p.row * 5", "norms + p.row * 5", "SEGV"),
    ("team_max<LANES>(top);", "if (p.lane != 3) team_max<LANES>(top);", "is elsewhere"),
]


@pytest.fixture(scope="module", autouse=True)
def sanitized(tmp_path_factory):
    """Start the program with each of FAULTS under the thread sanitizer, while other tests run."""
    if not Path(subprocess.getoutput("g++ -print-file-name=libtsan.so")).exists():
        yield []
        return
    source = kernel.SOURCE.read_text(encoding="utf-8")
    folders = [tmp_path_factory.mktemp("fault") for _ in FAULTS]

    def run(folder, old, new):
        assert old in source
        program = compiled(folder, source.replace(old, new, 1) + MEMORY, "-w -fsanitize=thread")
        return subprocess.run([program], capture_output=True, text=True)

    with ThreadPoolExecutor() as pool:
        yield [pool.submit(run, folder, *fault[:2]) for folder, fault in zip(folders, FAULTS)]


@pytest.mark.parametrize("fault", range(len(FAULTS)))
def test_lanes_do_not_race_and_offsets_are_long(sanitized, fault):
    """No two lanes race, all lanes take part in each exchange, and offsets beyond 2^32 are right.

    Each fault of FAULTS is planted in turn, and it must be noticed.
    """
    if not sanitized:
        pytest.skip("no thread sanitizer")
    message = FAULTS[fault][2]
    ran = sanitized[fault].result()
    if "FATAL: ThreadSanitizer" in ran.stderr:
        pytest.skip(ran.stderr.splitlines()[0])
    assert message in ran.stderr and (ran.returncode == 0) == (not message), ran.stderr


def compile_with_nvcc():
    """Compile kernel.cu for a GPU: -> what the compiler says about each function's registers."""
    table = ", ".join(f"(void*){name}" for name in NAMES)
    source = f'#include "{kernel.SOURCE}"\nvoid* table[] = {{{table}}};'
    command = "nvcc -cubin -arch=sm_80 -Xptxas -v all.cu -o all.cubin".split()
    with TemporaryDirectory() as folder:
        (Path(folder) / "all.cu").write_text(source, encoding="utf-8")
        return subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True
        ).stderr


nvcc = early("nvcc", compile_with_nvcc)


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_nvcc_keeps_everything_in_registers(nvcc):
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill st.*, (\d+) bytes spill", nvcc)
    assert found == [("0", "0", "0")] * len(NAMES), nvcc


def test_nvrtc_compiles_what_kernel_py_asks_for(bindings, monkeypatch):
    monkeypatch.delitem(sys.modules, "cuda.bindings")
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    bindings.nvrtc = nvrtc
    loaded = []
    bindings.driver.cuModuleLoadData = lambda cubin: (loaded.append(cubin),)
    try:
        _, functions = kernel.load(0, torch.bfloat16, (8, 12))
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])
    assert b"logprobs_backwardI4bf16Li8ELi12E" in functions["logprobs_backward"]
    assert loaded[0].startswith(b"\x7fELF") and functions["logprobs_backward"] in loaded[0]


def network(vocab_size, n_latent=1):
    return SimpleNamespace(vocab_size=vocab_size, n_latent=n_latent)


def config(**changes):
    common = {"kernel": "auto", "group_size": 16, "dtype": "float32", "xtc_probability": 0.0}
    return SimpleNamespace(**common | changes)


def test_a_kernel_that_disagrees_is_not_used(bindings, monkeypatch, capsys):
    monkeypatch.setattr(kernel, "agrees", lambda *_: True)
    assert kernel.choose(config(), GPU, network(28)) == "cuda"
    assert kernel.choose(config(kernel="torch"), GPU, network(28)) == "torch"
    monkeypatch.setattr(kernel, "agrees", lambda *_: False)
    assert kernel.choose(config(), GPU, network(28)) == "torch"
    assert "its results differ from those of PyTorch" in capsys.readouterr().err
    with pytest.raises(Mistake, match="its results differ from those of PyTorch"):
        kernel.choose(config(kernel="cuda"), GPU, network(28))


@pytest.mark.parametrize("fault", [None, "draws", "scores"])
def test_a_kernel_agrees_if_its_draws_and_scores_are_those_of_pytorch(monkeypatch, fault):
    def sample(*arguments):
        completions, kept = policy.sample_completions(*arguments)
        return (completions + (fault == "draws")) % 28, kept

    def score(*arguments):
        logp, *others = policy.compute_logprobs(*arguments)
        return logp * (1.1 if fault == "scores" else 1), *others

    monkeypatch.setattr(kernel, "sample_completions", sample)
    monkeypatch.setattr(kernel, "logprobs", score)
    settings = Config(temperature=0.8, dtype="float32")
    assert kernel.agrees(settings, torch.device("cpu"), 28) == (fault is None)


@pytest.mark.parametrize(
    "where, changes, sizes, reason",
    [
        ("cpu", {}, [28], "it needs a CUDA device, not 'cpu'"),
        ("cuda", {}, [97], "it takes a vocabulary of at most 96 characters, not 97"),
        ("cuda", {}, [28, 64], "it cannot handle a latent, and the generator has n_latent=64"),
        ("cuda", {"xtc_probability": 0.1}, [28], "it has no XTC: xtc_probability must be 0"),
        ("cuda", {}, [28], "RuntimeError: CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_why_the_kernel_cannot_run_is_one_line(bindings, capsys, where, changes, sizes, reason):
    no_device = SimpleNamespace(name="CUDA_ERROR_NO_DEVICE")
    bindings.driver.cuDevicePrimaryCtxRetain = lambda index: (no_device, None)
    assert kernel.choose(config(**changes), torch.device(where), network(*sizes)) == "torch"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (where == "cuda") and all(line.endswith(reason) for line in lines)
    line = f"kernel='cuda' cannot run: {reason}; set kernel to 'auto' or 'torch'"
    with pytest.raises(Mistake, match=f"^{re.escape(line)}$"):
        kernel.choose(config(kernel="cuda", **changes), torch.device(where), network(*sizes))


def test_without_cuda_bindings_pytorch_does_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    kernel.load.cache_clear()
    assert kernel.choose(config(), GPU, network(28)) == "torch"
    assert "ModuleNotFoundError: " in capsys.readouterr().err


def test_bfloat16_gradients_are_rounded_to_even(device):
    scales = 10.0 ** torch.randint(-30, 30, (1000,))
    wide = torch.randn(1000) * scales, torch.tensor([INF, 3.4e38, NAN])
    nan_of_a_gpu = torch.tensor([2**31 - 1], dtype=torch.int32).view(torch.float32)
    g = torch.cat([1 + torch.arange(1024) * 2.0**-9, *wide, nan_of_a_gpu])
    T = len(g)
    # Each completion is character 1, which has probability q = 0. Its logit gets g · (1 − q) = g.
    logits = torch.tensor([0, -INF, 1]).expand(1, T, 3).bfloat16().to(device)
    leaf = logits.clone().requires_grad_()
    ones = torch.ones(1, 1, T, dtype=torch.int64, device=device)
    kernel.logprobs(leaf, logits, ones, logits > 0, ones[0] > 0, 1.0)[0].backward(
        g.to(device)[None, None]
    )
    found, want = leaf.grad[0, :, 1].cpu(), g.bfloat16()
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
