"""grpo/kernel.cu against its definitions in grpo/sampling.py and grpo/stats.py, on a CPU and, where
there is one, on a GPU.

On a CPU g++ compiles the same kernel.cu behind tests/fiber.h, and grpo/kernel.py launches it as it
would on a GPU: only its function `run` is replaced.

Letters: B masked inputs, T characters, G group size, V vocabulary.
"""

import contextlib
import ctypes
import enum
import functools
import itertools
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch

import train_grpo
from grpo import kernel, sampling, stats
from tests.conftest import command_line

EPS = 2.0**-24  # float32: half a unit in the last place of 1
INF, NAN = float("inf"), float("nan")


def build(folder, source, names, more="", name="run.so"):
    """kernel.cu as a shared library of one function, in the place of `kernel.run`."""
    if not shutil.which("g++"):
        pytest.skip("no g++")
    calls = "".join(
        f'if (!strcmp(name, "{n}"))\n'
        f'    return launch({n}, blocks, threads, arguments) ? "" : fiber_error;\n'
        for n in names
    )
    (folder / "run.cc").write_text(
        f'#include "{Path(__file__).with_name("fiber.h")}"\n{source}\n'
        'extern "C" const char* run(\n'
        "    const char* name, unsigned blocks, unsigned threads, void** arguments\n"
        f') {{\n{calls}return "no such kernel"; }}\n{more}'
    )
    subprocess.run(
        [
            "g++",
            "-std=c++20",
            "-O1",
            "-Wall",
            "-Wno-unknown-pragmas",
            "-Werror",
            "-fPIC",
            "-shared",
            "run.cc",
            "-o",
            name,
        ],
        cwd=folder,
        check=True,
    )
    library = ctypes.CDLL(folder / name)
    library.run.restype = ctypes.c_char_p

    def run(name, blocks, parameters, device):
        words = [c_type(value) for value, c_type in zip(*parameters)]
        addresses = [word.value or 0 for word in words if isinstance(word, ctypes.c_void_p)]
        assert not any(address % 16 for address in addresses)  # a wide read may start there
        pointers = (ctypes.c_void_p * len(words))(*map(ctypes.addressof, words))
        problem = library.run(name.encode(), blocks, kernel.THREADS, pointers).decode()
        if problem:
            raise RuntimeError(problem)

    return run


@pytest.fixture(scope="session")
def fibers(tmp_path_factory):
    return build(tmp_path_factory.mktemp("fibers"), kernel.SOURCE.read_text(), kernel.NAMES)


@pytest.fixture(params=["fibers", "cuda"])
def device(request, monkeypatch):
    """Where the kernel runs: on fibers, on a GPU; or not at all: its `definition` does the work."""
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU")
        assert kernel.choose("cuda", "cuda") == "cuda"
        return "cuda"
    if request.param == "fibers":
        monkeypatch.setattr(kernel, "run", request.getfixturevalue("fibers"))
        monkeypatch.setattr(kernel, "load", lambda device: ({}, ""))
    return "cpu"


@pytest.fixture
def nothing_loaded(monkeypatch):
    """A GPU on which nothing has been compiled, and a compiler that makes nothing."""
    for name in "load_on", "primary_context":
        function = getattr(kernel, name).__wrapped__
        monkeypatch.setattr(kernel, name, functools.cache(function))
    monkeypatch.setattr(kernel, "cached", lambda key, build: b"\n" * len(kernel.NAMES))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


everywhere = pytest.mark.parametrize("device", ["definition", "fibers", "cuda"], indirect=True)


def inputs(B, T, G, V, blanks=0.7, seed=0):
    """logits, ref_logits and kept (B,T,V), completions (B,G,T), mask (B,T); a column is banned."""
    torch.manual_seed(seed)
    logits = 3 * torch.randn(B, T, V)
    ref_logits = logits + torch.randn(B, T, V)
    if V > 2:
        logits[..., 1] = ref_logits[..., 1] = -INF  # a banned token
    mask = torch.rand(B, T) < blanks
    completions, kept = sampling.sample_completions(
        logits, torch.zeros(B, T).long(), mask, torch.rand(B, G, T), 0.8, top_p=0.9
    )
    return logits, ref_logits, completions.contiguous(), kept, mask


def compare(device, args, temperature, dtype=torch.float32):
    """Forward and backward against the definitions in float64, and the same bits in a second run.

    Within a few roundings of each row's magnitude: its largest finite |log p| or |log r|.
    """
    logits, ref_logits, completions, kept, mask = args = [
        x.to(dtype) if x.is_floating_point() else x for x in args
    ]
    B, G, T = completions.shape
    gradients = (
        torch.randn(B, T, G).transpose(1, 2),
        torch.randn(B, T),
        torch.randn(B, T),
    )  # the first is not contiguous
    wide = logits.double(), ref_logits.double(), completions, kept, mask, temperature
    expected, expected_gradient = (
        stats.stats_forward(*wide),
        stats.stats_backward([g.double() for g in gradients], *wide),
    )
    logs = torch.stack([stats.log_softmax(x, temperature) for x in wide[:2]])  # (2,B,T,V)
    magnitude = 1 + logs.masked_fill(logs == -INF, 0).abs().amax(dim=(0, 3))  # (B,T)
    args, runs = [x.to(device) for x in args], []
    for _ in range(2):
        leaf = args[0].clone().requires_grad_()
        logp, ref_logp, kl, entropy = outputs = kernel.stats(leaf, *args[1:], temperature)
        assert not ref_logp.requires_grad
        torch.autograd.backward((logp, kl, entropy), [g.to(device) for g in gradients])
        runs.append([x.detach().cpu() for x in (*outputs, leaf.grad)])
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    *outputs, gradient = runs[0]
    for name, x, y in zip(("logp", "ref_logp", "kl", "entropy"), outputs, expected):
        room = (
            4
            * EPS
            * (magnitude[:, None] if x.dim() == 3 else magnitude)
            * mask.view(B, *[1] * (x.dim() - 2), T)
        )  # nothing, if no blank
        error = torch.where(x == y, 0, (x - y).abs())  # -inf where a completion is outside S
        assert x.dtype == torch.float32 and (error <= room).all(), (
            name,
            (error / room.clamp(min=EPS)).max(),
        )
    pull = (
        gradients[0].abs().sum(dim=1) + gradients[1].abs() + gradients[2].abs()
    ) / temperature  # (B,T)
    room = (4 * EPS * magnitude * pull * mask)[..., None] + (
        2.0**-8 * expected_gradient.abs() if dtype == torch.bfloat16 else 0
    )
    error = (gradient - expected_gradient).abs()
    assert gradient.dtype == dtype and (error <= room).all(), (
        "gradient",
        (error / room.clamp(min=1e-30)).max(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "V, G, blanks",
    [
        (1, 1, 0.7),
        (27, 2, 0.7),
        (28, 16, 0.7),
        (28, 4, 0),
        (28, 4, 1),
        (96, 64, 0.7),
        (97, 8, 0.7),
        (255, 33, 0.7),
        (256, 16, 0.7),
        (1000, 5, 0.7),
        (1024, 64, 0.7),
    ],
)
def test_stats_agree_with_float64(device, V, G, blanks, dtype):
    compare(device, inputs(3, 7, G, V, blanks), 0.8, dtype)


def test_stats_of_extreme_rows(device):
    logits, ref_logits, completions, kept, mask = inputs(1, 9, 5, 28, blanks=1)
    logits[0, 0], ref_logits[0, 0] = -INF, -INF  # one character alone: log p = 0, KL = H = 0
    logits[0, 0, 5] = ref_logits[0, 0, 5] = 2.0
    logits[0, 1] = 3e4 * torch.randn(28)
    logits[0, 2], ref_logits[0, 2] = 1e-30 * torch.randn(28), 1e-38
    logits[0, 3] = ref_logits[0, 3]  # KL 0
    ref_logits[0, 4] = (
        -logits[0, 4].clamp(min=-9) * 60
    )  # the reference thinks all of S impossible: exp is 0 on it
    logits[0, 5] = 1e30  # the last bits of 1e30 are worth more than everything else
    ref_logits[0, 6] += 1e4
    logits[0, :, 1] = -INF  # still banned
    completions, kept[:] = sampling.sample_completions(
        logits, completions[:, 0], mask, torch.rand(1, 5, 9), 0.5, top_p=0.95
    )
    kept[0, 7], completions = (
        kept[0, 7].roll(3),
        completions.contiguous(),
    )  # the likeliest is not in S, nor are all completions
    compare(device, (logits, ref_logits, completions, kept, mask), 0.5)
    args = [x.to(device) for x in (logits, ref_logits, completions, kept, mask)]
    logp, ref_logp, kl, entropy = kernel.stats(*args, 0.5)
    assert (
        (logp[0, :, 0] == 0).all()
        and kl[0, 0] == entropy[0, 0] == kl[0, 3] == 0
        and (ref_logp[0, :, 4] > -1e4).all()
    )


@everywhere
def test_broken_rows_are_flagged_alone(device):
    args = [x.to(device) for x in inputs(2, 8, 6, 28, blanks=1)]
    logits, ref_logits, completions, kept, mask = args
    masked, uniforms = torch.full((2, 8), 7, device=device), torch.rand(2, 6, 8, device=device)
    clean, clean_draws = (
        kernel.stats(*args, 0.8),
        kernel.sample_completions(logits, masked, mask, uniforms),
    )
    unlikely = int((~kept[0, 1]).nonzero()[-1])
    logits[0, 0], logits[0, 1, unlikely], logits[0, 2, 3], logits[1, 7], ref_logits[0, 3, 4] = (
        -INF,
        NAN,
        INF,
        NAN,
        NAN,
    )
    leaf = logits.clone().requires_grad_()
    logp, ref_logp, kl, entropy = kernel.stats(leaf, ref_logits, completions, kept, mask, 0.8)
    torch.autograd.backward((logp, kl), (torch.ones_like(logp), torch.ones_like(kl)))
    broken = torch.zeros(2, 8, dtype=torch.bool, device=device)
    broken[0, :3] = broken[1, 7] = True
    for x in (logp.transpose(1, 2), entropy[..., None], leaf.grad):
        assert (x.isnan().any(dim=-1) == broken)[:, [0, 1, 2, 4, 5, 6, 7]].all() and x[
            broken
        ].isnan().all()
    assert (
        leaf.grad[0, 3].isnan().any()
        and ref_logp[0, :, 3].isnan().all()
        and kl[0, 3].isnan()
        and not logp[0, :, 3].isnan().any()
    )
    broken[0, 3] = True
    for x, y in zip((logp, ref_logp, kl, entropy), clean):
        assert torch.equal(x.movedim(-1, 1)[~broken], y.movedim(-1, 1)[~broken])
    draws, kept = kernel.sample_completions(logits, masked, mask, uniforms)
    broken[0, 3] = False  # it is the reference's
    draws, clean_draws = draws.transpose(1, 2), (clean_draws[0].transpose(1, 2), clean_draws[1])
    assert not kept[broken].any() and (draws[broken] == 7).all()
    assert torch.equal(draws[~broken], clean_draws[0][~broken]) and torch.equal(
        kept[~broken], clean_draws[1][~broken]
    )


def test_completions_outside_the_vocabulary_are_flagged_alone(device):
    logits, ref_logits, completions, kept, mask = args = [
        x.to(device) for x in inputs(1, 8, 6, 28, blanks=1)
    ]
    clean = kernel.stats(*args, 0.8)
    completions[0, 0, 0], completions[0, 1, 1], completions[0, 2, 2] = -1, 28, 2**40
    leaf = logits.clone().requires_grad_()
    logp, ref_logp, kl, entropy = kernel.stats(leaf, *args[1:], 0.8)
    logp.sum().backward()
    assert (
        logp[0].isnan().nonzero().tolist()
        == ref_logp[0].isnan().nonzero().tolist()
        == [[0, 0], [1, 1], [2, 2]]
    )
    assert (
        torch.equal(logp[..., 3:], clean[0][..., 3:])
        and torch.equal(kl, clean[2])
        and torch.equal(entropy, clean[3])
    )
    torch.testing.assert_close(
        leaf.grad.sum(dim=-1)[0] * 0.8, torch.tensor([-1.0] * 3 + [0.0] * 5, device=device)
    )  # 1[v = y] is nowhere


def scattered(x):
    """Every second number in memory."""
    return x.unsqueeze(-1).repeat(*[1] * x.dim(), 2)[..., 0]


def shifted(x):
    """One number further than where PyTorch begins a tensor, which is a multiple of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)


def test_tensors_that_are_not_contiguous(device):
    args = [x.to(device) for x in inputs(3, 7, 4, 28)]
    logits, _, completions, _, mask = args
    draw_from = logits, completions[:, 0].contiguous(), mask, torch.rand(3, 4, 7, device=device)
    for f, tensors in (kernel.sample_completions, draw_from), (kernel.stats, args):
        assert not any(scattered(x).is_contiguous() for x in tensors)
        assert all(x.data_ptr() % 16 for x in map(shifted, tensors))
        for change in scattered, shifted:
            assert all(map(torch.equal, f(*map(change, tensors)), f(*tensors)))
    gradients = []
    for change in scattered, shifted, torch.clone:
        leaf = logits.clone().requires_grad_()
        logp, *_ = kernel.stats(change(leaf), *map(change, args[1:]))
        logp.backward(change(torch.ones_like(logp)))
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[2]) and torch.equal(gradients[1], gradients[2])


@pytest.mark.parametrize("V", [1, 27, 28, 96, 97, 255, 256, 1000, 1024])
def test_sampler_keeps_and_draws_the_same(device, V):
    torch.manual_seed(V)
    settings = (
        dict(),
        dict(top_k=5),
        dict(top_p=0.9),
        dict(min_p=0.05),
        dict(top_k=40, top_p=0.7, min_p=0.01, temperature=0.7),
        dict(top_k=V, top_p=0, temperature=1),
    )
    wrong = draws = 0
    for i, setting in enumerate(settings):
        logits = 2 * torch.randn(3, 14, V)
        logits[0] = (2 * logits[0]).round() / 2  # many ties
        logits[1, :, ::3] = -INF if V > 1 else 0
        logits[2, 0], logits[2, 1], logits[2, 2] = (
            3.0,
            1e4 * torch.randn(V),
            1e-30 * torch.randn(V),
        )  # nothing but ties; huge; tiny
        logits[2, 3], logits[2, 3, V // 2] = -INF, -7  # one character alone
        logits = logits.bfloat16() if i % 2 else logits
        masked, mask, uniforms = (
            torch.randint(V, (3, 14)),
            torch.rand(3, 14) < (0.9, 0, 1, 1, 1, 1)[i],
            torch.rand(3, 64, 14),
        )
        uniforms[:, 0], uniforms[:, 1] = 0, 1 - EPS  # the ends of the range
        expected, expected_kept = sampling.sample_completions(
            logits, masked, mask, uniforms, **setting
        )
        completions, kept = (
            x.cpu()
            for x in kernel.sample_completions(
                *(x.to(device) for x in (logits, masked, mask, uniforms)), **setting
            )
        )
        differ = (kept != expected_kept & mask[..., None]).any(dim=-1) | (
            completions != expected
        ).any(dim=1)  # (B,T)
        assert not differ[~mask].any() and (
            not mask[2, 3] or (completions[2, :, 3] == V // 2).all()
        )
        for G in (1, 33):  # a draw depends on its own uniform alone
            fewer = kernel.sample_completions(
                *(x.to(device) for x in (logits, masked, mask, uniforms[:, :G])), **setting
            )[0]
            assert torch.equal(fewer.cpu(), completions[:, :G])
        wrong, draws = wrong + int(differ.sum()), draws + 64 * int(mask.sum())
    assert draws > 12_000  # 9 vocabularies: more than 100,000
    assert wrong <= (
        draws / 10_000 if device == "cuda" else 0
    )  # rows in which two exp round a weight differently


def at_the_edges(logits, temperature):
    """Uniforms on both sides of each character's end: a weight that is off by one moves a draw.

    logits (1,T,V) -> uniforms (1,2V,T), and the rows (T,) in which they hit exactly.
    """
    ends = sampling.integer_weights(logits, temperature).cumsum(dim=-1)  # (1,T,V)
    total = ends[..., -1:]  # (1,T,1)
    last_before = (ends - 1).clamp(min=0)  # (1,T,V)
    first_after = torch.minimum(ends, total - 1)  # (1,T,V)
    target = torch.cat([last_before, first_after], dim=-1)  # (1,T,2V)
    smallest = (target * 2**24 + total - 1) // total  # (1,T,2V) the smallest u that points there
    uniforms = (smallest.double() / 2**24).float().transpose(1, 2)  # (1,2V,T)
    return uniforms.contiguous(), total[0, :, 0] < 2**24


@pytest.mark.parametrize("V", [28, 97])
def test_weights_agree_to_the_last_unit(device, V):
    torch.manual_seed(V)
    logits = 4 * torch.randn(1, 300, V) - 4
    uniforms, exact = at_the_edges(logits, 0.9)
    assert exact.sum() > 200
    mask = torch.ones(1, 300, dtype=torch.bool)
    given = logits, mask.long(), mask, uniforms
    want, _ = sampling.sample_completions(*given, 0.9)
    have, _ = kernel.sample_completions(*[x.to(device) for x in given], 0.9)
    wrong = (have.cpu() != want).any(dim=1)[0, exact]  # of each row
    assert wrong.sum() <= (2 if device == "cuda" else 0)  # two exp may round differently


@pytest.mark.parametrize("V", [28, 97])
def test_every_output_is_written(device, V):
    """PyTorch fills tensors without values with NaN, or the largest whole number."""
    logits, ref_logits, completions, kept, mask = inputs(5, 9, 6, V, blanks=0.3)
    masked = torch.full((5, 9), 3)  # (B,T)
    given = [x.to(device) for x in (logits, masked, mask, torch.rand(5, 6, 9))]
    args = [x.to(device) for x in (ref_logits, completions, kept, mask)]
    leaf = given[0].clone().requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        assert leaf.new_empty(3).isnan().all()
        draws, drawable = kernel.sample_completions(*given)
        *_, norms = kernel.stats_op(given[0], *args, 1.0)
        logp, ref_logp, kl, entropy = kernel.stats(leaf, *args)
        (gradient,) = torch.autograd.grad(logp.exp().sum() + kl.sum(), leaf)
    finally:
        torch.use_deterministic_algorithms(False)
    hidden = ~mask.to(device)  # (B,T)
    assert (draws.transpose(1, 2)[hidden] == 3).all() and draws.max() < V
    outputs = logp.transpose(1, 2), ref_logp.transpose(1, 2), kl, entropy, norms
    for x in (*outputs, gradient, drawable):
        assert not x[hidden].any() and not x.isnan().any()


TRACED = """
struct Traced {  // a number that remembers who reads it
    float x;
    Traced() = default;
    Traced(const Traced&) = default;
    Traced& operator=(const Traced& other);
};
static std::vector<std::pair<int, const Traced*>> reads;
Traced& Traced::operator=(const Traced& other) {
    reads.push_back({lane_now, &other});
    x = other.x;
    return *this;
}
inline float number(Traced x) { return x.x; }
inline void store(Traced* to, float x) { to->x = x; }
extern "C" int lane(int i) { return i < (int)reads.size() ? reads[i].first : -1; }
extern "C" int column(int i, const Traced* row) { return reads[i].second - row; }
extern "C" void forget() { reads.clear(); }
"""


@pytest.mark.parametrize("V", [27, 28])
def test_neighbouring_lanes_read_neighbouring_columns(tmp_path, monkeypatch, V):
    """The lanes' n-th cards are one piece of the row, without a gap: the memory likes that."""
    names = [f"{operation}<Traced, 4, 8>" for operation in kernel.OPERATIONS]
    run = build(tmp_path, kernel.SOURCE.read_text() + TRACED, names)
    library = ctypes.CDLL(tmp_path / "run.so")
    monkeypatch.setattr(kernel, "run", run)
    monkeypatch.setattr(kernel, "load", lambda device: ({}, ""))
    monkeypatch.setattr(kernel, "NUMBERS", {torch.float32: "Traced"})
    logits, ref_logits, completions, kept, mask = inputs(1, 1, 5, V, blanks=1)
    row = ctypes.c_void_p(logits.data_ptr())
    args = logits, ref_logits, completions, kept, mask

    def columns_of_each_lane():
        columns = [[] for _ in range(4)]
        for i in itertools.takewhile(lambda i: library.lane(i) >= 0, itertools.count()):
            if 0 <= library.column(i, row) < V:
                columns[library.lane(i)].append(library.column(i, row))
        library.forget()
        return columns

    outputs = kernel.stats_op(*args, 1.0)
    found = [columns_of_each_lane()]
    kernel.stats_backward_op(*[outputs[i] for i in (0, 2, 3)], *args, *outputs[2:], 1.0)
    found.append(columns_of_each_lane())
    kernel.sample_completions(logits, completions[:, 0], mask, torch.rand(1, 5, 1))
    found.append(columns_of_each_lane())
    for lanes in found:
        assert sorted(itertools.chain(*lanes)) == list(range(V))  # each once
        for n in range(0, 8, 4):
            piece = sorted(itertools.chain(*(columns[n : n + 4] for columns in lanes)))
            assert piece == list(range(piece[0], piece[0] + len(piece)))


def test_xtc_is_left_to_the_definition(device):
    logits, _, completions, _, mask = (x.to(device) for x in inputs(3, 7, 4, 28))
    arguments, options = (
        (logits, completions[:, 0].contiguous(), mask, torch.rand(3, 4, 7, device=device)),
        dict(xtc_threshold=0.1, xtc_probability=0.5),
    )
    have, want = (module.sample_completions(*arguments, **options) for module in (kernel, sampling))
    assert all(torch.equal(a, b) for a, b in zip(have, want)) and not torch.equal(
        want[1], kernel.sample_completions(*arguments)[1]
    )


def test_thresholds_between_whole_numbers(device):
    weights = torch.tensor(
        [[2**21, 209715, 209716], [2**21, 233017, 0]]
    )  # 0.1 * 2^21 = 209715.2; 0.9 of 2330169 = 2097152.1
    logits, mask = (
        (weights.double() / 2**21).log().float()[None].to(device),
        torch.ones(1, 2, dtype=torch.bool, device=device),
    )
    assert torch.equal(sampling.integer_weights(logits, 1.0)[0].cpu(), weights)
    for setting, row, expected in (
        (dict(min_p=0.1), 0, [True, False, True]),
        (dict(top_p=0.9), 1, [True, True, False]),
    ):
        kept = kernel.sample_completions(
            logits, mask.long(), mask, torch.rand(1, 1, 2, device=device), **setting
        )[1]
        assert kept[0, row].tolist() == expected == sampling.keep(weights, **setting)[row].tolist()


def test_bf16_gradients_are_rounded_to_even(device):
    g = torch.cat(
        [
            1 + torch.arange(1024) * 2.0**-9,
            torch.randn(1000) * 10.0 ** torch.randint(-30, 30, (1000,)),
            torch.tensor([INF, 3.4e38, NAN]),
        ]
    )
    T = len(g)  # column 1 is impossible and not kept: its gradient is g itself
    logits = torch.tensor([0, -INF, 1]).expand(1, T, 3).bfloat16().contiguous()
    args = [
        x.to(device)
        for x in (
            logits,
            torch.ones(1, 1, T).long(),
            logits > 0,
            torch.ones(1, T, dtype=torch.bool),
        )
    ]
    leaf = args[0].clone().requires_grad_()
    kernel.stats(leaf, args[0], *args[1:])[0].backward(g.to(device)[None, None])
    found, expected = leaf.grad[0, :, 1].cpu(), g.bfloat16()
    assert torch.equal(found[:-1], expected[:-1]) and found[-1].isnan()


def test_refused_tensors(device):
    logits, ref_logits, completions, kept, mask = args = [x.to(device) for x in inputs(2, 6, 4, 12)]
    for position, bad, word in (
        (1, ref_logits.bfloat16(), "ref_logits"),
        (2, completions.int(), "completions"),
        (4, mask[:1], "mask"),
        (3, kept.cpu() if device == "cuda" else kept.byte(), "kept"),
        (1, ref_logits[..., 1:], "ref_logits"),
    ):
        with pytest.raises(
            ValueError, match=f"^{word}: device, dtype and shape must be .*, not [^\n]*$"
        ):
            kernel.stats(*args[:position], bad, *args[position + 1 :], 0.8)
    with pytest.raises(ValueError, match="^uniforms: "):
        kernel.sample_completions(
            logits, completions[:, 0], mask, torch.rand(2, 4, 6, dtype=torch.float64, device=device)
        )


@pytest.mark.filterwarnings("ignore:the CUDA kernel is off")
@pytest.mark.parametrize("shape", [(1, 3, 2, 1500), (1, 3, 1500, 5)])
def test_beyond_the_limits_the_definition_runs(device, shape):
    args = [x.to(device) for x in inputs(*shape)]
    assert all(torch.equal(x, y) for x, y in zip(kernel.stats(*args, 0.8), stats.stats(*args, 0.8)))


@everywhere
def test_opcheck(device):
    logits, ref_logits, completions, kept, mask = [x.to(device) for x in inputs(2, 5, 3, 12)]
    uniforms, masked = (
        torch.rand(2, 3, 5, device=device),
        torch.zeros(2, 5, dtype=torch.long, device=device),
    )
    torch.library.opcheck(kernel.sample_op, (logits, masked, mask, uniforms, 0.8, 3, 0.9, 0.0))
    args = logits, ref_logits, completions, kept, mask
    outputs = kernel.stats_op(*args, 0.8)
    torch.library.opcheck(
        kernel.stats_backward_op,
        (*(torch.randn_like(outputs[i]) for i in (0, 2, 3)), *args, *outputs[2:], 0.8),
    )
    torch.library.opcheck(kernel.stats_op, (*args, 0.8))


@everywhere
@pytest.mark.parametrize("dynamic", [False, True])  # True: sizes that are not known
def test_compiled_gradients_are_the_eager_ones(device, dynamic):
    logits, ref_logits, completions, kept, mask = [x.to(device) for x in inputs(2, 5, 3, 12)]
    weight = torch.eye(12, device=device, requires_grad=True)

    def loss(weight):
        logp, ref_logp, kl, entropy = kernel.stats(
            logits.clamp(min=-30) @ weight, ref_logits.clamp(min=-30), completions, kept, mask, 0.8
        )
        return (logp.exp() * ref_logp).sum() + (kl * kl).sum() - entropy.sum()

    eager = torch.autograd.grad(loss(weight), weight)
    compile_loss = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    compiled = torch.autograd.grad(compile_loss(weight), weight)
    torch.testing.assert_close(compiled, eager)


def test_gradcheck():
    logits, ref_logits, completions, kept, mask = inputs(2, 4, 3, 6)
    logits = logits.double().clamp(min=-9).requires_grad_()

    def differentiable(logits):
        logp, _, kl, entropy = kernel.stats(
            logits, ref_logits.double().clamp(min=-9), completions, kept, mask, 0.7
        )
        return logp, kl, entropy

    assert torch.autograd.gradcheck(differentiable, logits)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("team_max<LANES>(top);", "if (p.lane != 3) team_max<LANES>(top);", "is elsewhere"),
        (
            "team_max<LANES>(top);",
            "if (p.lane & 1) team_max<LANES>(top); else team_max<LANES>(top);",
            "is elsewhere",
        ),
        ("if (!__any_sync(ALL, p.blank)) {", "if (!p.blank) {", "has returned"),
    ],
)
def test_a_planted_divergence_is_caught(tmp_path, monkeypatch, old, new, message):
    source = kernel.SOURCE.read_text()
    assert old in source
    monkeypatch.setattr(
        kernel, "run", build(tmp_path, source.replace(old, new), ["stats_forward<float, 4, 8>"])
    )
    monkeypatch.setattr(kernel, "load", lambda device: ({}, ""))
    with pytest.raises(
        RuntimeError, match=f"divergent or partial exchange: in block 0 .* {message}"
    ):
        kernel.stats(*inputs(2, 9, 4, 28), 0.8)


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
    if (!launch(kernel, (skip + ROWS) / 32, THREADS, arguments, skip / 32)) exit(1);
}

void all(Outputs& o, long long skip) {    // as the rows from number `skip` on
    auto V_ = [=](auto* x) { return (decltype(x))((uintptr_t)x - skip * V * sizeof *x); };
    auto G_ = [=](auto* x) { return (decltype(x))((uintptr_t)x - skip * G * sizeof *x); };
    auto N_ = [=](auto* x) { return (decltype(x))((uintptr_t)x - skip * 5 * sizeof *x); };
    auto I_ = [=](auto* x) { return (decltype(x))((uintptr_t)x - skip * sizeof *x); };
    const int B = skip + ROWS - 5;
    run(skip, sample_completions<float, 4, 8>, V_(z), I_(masked), I_(mask), G_(u), G_(o.draws),
        V_(o.kept), B, 1, G, V, 1.0, 6, 0.95, 0.01);
    run(skip, stats_forward<float, 4, 8>, V_(z), V_(r), G_(o.draws), V_(o.kept), I_(mask),
        G_(o.logp), G_(o.ref_logp), I_(o.kl), I_(o.entropy), N_(o.norms), B, 1, G, V, 1.0);
    run(skip, stats_backward<float, 4, 8>, G_(o.logp), I_(o.kl), I_(o.entropy), V_(z), V_(r),
        G_(o.draws), V_(o.kept), I_(mask), I_(o.kl), I_(o.entropy), N_(o.norms), V_(o.gradient),
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


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("", "", ""),
        (
            "__syncwarp();\n    if (!p.there) return;\n\n    //",
            "if (!p.there) return;\n\n    //",
            "data race",
        ),
        ("column / 4 % LANES == p.lane", "column % LANES == p.lane", "data race"),
        ("p.logits = (long long)p.row * V", "p.logits = p.row * V", "SEGV"),
        ("p.draws = (long long)(p.row / T)", "p.draws = (p.row / T)", "SEGV"),
        ("norms + (long long)p.row * 5", "norms + p.row * 5", "SEGV"),
    ],
)
def test_lanes_do_not_race_and_offsets_are_long(tmp_path, old, new, said):
    """What a lane reads of another one's writes a __syncwarp has ordered, and rows beyond 2^32
    numbers are found; where a fault is planted, the thread sanitizer says so."""
    if not shutil.which("g++"):
        pytest.skip("no g++")
    sanitizer = subprocess.check_output(["g++", "-print-file-name=libtsan.so"], text=True)
    if not Path(sanitizer.strip()).exists():
        pytest.skip("no thread sanitizer")
    source = kernel.SOURCE.read_text()
    assert old in source
    header = Path(__file__).with_name("fiber.h")
    program = f'#include "{header}"\n{source.replace(old, new, 1)}\n{MEMORY}'
    (tmp_path / "memory.cc").write_text(program)
    command = ["g++", "-std=c++20", "-O1", "-w", "-fsanitize=thread", "memory.cc", "-o", "memory"]
    subprocess.run(command, cwd=tmp_path, check=True)
    ran = subprocess.run([tmp_path / "memory"], capture_output=True, text=True)
    if "FATAL: ThreadSanitizer" in ran.stderr:
        pytest.skip(ran.stderr.splitlines()[0])
    assert said in ran.stderr
    assert ran.returncode == (66 if said else 0), ran.stderr


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_nvcc_keeps_everything_in_registers(tmp_path):
    table = ", ".join(f"(void*){name}" for name in kernel.NAMES)
    (tmp_path / "all.cu").write_text(f'#include "{kernel.SOURCE}"\nvoid* table[] = {{{table}}};')
    compilers = {}  # at the same time: they take as long as many tests
    for arch in ("sm_80", "sm_90"):
        command = ["nvcc", "-cubin", f"-arch={arch}", "-Xptxas", "-v", "all.cu", "-o", arch]
        pipe = subprocess.PIPE
        compilers[arch] = subprocess.Popen(command, cwd=tmp_path, stderr=pipe, text=True)
    for arch, compiler in compilers.items():
        _, log = compiler.communicate()
        assert compiler.returncode == 0, log
        found = re.findall(
            r"entry function '_Z\d+(\w+?)I(f|4bf16)Li(\d+)ELi(\d+)E.*?(\d+) bytes stack frame, "
            r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
            log,
            re.DOTALL,
        )
        assert len(found) == len(kernel.NAMES)
        for name, number, lanes, columns, *bytes_used, registers in found:
            print(f"{arch} {name}<{number}, {lanes}, {columns}>: {registers} registers")
            assert bytes_used == ["0", "0", "0"]  # stack, stores, loads


@pytest.fixture
def nvrtc():
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])


def test_nvrtc_compiles_every_instantiation(nvrtc):
    *symbols, cubin = kernel.compile_kernel([b"--gpu-architecture=sm_90", b"--std=c++17"]).split(
        b"\n", len(kernel.NAMES)
    )
    assert (
        cubin.startswith(b"\x7fELF")
        and all(symbol in cubin for symbol in symbols)
        and b"stats_backwardI4bf16Li32ELi32E" in symbols[-1]
    )
    with pytest.raises(
        RuntimeError, match="gpu-architecture"
    ):  # what the compiler says, not the number of its error
        kernel.compile_kernel([b"--gpu-architecture=sm_1"])


DRIVER = r"""
// Stands in for libcuda: the functions that grpo/kernel.py calls. It runs the kernel on fibers.
#include <cxxabi.h>
#include <dlfcn.h>
#include <string>
static char contexts[8];
static thread_local std::vector<void*> current;
static void* context() { return current.empty() ? nullptr : current.back(); }
extern "C" {
int cuGetProcAddress_v2(const char* name, void** f, int, unsigned long, void*) {
    *f = dlsym(dlopen("libcuda.so.1", RTLD_NOW), name);
    return 0;
}
int cuGetProcAddress(const char* name, void** f, int, unsigned long) {
    return cuGetProcAddress_v2(name, f, 0, 0, nullptr);
}
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDevicePrimaryCtxRetain(void** c, int device) { *c = contexts + device; return 0; }
int cuCtxPushCurrent(void* c) { current.push_back(c); return 0; }
int cuCtxPopCurrent(void**) { current.pop_back(); return 0; }
int cuModuleLoadData(void** module, const char* image) {
    *module = context();
    return !context() ? 201 : memcmp(image, "\177ELF", 4) ? 200 : 0;
}
int cuModuleGetFunction(char** f, void* module, const char* symbol) {
    // Of the like of: void stats_forward<float, 4, 8>(float const*, ...
    const std::string name = abi::__cxa_demangle(symbol, 0, 0, new int);
    *f = strdup(name.substr(5, name.find('(') - 5).c_str());
    return 0;
}
int cuLaunchKernel(const char* f, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned,
                   unsigned, unsigned shared, void* stream, void** arguments, void**) {
    if (!context()) return 201;
    return stream != (void*)0xabc || y * z != 1 || shared || *run(f, x, threads, arguments);
}
}"""


def through_cuda_bindings():
    load, run = kernel.load, kernel.run
    with (
        mock.patch.multiple(
            torch.cuda,
            get_device_capability=lambda index: (9, 0),
            device=lambda device: contextlib.nullcontext(),
            current_stream=lambda device: mock.Mock(cuda_stream=0xABC),
        ),
        mock.patch.multiple(
            kernel,
            load=lambda device: load(torch.device("cuda", 0)),
            run=lambda *args: run(*args[:3], torch.device("cuda", 0)),
        ),
    ):
        assert len(load(torch.device("cuda", 0))[0]) == len(kernel.NAMES)
        for dtype in (torch.float32, torch.bfloat16):
            compare("cpu", inputs(3, 7, 4, 28), 0.8, dtype)
        with ThreadPoolExecutor() as another:  # a thread without a context
            another.submit(compare, "cpu", inputs(1, 3, 2, 1000), 0.8).result()


def test_cuda_bindings_compile_load_and_launch(nvrtc, tmp_path, monkeypatch):
    """The real NVRTC and cuda.bindings, but another libcuda, in a process of its own."""
    build(tmp_path, kernel.SOURCE.read_text(), kernel.NAMES, DRIVER, "libcuda.so.1")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(through_cuda_bindings).result()


def test_damaged_cache_is_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel.cached(b"key", lambda: b"cubin") == b"cubin"
    (file,) = (tmp_path / "grpo").iterdir()
    assert kernel.cached(b"key", pytest.fail) == b"cubin"
    file.write_bytes(file.read_bytes()[:-1])
    assert (
        kernel.cached(b"key", lambda: b"again") == b"again"
        and kernel.cached(b"key", pytest.fail) == b"again"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # not a folder: nothing can be kept
    assert kernel.cached(b"key", lambda: b"cubin") == b"cubin"


@pytest.mark.skipif(os.name == "nt", reason="no owners, no modes")
@pytest.mark.parametrize("umask", [0o022, 0o002])
def test_a_cubin_that_others_may_have_written_is_refused(tmp_path, monkeypatch, umask):
    """Another user's file or folder, or one that others may write to: it is built again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "grpo"
    before = os.umask(umask)
    try:
        kernel.cached(b"key", lambda: b"cubin")
    finally:
        os.umask(before)
    (file,) = folder.iterdir()
    assert kernel.cached(b"key", pytest.fail) == b"cubin"
    for path, mode in (file, 0o620), (file, 0o602), (folder, 0o770), (folder, 0o703):
        path.chmod(mode)
        assert kernel.cached(b"key", lambda: b"mine") == b"mine"
        assert kernel.cached(b"key", pytest.fail) == b"mine"  # now nobody else may
    planted = file.read_bytes()
    for theirs in file, folder:
        file.write_bytes(planted)
        with mock.patch.object(Path, "stat", stat_as_of_another_user(theirs)):
            assert kernel.cached(b"key", lambda: b"again") == b"again"


def stat_as_of_another_user(theirs):
    stat = Path.stat

    def stat_of(path, **options):
        found = stat(path, **options)
        if path != theirs:
            return found
        return os.stat_result([*found[:4], found.st_uid + 1, *found[5:]])

    return stat_of


def test_choose(monkeypatch):
    assert kernel.choose("auto", "cpu") == kernel.choose("torch", "cuda") == "torch"
    with pytest.raises(
        ValueError,
        match="^kernel='cuda' cannot run: it needs a CUDA device, not 'cpu'; "
        "set kernel to 'auto' or 'torch'$",
    ):
        kernel.choose("cuda", "cpu")
    monkeypatch.setattr(kernel, "load", lambda device: ({}, ""))
    assert kernel.choose("auto", "cuda", vocab_size=1024, group_size=1024) == "cuda"
    with pytest.raises(ValueError, match="1024 characters.*not 1025"):
        kernel.choose("cuda", "cuda", vocab_size=1025)


class Driver:
    """What loads the kernel, of cuda.bindings.driver. A module is the context it was loaded in."""

    def __init__(self):
        self.current = [100]  # the context of device 0
        self.loaded = []

    def cuDevicePrimaryCtxRetain(self, index):
        return 0, 100 + index

    def cuCtxPushCurrent(self, context):
        self.current.append(context)
        return (0,)

    def cuCtxPopCurrent(self):
        return 0, self.current.pop()

    def cuModuleLoadData(self, cubin):
        self.loaded.append(self.current[-1])
        return 0, self.current[-1]

    def cuModuleGetFunction(self, module, symbol):
        return 0, module


def test_each_device_is_loaded_once_and_in_its_own_context(nothing_loaded, monkeypatch):
    driver = Driver()
    nvrtc = mock.Mock(nvrtcVersion=lambda: (0, 13, 0))
    monkeypatch.setitem(sys.modules, "cuda.bindings", mock.Mock(driver=driver, nvrtc=nvrtc))
    for device in "cuda", "cuda:0", "cuda:1":
        assert kernel.choose("auto", device) == "cuda"
    assert driver.loaded == [100, 101]  # "cuda" is the current device, cuda:0
    assert driver.current == [100]  # as it was
    assert set(kernel.load(torch.device("cuda", 1))[0].values()) == {101}


def unfound(*_):
    raise RuntimeError("libnvrtc.so not found\nlooked everywhere")


class Result(enum.IntEnum):
    SUCCESS, NO_DRIVER = 0, 100


@pytest.mark.parametrize(
    "bindings, reason",
    [
        (None, "ModuleNotFoundError: .*"),
        (mock.Mock(**{"nvrtc.nvrtcVersion": unfound}), "RuntimeError: libnvrtc.so not found"),
        (
            mock.Mock(
                **{
                    "nvrtc.nvrtcVersion": lambda: (Result.SUCCESS, 13, 0),
                    "driver.cuDevicePrimaryCtxRetain": lambda index: (Result.NO_DRIVER, None),
                }
            ),
            "RuntimeError: Result NO_DRIVER",
        ),
    ],
)
def test_why_the_kernel_is_off_is_told_once_in_a_line(
    nothing_loaded, monkeypatch, bindings, reason
):
    """No cuda.bindings, no NVRTC, no driver."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    with pytest.warns(
        UserWarning, match=f"off and its PyTorch definition runs instead: {reason}$"
    ) as warned:
        assert kernel.choose("auto", "cuda:0") == kernel.choose("auto", "cuda:0") == "torch"
    assert len(warned) == 1
    with pytest.raises(
        ValueError, match=f"^kernel='cuda' cannot run: {reason}; set kernel to 'auto' or 'torch'$"
    ):
        kernel.choose("cuda", "cuda:0")


def test_a_kernel_that_cannot_run_exits_2_in_a_line(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        train_grpo.main(command_line(flags, kernel="cuda"))
    error = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and "kernel='cuda' cannot run: it needs a CUDA device" in error
        and error.count("\n") == 1
    )
    assert not Path(flags["out_dir"]).exists()
