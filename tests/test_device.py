"""What a step asks of its device: where `compile` says so each pass is one graph of one shape, and
it waits for no values.

Letters: B inputs, T characters, G group size.
"""

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.optim import adam
from torch.utils._python_dispatch import TorchDispatchMode

import train_grpo
from grpo.optimizer import Optimizer
from grpo.plumbing import setup
from grpo.plumbing.config import Config, load_config
from grpo.plumbing.log import Clock
from grpo.plumbing.setup import pick_compile
from grpo.reward import Rewards
from grpo.rollout import Inputs
from model.transformer import Generator, Judge, TransformerConfig
from tests.conftest import command_line


def run(flags, out, **changes):
    train_grpo.main(command_line(flags, out_dir=out, **changes))
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if not name.endswith("_ms")} for line in lines]


@pytest.mark.parametrize(
    "changes, update",
    [({}, (4, 16)), ({"minibatch_size": 2, "reference_mode": "ema"}, (2, 16))],
)
def test_compile_is_read(flags, tmp_path, monkeypatch, changes, update):
    """compile=true: each pass is one graph, for the step's shapes alone; no figure changes."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in inputs])
        return graph

    eager = run(flags, tmp_path / "eager", compile="auto", **changes)
    assert not graphs
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    monkeypatch.setattr(setup, "can_compile", lambda: True)
    assert run(flags, tmp_path / "compiled", compile="true", **changes) == eager
    settings = json.loads((tmp_path / "compiled" / "config.json").read_text())
    assert (settings["compile"], settings["kernel"]) == ("true", "torch")
    tokens = [
        [
            shape
            for shape in graph
            if not isinstance(shape, tuple) or shape in ((2, 16), (4, 16), (4 * 4, 16))
        ]
        for graph in graphs
    ]
    # Rollout and reference (B,T), judge (B·G,T), and the update, which keeps its graph. A size that
    # may vary would be listed as well.
    assert tokens == [[(4, 16)], [(4, 16)], [(16, 16)], [update]]


def test_compile_auto_is_decided_by_the_length_of_the_run(monkeypatch):
    cpu = torch.device("cpu")
    cuda = torch.device("cuda")
    long = Config(max_iters=10**6)
    default = load_config(["config/grpo_config.py"])
    monkeypatch.setattr(torch, "compile", lambda f: f)

    def compiled(config, device, saved=None):
        """Of a run on `device` that nothing saved, or that goes on from these settings."""
        return pick_compile(config, device, saved and {"config": saved}) == "true"

    for device in cpu, cuda:
        assert compiled(Config(compile="true", max_iters=1), device)
        assert not compiled(Config(compile="false", max_iters=10**6), device)
        assert not compiled(Config(max_iters=1), device)
        assert compiled(long, device)
    assert not compiled(default, cpu)
    for began in "true", "false", "auto":
        assert compiled(Config(max_iters=1), cpu, {"compile": began}) == (began == "true")
    assert not compiled(long, cpu, {"max_iters": 10**6})  # of a version without the setting
    monkeypatch.setattr(torch, "compile", lambda f: 1 / 0)  # no compiler
    assert not compiled(long, cpu)
    assert not compiled(long, cpu, {"compile": "true"})


class NoCopies(TorchDispatchMode):
    """Refuses copies between devices: they wait, or a CUDA graph would repeat the first values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            device = torch.device(kwargs.get("device", args[0].device))
        elif func is torch.ops.aten.copy_.default:
            device = args[1].device
        else:
            return func(*args, **kwargs)
        if device != args[0].device:
            raise RuntimeError(f"a copy between {args[0].device} and {device}")
        return func(*args, **kwargs)


@contextmanager
def no_waiting(device):
    """On `meta`, tensors have no values: whoever asks for one fails."""
    if device == "meta":
        with NoCopies(), mock.patch.object(adam, "_device_dtype_check_for_fused"):
            yield
    else:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def step_without_waiting(device, look=lambda scores: scores, n_latent=1, **changes):
    """The metrics of a step whose judge passes its scores on to `look`."""
    config = Config(**{"batch_size": 4, "group_size": 4} | changes)
    shape = TransformerConfig(vocab_size=6, block_size=8, n_layer=2, n_head=2, n_embd=32)
    sides = replace(shape, n_latent=n_latent)
    with torch.device(device):
        generator = Generator(sides)
        reference = Generator(sides)
        judge = Judge(shape)
        tokens = torch.randint(5, (4, 8))  # (B,T)
        mask = torch.rand(4, 8) < 0.5  # (B,T)
        uniforms = torch.rand(4, 4, 8)  # (B,G,T)
        orders = torch.stack([torch.randperm(4) for _ in range(2)])  # (E,B)
    inputs = Inputs(tokens, mask, tokens.masked_fill(mask, 5), uniforms, orders)
    rewards = Rewards(lambda rows: look(judge(rows)), config, "abcde", set(), device)
    optimizer = Optimizer(generator, config)
    clock = Clock(torch.device("cpu"))
    step = partial(
        train_grpo.grpo_step, generator, reference, rewards, optimizer, inputs, config, clock
    )
    if device == "cuda":
        step()  # the first one compiles, allocates
    with no_waiting(device):
        return step()


@pytest.mark.parametrize(
    "device",
    [
        "meta",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
        ),
    ],
)
@pytest.mark.parametrize("kernel", ["torch", "cuda"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"minibatch_size": 2},
        {
            "num_iterations": 2,
            "gradient_accumulation_steps": 2,
            "loss_type": "bnpo",
            "credit": "run",
        },
        {
            "loss_type": "dapo",
            "kl_estimator": "k3",
            "importance_sampling_level": "sequence",
            "scale_rewards": "batch",
            "clip_delta": 4.0,
        },
        {
            "xtc_probability": 0.5,
            "top_k": 3,
            "min_p": 0.1,
            "baseline": "leave_one_out",
            "entropy_coef": 0.1,
        },
        {"top_entropy_quantile": 0.5, "num_iterations": 2},
        {"n_latent": 2, "kl_of": "marginal"},
    ],
)
def test_a_step_waits_for_nothing(device, kernel, changes):
    rollout, metrics = step_without_waiting(device, kernel=kernel, **changes)
    assert rollout.completions.numel() == 4 * 4 * 8
    assert {x.device.type for x in metrics.values()} == {device}


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x * x.max().item(),
        lambda x: x if x.isfinite().all() else 0 * x,
        lambda x: x * x[x > 0].sum(),
        lambda x: x.cpu(),
        lambda x: x * torch.ones(()).to(x.device),
        lambda x: x * torch.ones(()).to(x.device, non_blocking=True),
        lambda x: torch.empty_like(x).copy_(torch.ones(x.shape)),
    ],
)
def test_a_step_that_waits_is_noticed(look):
    with pytest.raises((RuntimeError, NotImplementedError), match="meta|a copy between"):
        step_without_waiting("meta", look)
