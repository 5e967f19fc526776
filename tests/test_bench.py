import copy
import itertools
import json
import math
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grpo import bench
from grpo.plumbing.config import load_config
from grpo.plumbing.log import Clock
from grpo.plumbing.setup import load_data, load_models
from grpo.reward import ROWS, Rewards
from grpo.step import draw_uniforms, grpo_step
from tests.conftest import command_line

CPU = torch.device("cpu")


def test_variants_take_turns_and_a_ratio_is_taken_within_a_round():
    calls, ticks = [], itertools.count(1)
    measures = {
        "a": lambda: calls.append("a") or next(ticks),
        "b": lambda: calls.append("b") or next(ticks),
    }
    assert bench.interleave(measures, 3) == {"a": [3, 5, 7], "b": [4, 6, 8]}  # 1 and 2 warmed up
    assert calls == ["a", "b"] * 4
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
@pytest.mark.parametrize("step", [bench.repeated_step, bench.plain_judge_step])
def test_what_is_compared_makes_the_same_update(flags, changes, step):
    """In float64: the comparison is fair, all steps compute the same thing."""
    config = load_config(command_line(flags, grad_clip=0.0, kernel="torch", **changes))
    train, _ = load_data(config.dataset, config.block_size)
    models = [model.double() for model in load_models(config, train.vocabulary)[:3]]
    tokens, mask = train.batch(4, 16, {"random": 1.0}, 0.4, 0, (1,))
    updated = []
    for compared in (grpo_step, step):
        generator, reference, judge = copy.deepcopy(models)
        torch.nn.init.normal_(
            reference.head.weight, generator=torch.Generator().manual_seed(1)
        )  # else the KL is 0
        optimizer = torch.optim.SGD(
            generator.parameters(), lr=0.1
        )  # not AdamW, whose first update hides the gradient's size
        compared(
            generator,
            reference,
            Rewards(judge),
            optimizer,
            tokens,
            mask,
            train.mask_id,
            draw_uniforms(4, 4, 16, (2,)),
            config,
            Clock(CPU),
        )
        updated.append(torch.cat([p.detach().flatten() for p in generator.parameters()]))
    start = torch.cat([p.detach().flatten() for p in models[0].parameters()])
    assert (updated[0] - start).abs().max() > 1e-4
    torch.testing.assert_close(updated[1], updated[0], rtol=0, atol=1e-9)


def test_bytes_are_each_input_read_once_and_each_output_written_once(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    rows, V, G = 128, 28, 8
    size = {
        name: per_row
        for name, (per_row, _) in bench.operation_calls("bfloat16", V, rows, G, CPU).items()
    }
    stats_reads = 2 * 2 * V + 8 * G + V + 1  # logits, ref_logits, completions, kept, mask
    assert size["sample"] == rows * (
        2 * V + 8 + 1 + 4 * G + 8 * G + V
    )  # logits, masked, mask, uniforms -> completions, kept
    assert size["stats"] == rows * (stats_reads + 4 * (2 * G + 2))  # -> logp, ref_logp, kl, entropy
    assert size["stats+grad"] == size["stats"] + rows * (stats_reads + 4 * (G + 2) + 2 * V)


def test_flops_needed_are_those_that_run(flags):
    config = load_config(command_line(flags, kernel="torch"))
    train, _ = load_data(config.dataset, config.block_size)
    models = load_models(config, train.vocabulary)[:3]
    turn = bench.loop_turn(grpo_step, config, train, models, CPU)
    with FlopCounterMode(display=False) as counter:
        distinct = turn()["distinct"]
    assert 0 < distinct <= 1
    rows = config.batch_size * config.group_size
    judged = math.ceil(distinct * rows / min(ROWS, rows)) * min(ROWS, rows) / rows  # whole batches
    assert counter.get_total_flops() == pytest.approx(
        bench.needed_flops(*models, config, judged), rel=0.1
    )


def test_the_command_prints_and_writes_its_figures(flags, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(bench, "limits", lambda device: (1e9, {"float32": 1e9, "bfloat16": 1e9}))
    monkeypatch.setattr(
        bench,
        "load_config",
        lambda arguments: load_config(
            [*arguments, *command_line(flags, learning_rate=0.0, warmup_iters=0)]
        ),
    )
    path = tmp_path / "bench.json"
    bench.main(
        [
            "--device=cpu",
            "--only",
            "operations",
            "step",
            "--dtype=bfloat16",
            "--V=28",
            "--rows=4096",
            "--G=8",
            "--rounds=1",
            f"--json={path}",
        ]
    )
    result, shown = json.loads(path.read_text()), capsys.readouterr().out
    assert {
        "device",
        "torch",
        "threads",
        "kernel",
        "rounds",
        "copy_GB/s",
        "float32_TFLOP/s",
    } <= result.keys()
    variants = itertools.product(("sample", "stats", "stats+grad"), ("eager", "again", "compiled"))
    assert [(row["operation"], row["variant"]) for row in result["operations"]] == list(variants)
    for row in result["operations"]:
        assert {
            "V",
            "rows",
            "G",
            "dtype",
            "eager_over_this",
            "GB/s",
            "of_copy",
        } <= row.keys() and len(row["ms"]) == 3
    steps = {row["variant"]: row for row in result["step"]}
    assert list(steps) == [
        "shared",
        "again",
        "two_updates",
        "plain_judge",
        "repeated",
        "bfloat16",
        "both",
        "judge_alone",
    ]
    assert {row["dtype"] for row in result["operations"] + result["step"]} == {"bfloat16"}
    assert {
        "data_ms",
        "fill_ms",
        "reference_ms",
        "judge_ms",
        "update_ms",
        "distinct",
        "mfu",
    } <= steps["shared"].keys()
    assert steps["shared"]["over_shared"] == steps["judge_alone"]["over_judge"] == [1, 1, 1]
    assert (
        0 < steps["shared"]["reward_off"][0] < steps["shared"]["reward_off"][1] < 0.01
    )  # bfloat16, as asked
    assert "over_judge" in shown and "\noperations\n" in shown and "plain_judge" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["bench.json"]


def test_untrained_models_of_the_sizes_asked_for(flags, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(
        bench,
        "load_config",
        lambda arguments: load_config(
            [*arguments, *command_line(flags, learning_rate=0.0, warmup_iters=0)]
        ),
    )
    monkeypatch.setattr(bench, "SIZES", {"50 k": (1, 64)})
    rows = list(bench.bench_models(CPU, 1, {"bfloat16": 1e9}))
    assert [(row["models"], row["variant"]) for row in rows] == [
        ("50 k", name) for name in ("shared", "again", "compiled", "judge_alone")
    ]


def test_scaling_varies_one_size_at_a_time(flags, monkeypatch):
    monkeypatch.setattr(
        bench,
        "load_config",
        lambda arguments: load_config(
            [*arguments, *command_line(flags, learning_rate=0.0, warmup_iters=0, kernel="torch")]
        ),
    )
    monkeypatch.setattr(
        bench, "SCALES", {"batch_size": (2, 8), "group_size": (2, 8), "block_size": (8, 16)}
    )
    rows = {(row["varied"], row["value"]): row for row in bench.bench_scaling(CPU, 1)}
    assert list(rows) == [
        (setting, value) for setting, values in bench.SCALES.items() for value in values
    ]
    for (setting, value), size in {
        ("batch_size", 8): 4,
        ("group_size", 8): 4,
        ("block_size", 16): 16 * 17 / (8 * 9),
    }.items():
        first, row = rows[setting, bench.SCALES[setting][0]], rows[setting, value]
        assert first["over_linear"] == [1, 1, 1]
        assert row["over_linear"] == pytest.approx(
            [t / first["step_ms"][0] / size for t in row["step_ms"]]
        )
    row = rows["batch_size", 8]
    assert row["over_flops"] == pytest.approx(row["over_linear"])  # all work is for inputs
    row = rows["group_size", 8]
    assert row["over_flops"] == pytest.approx(
        [each * 4 / ((4 + 8) / (4 + 2)) for each in row["over_linear"]], rel=0.1
    )  # 3 + 1 + G passes, of near equal size


def test_what_is_kept_for_the_backward_pass_grows_with_the_inputs_and_not_with_the_group(
    flags, monkeypatch
):
    """But for a few numbers a draw: log-probabilities, ratios, losses."""
    monkeypatch.setattr(
        bench,
        "load_config",
        lambda arguments: load_config(
            [*arguments, *command_line(flags, learning_rate=0.0, warmup_iters=0, kernel="torch")]
        ),
    )
    monkeypatch.setattr(bench, "SCALES", {"batch_size": (16, 32), "group_size": (2, 4, 8)})
    kept = {
        (row["varied"], row["value"]): row["kept_MiB"] * 2**20
        for row in bench.bench_scaling(CPU, 1)
    }
    assert kept["batch_size", 32] > 1.5 * kept["batch_size", 16]
    per_draw = (kept["group_size", 8] - kept["group_size", 4]) / (
        16 * 16 * 4
    )  # of B·T·4 draws, in bytes
    assert 0 < per_draw < 64
    assert kept["group_size", 4] - kept["group_size", 2] == pytest.approx(
        (kept["group_size", 8] - kept["group_size", 4]) / 2, rel=0.2
    )


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads Linux's figure of the most memory held"
)
def test_drift_is_that_of_the_trainer_itself():
    ballast = torch.ones(2**28)  # 1 GiB here is none of the trainer's
    (row,) = bench.bench_drift(CPU, lengths=(13,))
    assert 100 < row["MiB"] < ballast.nbytes / 2**20 + 100
    assert row["steps"] == 13 and len(row["ms_by_tenth"]) == 10 and min(row["ms_by_tenth"]) > 0
    with pytest.raises(subprocess.CalledProcessError):
        list(bench.bench_drift("cuda:77", lengths=(13,)))


def test_help_exits_0():
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--help"])
    assert stopped.value.code == 0


def test_the_first_update_of_the_default_experiment(capsys, monkeypatch):
    """What `startup` runs in a process of its own, with the settings and models that ship; the group is made small."""
    prepare = bench.prepare
    monkeypatch.setattr(
        bench,
        "prepare",
        lambda device, clock, **changes: prepare(
            device, clock, batch_size=2, group_size=2, **changes
        ),
    )
    bench.first_update(time.perf_counter(), "cpu", "false")
    seconds = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (
        seconds["compiled"] == "false"
        and {"imports_s", "data_s", "models_s", "update_s", "all_s"} <= seconds.keys()
    )
