"""The whole program, as a user runs it, on tiny models."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train_grpo
from grpo.checkpoint import read
from grpo.config import Config, load_config
from grpo.evaluate import ROWS, main as evaluate_main
from grpo.log import Clock
from grpo.setup import make_optimizer
from grpo.step import draw_uniforms, grpo_step
from model.transformer import Generator, TransformerConfig
from tests.conftest import command_line

def run(flags, **changes):
    train_grpo.main(command_line(flags, **changes))
    out = Path((flags | changes)["out_dir"])
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return read(out / "checkpoint.pt"), [{k: v for k, v in line.items() if not k.endswith("_ms")} for line in metrics]


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
    assert sorted(p.name for p in out.iterdir()) == ["checkpoint.pt", "config.json", "evaluation.json", "metrics.jsonl"]
    assert json.loads((out / "config.json").read_text())["group_size"] == 4 and checkpoint["training"]["iteration"] == 4
    assert [line["iteration"] for line in metrics] == [0, 1, 2, 3]
    for name in ("loss pg_loss kl_penalty mean_reward std_reward mean_advantage mean_kl mean_log_prob entropy grad_norm frac_reward_zero_std clip_ratio approx_kl lr valid_words").split():
        assert all(isinstance(line[name], float) for line in metrics), name
    result = json.loads((out / "evaluation.json").read_text())
    for row in ROWS:
        assert {"judge", "valid_words", "exact_words", "exact_chars", "distinct_words", "ngram_bits", "forward_passes"} <= result[row].keys()
    assert {"entropy", "pass@1", "pass@16"} <= result["after_sample"].keys() and {"gap_closed", "masking", "inputs", "temperature", "seed"} <= result.keys()
    assert result["original"]["exact_chars"] == 1 and result["reference_sequential_random"]["forward_passes"] > 1
    shown = capsys.readouterr().out
    assert "gap closed" in shown and "before, one step, argmax" in shown
    evaluate_main([str(out)])  # the table again, from the files alone
    assert json.loads((out / "evaluation.json").read_text()) == result


@pytest.mark.parametrize("changes", [{}, {"gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "dapo", "log_interval": 2}])
def test_resume_is_bit_for_bit(flags, tmp_path, changes):
    """n steps, resume, n more = 2n steps never stopped: weights, optimizer, and every figure but the times."""
    want, metrics = run(flags, out_dir=tmp_path / "whole", max_iters=6, **changes)
    half = {"out_dir": tmp_path / "halves", "lr_decay_iters": 6, **changes}
    run(flags, max_iters=3, **half)
    with open(tmp_path / "halves" / "metrics.jsonl", "a") as f:
        f.write('{"iteration": 3, "written": "after the last checkpoint, before the kill"}\n{"iteration": 4, "cut sho')
    have, resumed = run(flags, max_iters=6, init_from="resume", **half)
    assert metrics == resumed
    assert same(want["weights"], have["weights"]) and same(want["training"]["optimizer"], have["training"]["optimizer"])


def test_the_same_command_gives_the_same_run_and_another_seed_another(flags, tmp_path):
    a, b, c = (run(flags, out_dir=tmp_path / name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert a[1] == b[1] and same(a[0]["weights"], b[0]["weights"]) and a[1] != c[1]


def tiny_generator(seed=0):
    torch.manual_seed(seed)
    return Generator(TransformerConfig(vocab_size=6, block_size=8, n_layer=2, n_head=2, n_embd=32))


def one_step(config, generator, judge, batches, calls=None):
    def counted(tokens):
        if calls is not None:
            calls.append(len(tokens))
        return generator(tokens)

    optimizer = make_optimizer(generator, config)
    tokens = torch.randint(5, (batches, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.rand(batches, 8, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[:, 0] = True
    uniforms = draw_uniforms(batches, config.group_size, 8, (0,))
    reference = tiny_generator(7)
    return grpo_step(counted, reference, judge, optimizer, tokens, mask, 5, uniforms, config, Clock(torch.device("cpu")))


def rule(tokens):
    """A judge that wants the first two characters to agree."""
    return torch.where(tokens[:, :1] == tokens[:, 1:2], 4.0, -4.0).expand(-1, 8)


def test_inputs_are_never_repeated_through_the_generator():
    calls = []
    one_step(Config(group_size=16, batch_size=4), tiny_generator(), rule, 4, calls)
    assert calls == [4]


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "sum"])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_accumulated_micro_batches_equal_one_batch(loss_type, scale):
    """The same update and the same figures, though the micro-batches hold different numbers of blanks."""
    results = []
    for A in (1, 3):
        generator = tiny_generator().double()
        config = Config(batch_size=6 // A, gradient_accumulation_steps=A, loss_type=loss_type, scale_rewards=scale, learning_rate=1e-2, num_iterations=2)
        _, metrics = one_step(config, generator, rule, 6)
        results.append((generator.state_dict(), metrics))
    for name, value in results[0][0].items():
        torch.testing.assert_close(value, results[1][0][name], rtol=1e-9, atol=1e-9)
    for name, value in results[0][1].items():
        torch.testing.assert_close(value.double(), results[1][1][name].double(), rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("changes", [{}, {"loss_type": "dr_grpo", "scale_rewards": "none", "baseline": "leave_one_out"},
                                     {"importance_sampling_level": "sequence", "num_iterations": 2}])
def test_it_learns(changes):
    """Two blanks that must agree: drawn blind to each other they agree one time in five, after 60 steps at least seven times in ten."""
    for seed in (1, 2, 3):
        generator, reference = tiny_generator(seed), tiny_generator(seed)
        config = Config(**{"batch_size": 8, "group_size": 8, "learning_rate": 3e-3, "kl_beta": 0.01, "temperature": 1.0, "top_p": 1.0} | changes)
        optimizer, clock = make_optimizer(generator, config), Clock(torch.device("cpu"))
        mask = torch.zeros(8, 8, dtype=torch.bool)
        mask[:, :2] = True
        rewards = []
        for step in range(60):
            tokens = torch.randint(5, (8, 8), generator=torch.Generator().manual_seed(1000 * seed + step))
            _, metrics = grpo_step(generator, reference, rule, optimizer, tokens, mask, 5, draw_uniforms(8, 8, 8, (seed, step)), config, clock)
            rewards.append(metrics["mean_reward"].item())
        assert rewards[0] < 0.4 and sum(rewards[-5:]) / 5 > 0.7, (seed, rewards[::10])


def bad_inputs(flags, tmp_path, world):
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("in the way")
    return [({"generator_checkpoint": tmp_path / "none.pt"}, "No such file"), ({"generator_checkpoint": world / "judge.pt"}, "a generator is needed"),
            ({"judge_checkpoint": other / "file"}, "damaged or no checkpoint"), ({"block_size": 17}, "lower block_size"), ({"block_size": 10**6}, "block_size takes 5 to"),
            ({"dataset": tmp_path / "none"}, "prepare.py"), ({"device": "cuda:99"}, "not on this machine"), ({"device": "banana"}, "not on this machine"),
            ({"out_dir": other / "file"}, "cannot be written"), ({"init_from": "resume"}, "there is none"),
            ({"generator_checkpoint": Path(flags["out_dir"]) / "checkpoint.pt"}, "would be overwritten"), ({"grup_size": 3}, "did you mean 'group_size'")]


def test_bad_input_is_one_line_and_nothing_is_written(flags, tmp_path, world, capsys):
    for changes, message in bad_inputs(flags, tmp_path, world):
        with pytest.raises(SystemExit) as stop:
            run(flags, **changes)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and message in error and error.count("\n") == 1, (changes, error)
        assert not Path(flags["out_dir"]).exists()
    with pytest.raises(SystemExit) as stop:
        evaluate_main([str(tmp_path)])
    assert stop.value.code == 2 and "No such file" in capsys.readouterr().err


def test_what_is_not_finite_stops_the_run(flags):
    with pytest.raises(SystemExit, match="not finite.*lower learning_rate"):
        run(flags, learning_rate=1e30, grad_clip=0)


@pytest.mark.parametrize("changes", [{"eval_inputs": 1}, {"mask_ratio": 1.0, "masking": "random"}, {"block_size": 5, "masking": "span"}])
def test_small_and_extreme_inputs(flags, changes):
    run(flags, max_iters=1, **changes)
    json.loads((Path(flags["out_dir"]) / "evaluation.json").read_text(), parse_constant=pytest.fail)  # no NaN


def test_resume_refuses_other_mathematics_and_finished_runs(flags, capsys):
    run(flags)
    before = {p: p.read_bytes() for p in Path(flags["out_dir"]).iterdir()}
    for changes, message in [({"kl_beta": 0.5, "max_iters": 8}, "kl_beta=0.5"), ({"max_iters": 8}, "the learning rate is 0 from step 4"), ({}, "raise max_iters")]:
        with pytest.raises(SystemExit):
            run(flags, init_from="resume", **changes)
        assert message in capsys.readouterr().err
    assert {p: p.read_bytes() for p in Path(flags["out_dir"]).iterdir()} == before


def test_other_vocabularies_are_refused(flags, tmp_path, world, capsys):
    from data.char_diffusion.prepare import prepare
    prepare(tmp_path / "ascii", world / "text.txt", "ascii")
    with pytest.raises(SystemExit):
        run(flags, dataset=tmp_path / "ascii")
    assert "vocabulary" in capsys.readouterr().err


def test_as_a_real_command(flags):
    command = [sys.executable, "train_grpo.py"]
    wrong = subprocess.run([*command, "--learnin_rate=1"], capture_output=True, text=True)
    assert wrong.returncode == 2 and wrong.stdout == "" and wrong.stderr == "train_grpo.py: --learnin_rate=1: there is no setting 'learnin_rate'; did you mean 'learning_rate'?\n"
    assert "--group_size=" in subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout


def test_wandb_offline(flags, monkeypatch):
    """The real wandb, in offline mode: a run directory with its binary log."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run(flags, wandb_log="true", max_iters=2)
    logs = list(Path(flags["out_dir"]).glob("wandb/offline-run-*/*.wandb"))
    assert len(logs) == 1 and b"mean_reward" in logs[0].read_bytes()
