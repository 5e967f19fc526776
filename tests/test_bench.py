import copy
import itertools
import json
import math
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grpo import bench
from grpo.fill import load
from grpo.plumbing.checkpoint import model_file, write
from grpo.plumbing.config import load_config
from grpo.reward import CPU_ROWS
from model.transformer import Generator
from tests.conftest import command_line

CPU = torch.device("cpu")


@pytest.fixture
def tiny(flags, world, tmp_path, monkeypatch):
    """The bench measures the tiny models, and compiles nothing."""
    generator, vocabulary = load(world / "generator.pt")
    coin = Generator(replace(generator.trunk.config, n_latent=8))
    write(tmp_path / "coin" / "coin.pt", model_file(coin, vocabulary))
    own = {"warmup_iters": 0, "kernel": "torch"}
    for name in ("learning_rate", "dtype", "num_iterations", "max_iters", "group_size"):
        del flags[name]

    def load_tiny(arguments):
        return load_config([*command_line(flags, **own), *arguments])

    monkeypatch.setattr(bench, "load_config", load_tiny)
    monkeypatch.setattr(bench, "USUAL", bench.USUAL | {"batch_size": 4, "group_size": 4})
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    variants = {"inputs_64": {"batch_size": 8}, "length_16": {"block_size": 8}}
    variants["latent"] = {"generator_checkpoint": tmp_path / "coin" / "coin.pt"}
    monkeypatch.setattr(bench, "VARIANTS", bench.VARIANTS | variants)


def read(path):
    return json.loads(path.read_text())


def test_variants_take_turns_and_a_ratio_is_taken_within_a_round():
    calls = []
    ticks = itertools.count(1)

    def measure(name):
        calls.append(name)
        return next(ticks)

    measures = {"a": lambda: measure("a"), "b": lambda: measure("b")}
    a, b = bench.compare(measures, 3, "a")
    assert calls == ["a", "b"] * 4
    assert a == {"variant": "a", "ms": [4, 5, 6], "over_a": [1, 1, 1]}  # 1 warmed up; of 3, 5, 7
    assert b["ms"] == [5, 6, 7]  # of 4, 6, 8
    assert b["over_a"] == pytest.approx([(8 / 7 + 6 / 5) / 2, 6 / 5, (6 / 5 + 4 / 3) / 2])
    assert bench.quartiles([5, 1, 2, 4, 3]) == [2, 3, 4]
    assert bench.quartiles([2, 40, 6], [1, 10, 2]) == [2.5, 3, 3.5]  # of 2, 4, 3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_type": "dapo", "credit": "run", "entropy_coef": 0.1},
        {"loss_type": "sum", "scale_rewards": "batch", "kl_estimator": "k3"},
    ],
)
@pytest.mark.parametrize("variant", ["repeated", "plain_judge"])
def test_what_is_compared_makes_the_same_update(tiny, monkeypatch, changes, variant):
    """In float64: the comparison is fair, all steps compute the same thing."""
    load_models = bench.setup.load_models

    def load_double(config, vocabulary):
        *models, state = load_models(config, vocabulary)
        seeded = torch.Generator().manual_seed(1)
        torch.nn.init.normal_(models[1].head.weight, generator=seeded)  # else the KL is 0
        return *(model.double() for model in models), state

    class SGD:
        """Not AdamW, whose first update hides the gradient's size."""

        def __init__(self, model, config):
            self.parameters = list(model.parameters())

        def backward(self, loss):
            loss.backward()

        def step(self):
            with torch.no_grad():
                for p in self.parameters:
                    p -= 0.1 * p.grad
            return torch.zeros(())

    monkeypatch.setattr(bench.setup, "load_models", load_double)
    monkeypatch.setattr(bench, "Optimizer", SGD)
    updated = []
    for name in ("shared", variant):
        turn = bench.usual_turn(CPU, name, **changes)
        start = [p.detach().clone() for p in turn.models[3].parameters]
        turn()
        moved = [p.detach() - old for p, old in zip(turn.models[3].parameters, start)]
        updated.append(torch.cat([x.flatten() for x in moved]))
    assert updated[0].abs().max() > 1e-4
    torch.testing.assert_close(updated[1], updated[0], rtol=0, atol=1e-9)


def test_a_turn_changes_no_weight_and_repeats_itself(tiny):
    turn = bench.usual_turn(CPU)
    before = copy.deepcopy([p.detach() for p in turn.models[3].parameters])
    turn()
    first = turn.completions
    turn()
    assert torch.equal(turn.completions, first)
    assert all(map(torch.equal, turn.models[3].parameters, before))


def test_the_plain_judge_reads_every_completion_in_one_batch(tiny):
    turn = bench.usual_turn(CPU, "plain_judge", group_size=16)
    judge = turn.judge
    rows = []

    def counted(tokens):
        rows.append(len(tokens))
        return judge(tokens)

    turn.judge = counted
    turn()
    assert rows == [4 * 16]


def flops_of_a_pass(model):
    """Of one forward pass, per character: two for each weight of a matrix, and attention."""
    shape = model.trunk.config
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    weights -= model.trunk.embedding.weight.numel()  # a look-up
    return 2 * weights + 4 * shape.n_layer * shape.block_size * shape.n_embd


@pytest.mark.parametrize("variant", ["shared", "repeated", "latent"])
def test_flops_of_a_step_are_those_that_are_needed(tiny, monkeypatch, variant):
    """An input goes through the generator once to be sampled and once to be learned from (a
    backward pass takes two), once through the reference; each different completion is judged once.
    """
    loaded = []
    load_models = bench.setup.load_models

    def load(config, vocabulary):
        loaded[:] = load_models(config, vocabulary)
        return tuple(loaded)

    monkeypatch.setattr(bench.setup, "load_models", load)
    turn = bench.usual_turn(CPU, variant, group_size=8)
    generator, reference, judge, _ = loaded
    with FlopCounterMode(display=False) as counter:
        turn()
    B, G, T = turn.completions.shape
    batch = min(CPU_ROWS, B * G)
    different = len(turn.completions.flatten(0, 1).unique(dim=0))
    judged = math.ceil(different / batch) * batch  # whole batches
    times = {"shared": B, "repeated": B * G, "latent": B}[variant]
    of_generators = times * (4 + 1) * flops_of_a_pass(generator)  # one trunk, K heads
    needed = T * (of_generators + judged * flops_of_a_pass(judge))
    assert counter.get_total_flops() == pytest.approx(needed, rel=0.1)


def test_what_is_kept_for_the_backward_pass_grows_with_the_inputs_and_not_with_the_group(tiny):
    """But for a few numbers a draw: log-probabilities, ratios, losses."""

    def kept(**sizes):
        return bench.kept_memory(bench.usual_turn(CPU, **sizes)) * 2**20

    assert kept(batch_size=32) > 1.5 * kept(batch_size=16)
    two, four, eight = (kept(batch_size=16, group_size=G) for G in (2, 4, 8))
    per_draw = (eight - four) / (16 * 16 * 4)  # of B·T·4 draws, in bytes
    assert 0 < per_draw < 64
    assert four - two == pytest.approx((eight - four) / 2, rel=0.2)


@pytest.mark.parametrize("native", ["float32", "bfloat16"])
def test_only_what_the_machine_multiplies_is_timed(monkeypatch, native):
    monkeypatch.setattr(bench.setup, "pick_dtype", lambda name, device: native)
    assert bench.can_run("bfloat16", CPU) == (native == "bfloat16")
    assert bench.can_run("shared", CPU)


def test_the_command_prints_and_writes_its_figures(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "can_run", lambda variant, device: True)
    path = tmp_path / "bench.json"
    sizes = ["--dtype=bfloat16", "--V=28", "--G=8", "--rounds=1"]
    bench.main(["--device=cpu", "--only", "operations", "step", *sizes, f"--json={path}"])
    result = read(path)
    shown = capsys.readouterr().out
    assert {"device", "threads"} <= result.keys()

    variants = itertools.product(("sample", "stats", "stats+grad"), ("eager", "again", "compiled"))
    measured = [(row["operation"], row["variant"]) for row in result["operations"]]
    assert measured == list(variants)
    for row in result["operations"]:
        assert (row["V"], row["G"], row["dtype"]) == (28, 8, "bfloat16")
        assert len(row["ms"]) == len(row["over_eager"]) == 3

    steps = {row["variant"]: row for row in result["step"]}
    assert list(steps) == [*bench.VARIANTS, "judge_alone"]
    shared = steps["shared"]
    phases = {"data_ms", "fill_ms", "reference_ms", "judge_ms", "update_ms"}
    assert phases | {"step_ms", "distinct", "kept_MiB"} <= shared.keys()
    assert shared["over_shared"] == steps["judge_alone"]["over_judge_alone"] == [1, 1, 1]
    assert shared["reward_off"] == [0, 0] and 0 < shared["distinct"] <= 1
    mean, largest = steps["bfloat16"]["reward_off"]
    assert 0 < mean < largest < 0.01
    assert "over_judge_alone" in shown and "plain_judge" in shown and "stats+grad" in shown
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "coin"}


def test_startup_is_that_of_the_trainer_itself(flags, monkeypatch):
    """Seconds until its first step, and not until its end; a run that fails is no figure."""
    commands = []
    run = bench.subprocess.run

    def run_tiny(command, **how):
        commands.append(command)
        tiny_run = [*command, *command_line(flags, compile="false")]
        tiny_run += [flag for flag in command if "out_dir" in flag or "max_iters" in flag]
        return run(tiny_run, **how)

    monkeypatch.setattr(bench.subprocess, "run", run_tiny)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # is put back at the end
    rows = list(bench.bench_startup(None, CPU))
    assert [row["compiled"] for row in rows] == ["false", "true"]
    assert all(row["seconds"] > 0 for row in rows)
    assert commands[0][:2] == [sys.executable, "train_grpo.py"]
    with pytest.raises(bench.subprocess.CalledProcessError):
        monkeypatch.setitem(flags, "device", "cuda:77")
        list(bench.bench_startup(None, CPU))


def test_help_exits_0():
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--help"])
    assert stopped.value.code == 0
