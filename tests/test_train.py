"""The whole program, as a user runs it, on tiny models."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_grpo
from grpo.evaluate import ROWS
from grpo.evaluate import main as evaluate_main
from grpo.plumbing.checkpoint import read
from grpo.plumbing.config import Config
from grpo.plumbing.log import Clock
from grpo.plumbing.setup import make_optimizer
from grpo.reward import Rewards
from grpo.stats import log_softmax, restrict
from grpo.step import draw_uniforms, grpo_step, probability_of_equal_fills
from model.transformer import Generator, TransformerConfig
from tests.conftest import command_line


def run(flags, **changes):
    train_grpo.main(command_line(flags, **changes))
    out = Path((flags | changes)["out_dir"])
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return read(out / "checkpoint.pt"), [
        {k: v for k, v in line.items() if not k.endswith("_ms")} for line in metrics
    ]


def same(a, b):
    """Equal bit for bit, whatever is nested in them."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


def test_a_run_leaves_what_it_promises(flags, capsys):
    checkpoint, metrics = run(flags)
    out = Path(flags["out_dir"])
    assert sorted(p.name for p in out.iterdir()) == [
        "checkpoint.pt",
        "completions.jsonl",
        "config.json",
        "evaluation.json",
        "metrics.jsonl",
    ]
    assert (
        json.loads((out / "config.json").read_text())["group_size"] == 4
        and checkpoint["training"]["iteration"] == 4
    )
    assert [line["iteration"] for line in metrics] == [0, 1, 2, 3]
    for name in (
        "loss pg_loss kl_penalty mean_reward std_reward mean_advantage mean_kl mean_log_prob entropy grad_norm frac_reward_zero_std clip_ratio approx_kl lr valid_words"
    ).split():
        assert all(isinstance(line[name], float) for line in metrics), name
    result = json.loads((out / "evaluation.json").read_text())
    for row in ROWS:
        assert {
            "judge",
            "valid_words",
            "exact_words",
            "exact_chars",
            "distinct_words",
            "ngram_bits",
            "forward_passes",
        } <= result[row].keys()
    assert {"entropy", "pass@1", "pass@16"} <= result["after_sample"].keys() and {
        "gap_closed",
        "masking",
        "inputs",
        "temperature",
        "seed",
    } <= result.keys()
    assert (
        result["original"]["exact_chars"] == 1
        and result["reference_sequential_random"]["forward_passes"] > 1
    )
    shown = capsys.readouterr().out
    assert "gap closed" in shown and "before, one step, argmax" in shown
    evaluate_main([str(out)])  # the table again, from the files alone
    assert json.loads((out / "evaluation.json").read_text()) == result


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "gradient_accumulation_steps": 2,
            "num_iterations": 2,
            "loss_type": "dapo",
            "log_interval": 2,
        },
        {
            "reference_mode": "ema",
            "ema_alpha": 0.3,
            "minibatch_size": 2,
            "num_iterations": 2,
            "top_entropy_quantile": 0.5,
            "kl_target": 0.01,
        },
        {
            "reference_mode": "periodic",
            "reference_update_freq": 2,
            "xtc_probability": 0.5,
            "repetition_penalty": 1.2,
        },
    ],
)
def test_resume_is_bit_for_bit(flags, tmp_path, changes):
    """n steps, resume, n more = 2n steps never stopped: weights, optimizer, and every figure but the times."""
    want, metrics = run(flags, out_dir=tmp_path / "whole", max_iters=6, **changes)
    half = {"out_dir": tmp_path / "halves", "lr_decay_iters": 6, **changes}
    run(flags, max_iters=3, **half)
    with open(tmp_path / "halves" / "metrics.jsonl", "a") as f:
        f.write(
            '{"iteration": 3, "written": "after the last checkpoint, before the kill"}\n{"iteration": 4, "cut sho'
        )
    have, resumed = run(flags, max_iters=6, init_from="resume", **half)
    assert metrics == resumed
    assert same(want["weights"], have["weights"]) and same(
        want["training"]["optimizer"], have["training"]["optimizer"]
    )
    assert same(want["training"].get("reference"), have["training"].get("reference")) and (
        "reference" in have["training"]
    ) == ("reference_mode" in changes)


def test_the_same_command_gives_the_same_run_and_another_seed_another(flags, tmp_path):
    a, b, c = (
        run(flags, out_dir=tmp_path / name, seed=seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert a[1] == b[1] and same(a[0]["weights"], b[0]["weights"]) and a[1] != c[1]


def tiny_generator(seed=0):
    torch.manual_seed(seed)
    return Generator(TransformerConfig(vocab_size=6, block_size=8, n_layer=2, n_head=2, n_embd=32))


def one_step(config, generator, judge, batches, calls=None, G=None):
    def counted(tokens):
        if calls is not None:
            calls.append(len(tokens))
        return generator(tokens)

    optimizer = make_optimizer(generator, config)
    tokens = torch.randint(5, (batches, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.rand(batches, 8, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[:, 0] = True
    uniforms = draw_uniforms(batches, G or config.group_size, 8, (0,))
    reference = tiny_generator(7)
    return grpo_step(
        counted,
        reference,
        Rewards(judge),
        optimizer,
        tokens,
        mask,
        5,
        uniforms,
        config,
        Clock(torch.device("cpu")),
    )


def rule(tokens):
    """A judge that wants the first two characters to agree."""
    return torch.where(tokens[:, :1] == tokens[:, 1:2], 4.0, -4.0).expand(-1, 8)


def test_inputs_are_never_repeated_through_the_generator():
    calls = []
    one_step(Config(group_size=16, batch_size=4), tiny_generator(), rule, 4, calls)
    assert calls == [4]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "sum"])
@pytest.mark.parametrize("scale, quantile", [("group", 1.0), ("batch", 0.4)])
def test_accumulated_micro_batches_equal_one_batch(loss_type, scale, quantile):
    """The same update and the same figures, though the micro-batches hold different numbers of blanks, and the weight of the KL is the whole step's."""
    results = []
    for A in (1, 3):
        generator = tiny_generator().double()
        config = Config(
            batch_size=6 // A,
            gradient_accumulation_steps=A,
            loss_type=loss_type,
            scale_rewards=scale,
            learning_rate=1e-2,
            num_iterations=2,
            top_entropy_quantile=quantile,
            kl_target=0.01,
        )
        _, metrics = one_step(config, generator, rule, 6)
        results.append((generator.state_dict(), metrics))
    for name, value in results[0][0].items():
        torch.testing.assert_close(value, results[1][0][name], rtol=1e-9, atol=1e-9)
    for name, value in results[0][1].items():
        torch.testing.assert_close(
            value.double(), results[1][1][name].double(), rtol=1e-6, atol=1e-7, msg=name
        )


@pytest.mark.parametrize("M", [1, 4])
def test_mini_batches_are_updates_of_their_own(M):
    """Every input once per inner iteration, in an order that the seed decides; where nothing moves, their figures add up to the whole step's."""
    config = Config(
        batch_size=2,
        gradient_accumulation_steps=6,
        num_iterations=2,
        minibatch_size=M,
        learning_rate=0.0,
    )
    generator = tiny_generator()
    before = [p.clone() for p in generator.parameters()]
    whole = one_step(replace(config, minibatch_size=0), generator, rule, 12)[1]
    sizes = []
    _, mini = one_step(config, generator, rule, 12, sizes)
    assert sizes == [2] * 6 + [min(M, 2)] * (
        2 * 12 // min(M, 2)
    )  # the rollout, then the updates, in micro-batches
    assert all(torch.equal(a, b) for a, b in zip(before, generator.parameters()))
    for name in ("pg_loss", "kl_penalty", "mean_reward"):
        torch.testing.assert_close(mini[name], whole[name], rtol=1e-5, atol=1e-6)
    config = replace(config, learning_rate=1e-2)
    a, b = (
        one_step(config, g, rule, 12)[1]["approx_kl"] for g in (tiny_generator(), tiny_generator())
    )
    assert a == b > 0  # measured against the rollout, not against the update before


def test_another_group_size_than_the_setting_says():
    rollout, metrics = one_step(Config(group_size=8, batch_size=4), tiny_generator(), rule, 4, G=3)
    assert rollout.completions.shape[1] == 3
    torch.testing.assert_close(
        metrics["loss"],
        one_step(Config(group_size=3, batch_size=4), tiny_generator(), rule, 4)[1]["loss"],
    )


def test_equal_fills_are_foretold():
    """Π over blanks of Σ_v q(v)^G against the enumeration of all groups."""
    logits, mask, G = (
        torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(0)),
        torch.ones(1, 2, dtype=torch.bool),
        3,
    )
    kept = torch.tensor([[[True, True, True], [True, False, True]]])
    q = restrict(log_softmax(logits, 0.7), kept).exp()[0]
    fills = [(a, b) for a in range(3) for b in range(3)]
    want = sum((q[0, a] * q[1, b]) ** G for a, b in fills)
    torch.testing.assert_close(probability_of_equal_fills(logits, kept, mask, 0.7, G), want[None])
    assert probability_of_equal_fills(
        logits, kept, torch.tensor([[True, False]]), 0.7, G
    ).item() == pytest.approx((q[0] ** G).sum().item(), rel=1e-5)


def learn(seed, steps, **changes):
    """Two blanks that must agree -> the metrics of each step."""
    generator, reference = tiny_generator(seed), tiny_generator(seed)
    config = Config(
        **{
            "batch_size": 8,
            "group_size": 8,
            "learning_rate": 3e-3,
            "kl_beta": 0.01,
            "temperature": 1.0,
            "top_p": 1.0,
        }
        | changes
    )
    optimizer, clock, metrics = make_optimizer(generator, config), Clock(torch.device("cpu")), []
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:, :2] = True
    for step in range(steps):
        tokens = torch.randint(
            5, (8, 8), generator=torch.Generator().manual_seed(1000 * seed + step)
        )
        metrics.append(
            grpo_step(
                generator,
                reference,
                Rewards(rule),
                optimizer,
                tokens,
                mask,
                5,
                draw_uniforms(8, 8, 8, (seed, step)),
                config,
                clock,
            )[1]
        )
    return metrics


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "baseline": "leave_one_out"},
        {"importance_sampling_level": "sequence", "num_iterations": 2},
    ],
)
def test_it_learns(changes):
    """Drawn blind to each other the blanks agree one time in five, after 60 steps at least seven times in ten."""
    for seed in (1, 2, 3):
        rewards = [metrics["mean_reward"].item() for metrics in learn(seed, 60, **changes)]
        assert rewards[0] < 0.4 and sum(rewards[-5:]) / 5 > 0.7, (seed, rewards[::10])


def test_the_weight_of_the_kl_grows_with_the_fourth_power_of_the_kl():
    config = Config(group_size=4, batch_size=4, loss_type="dapo", kl_beta=0.2, kl_target=0.01)
    _, metrics = one_step(
        config, tiny_generator(), rule, 4
    )  # another net's logits are the reference: the KL is not 0
    assert (
        metrics["kl_weight"].item()
        == pytest.approx(0.2 * (metrics["mean_kl"].item() / 0.01) ** 4, rel=1e-5)
        and metrics["mean_kl"] > 0.01
    )
    assert metrics["kl_penalty"].item() == pytest.approx(
        metrics["kl_weight"].item() * metrics["mean_kl"].item(), rel=1e-5
    )
    assert "kl_weight" not in one_step(replace(config, kl_target=0.0), tiny_generator(), rule, 4)[1]


def test_a_target_keeps_the_kl_near_whatever_the_weight():
    """The mean KL of the last ten of 80 steps: sixteen times the weight divides it by more than twenty, with a target by about two."""

    def ends_with(seed, **changes):
        return sum(metrics["mean_kl"].item() for metrics in learn(seed, 80, **changes)[-10:]) / 10

    for seed in (1, 2, 3):
        free, tight = (ends_with(seed, kl_beta=beta) for beta in (0.05, 0.8))
        loose, stiff = (ends_with(seed, kl_beta=beta, kl_target=0.4) for beta in (0.05, 0.8))
        assert free > 20 * tight and 0.2 < stiff < loose < 0.8


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_inputs": 1},
        {"mask_ratio": 1.0, "masking": "random"},
        {"block_size": 5, "masking": "span"},
    ],
)
def test_small_and_extreme_inputs(flags, changes):
    run(flags, max_iters=1, **changes)
    json.loads(
        (Path(flags["out_dir"]) / "evaluation.json").read_text(), parse_constant=pytest.fail
    )  # no NaN


def test_help():
    assert (
        "--group_size="
        in subprocess.run(
            [sys.executable, "train_grpo.py", "--help"], capture_output=True, text=True, check=True
        ).stdout
    )


@pytest.mark.parametrize("name", sorted(path.name for path in Path("config").glob("*.py")))
def test_every_config_runs(flags, name):
    files = ["config/grpo_config.py"] + (["config/" + name] if name != "grpo_config.py" else [])
    train_grpo.main(
        files + command_line(flags, batch_size=32, max_iters=2, warmup_iters=0, eval_inputs=2)
    )
    assert len((Path(flags["out_dir"]) / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(flags, dtype):
    """Forward passes in half precision; what is summed stays float32, and the figures of the first step are those of float32 to its precision."""
    _, half = run(flags, dtype=dtype, max_iters=2, gradient_checkpointing="true")
    _, full = run(flags, out_dir=flags["out_dir"] + "-full", max_iters=2)
    for name in ("entropy", "mean_log_prob", "mean_reward", "grad_norm"):
        assert half[0][name] == pytest.approx(full[0][name], rel=0.1), name
    assert (
        full[0]["mean_kl"] == half[0]["mean_kl"] == 0
        and half[0]["approx_kl"] == 0
        and half[1]["mean_kl"] > 0
    )


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
        ),
    ],
)
@pytest.mark.parametrize("mode", ["static", "ema"])
def test_the_reference_may_live_elsewhere(flags, tmp_path, device, mode, monkeypatch):
    """reference_device=cpu: every pass of the reference is made there, and the run is the same to rounding."""
    asked, real = [], train_grpo.forward
    monkeypatch.setattr(
        train_grpo,
        "forward",
        lambda model, device, config: asked.append(device.type) or real(model, device, config),
    )
    elsewhere, together = (
        run(
            flags,
            out_dir=tmp_path / name,
            device=device,
            reference_mode=mode,
            reference_device=name,
        )[1]
        for name in ("cpu", device)
    )
    assert asked == [
        device,
        device,
        "cpu",
        "cpu",
        *[device] * 4,
    ]  # judge, generator, reference, untouched
    for a, b in zip(elsewhere, together):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


def test_prompts_of_the_users_own(flags, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({"prompts": ["th_ c_t", "the ___ cat sat", "_"]}))
    checkpoint, metrics = run(
        flags,
        prompts_file=tmp_path / "p.json",
        max_iters=2,
        credit="run",
        reward="judge,valid_words:0.5",
    )
    assert all(0 <= line["mean_reward"] <= 1.5 and line["mean_kl"] >= 0 for line in metrics)
    assert (
        json.loads((Path(flags["out_dir"]) / "evaluation.json").read_text())["original"][
            "exact_chars"
        ]
        == 1
    )


def test_a_reward_of_the_users_own(flags, tmp_path):
    (tmp_path / "mine.py").write_text("""
def few_spaces(completions, masked, mask, decode):
    return [[1 - text.count(" ") / len(text) for text in decode(group)] for group in completions]

""")
    _, metrics = run(flags, max_iters=2, reward=f"judge:0.5,{tmp_path}/mine.py:few_spaces:2")
    for line in metrics:
        assert line["mean_reward"] == pytest.approx(
            0.5 * line["reward_judge"] + 2 * line["reward_few_spaces"], rel=1e-5
        )
    completions = [
        json.loads(line)
        for line in (Path(flags["out_dir"]) / "completions.jsonl").read_text().splitlines()
    ]
    assert len(completions) == 8 * 16 and completions[0].keys() == {
        "input",
        "completion",
        "judge",
        "few_spaces",
    }
    for line in completions:
        assert line["few_spaces"] == pytest.approx(1 - line["completion"].count(" ") / 16, abs=1e-5)
        assert all(a in (b, "_") for a, b in zip(line["input"], line["completion"]))


def test_a_judge_without_weight_is_not_asked():
    def judge(tokens):
        raise AssertionError

    rewards = Rewards(judge, "valid_words", " abc_", {"ab"})
    credits, parts = rewards(
        torch.tensor([[[0, 1, 2, 0], [0, 2, 2, 0]]]),
        torch.tensor([[0, 4, 4, 0]]),
        torch.tensor([[False, True, True, False]]),
    )
    assert (
        rewards.names == ["valid_words"]
        and credits.tolist() == [[[1.0], [0.0]]]
        and parts.tolist() == [[[1.0], [0.0]]]
    )


LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "sum")


def test_two_processes_equal_one(flags, tmp_path):
    """torchrun with 2 ranks x B inputs = one process with 2 micro-batches of B, and, but for bnpo, with one batch of 2B: weights and metrics."""
    extras = {
        "max_iters": 2,
        "eval_inputs": 2,
        "scale_rewards": "batch",
        "top_entropy_quantile": 0.5,
        "num_iterations": 2,
        "credit": "run",
        "reward": "judge,valid_words",
        "kl_target": 0.01,
        "reference_mode": "periodic",
        "reference_update_freq": 2,
    }
    (tmp_path / "all.py").write_text(
        "import json, sys, train_grpo\nfor arguments in json.load(open(sys.argv[1])): train_grpo.main(arguments)"
    )
    (tmp_path / "all.json").write_text(
        json.dumps(
            [
                command_line(flags, **extras, loss_type=t, out_dir=str(tmp_path / t))
                for t in LOSS_TYPES
            ]
        )
    )
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        "--master_port=0",
        "--rdzv_backend=c10d",
        "--rdzv_endpoint=localhost:0",
    ]
    shown = subprocess.run(
        [*torchrun, tmp_path / "all.py", tmp_path / "all.json"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
    )
    assert shown.returncode == 0, shown.stderr
    start = read(flags["generator_checkpoint"])["weights"]
    assert shown.stdout.count("gap closed") == len(LOSS_TYPES)  # one process speaks
    for t in LOSS_TYPES:
        have, lines = (
            read(tmp_path / t / "checkpoint.pt"),
            [
                json.loads(line)
                for line in (tmp_path / t / "metrics.jsonl").read_text().splitlines()
            ],
        )
        for name, batch in (
            ("micro-batches", {"gradient_accumulation_steps": 2}),
            ("one batch", {"batch_size": 8}),
        ):
            want, metrics = run(
                flags, **extras, **batch, loss_type=t, out_dir=tmp_path / (t + name)
            )
            if (t, name) == ("bnpo", "one batch"):
                continue
            apart, moved = (
                sum((want["weights"][key] - other[key]).square().sum() for key in other).sqrt()
                for other in (have["weights"], start)
            )
            assert apart < 1e-4 * moved, (t, name)
            for a, b in zip(lines, metrics):
                assert {k: a[k] for k in b} == pytest.approx(b, rel=1e-3, abs=1e-5), (t, name)
