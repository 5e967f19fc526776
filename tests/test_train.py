"""The step on tiny models, and the whole program as a user runs it.

Letters: B inputs, T characters, G completions of each, K values of the latent.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import grpo.rollout
import grpo.run
import train_grpo
from data.dataset import Dataset
from grpo.evaluate import ROWS
from grpo.evaluate import main as evaluate_main
from grpo.optimizer import Optimizer
from grpo.plumbing.checkpoint import model_file, read, write
from grpo.plumbing.config import Config
from grpo.plumbing.log import Clock
from grpo.reward import Rewards
from grpo.rollout import Inputs, draw_orders, draw_uniforms
from model.transformer import Generator, Judge, TransformerConfig
from tests.conftest import PLAIN, command_line, same

CPU = torch.device("cpu")
LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "sum")
FIGURES = """
    loss pg_loss kl_penalty mean_reward std_reward mean_advantage mean_kl mean_log_prob entropy
    grad_norm frac_reward_zero_std dead_groups_foretold clip_ratio approx_kl lr valid_words
""".split()


# The step.


def tiny_generator(seed=0, K=1):
    torch.manual_seed(seed)
    return Generator(TransformerConfig(6, 8, n_layer=2, n_head=2, n_embd=32, n_latent=K))


def settings(**changes):
    """Plain GRPO, with the changes."""
    return Config(**(PLAIN | {"kernel": "torch"} | changes))


def rule(tokens):
    """A judge that wants the first two characters to agree."""
    agree = tokens[:, :1] == tokens[:, 1:2]  # (B,1)
    return torch.where(agree, 4.0, -4.0).expand(tokens.shape)


def some_inputs(B, G):
    """B inputs of 8 characters, the first one and about half of the others hidden."""
    tokens = torch.randint(5, (B, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.rand(B, 8, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[:, 0] = True
    uniforms = draw_uniforms(B, G, 8, (0,))
    orders = draw_orders(4, B, (1, 0))
    return Inputs(tokens, mask, tokens.masked_fill(mask, 5), uniforms, orders)


def one_step(config, generator, B=4, G=None, policy=None, judge=rule):
    """-> Rollout, metrics. Another net's logits are the reference: the KL is not 0."""
    reference = tiny_generator(7, generator.n_latent)
    return train_grpo.grpo_step(
        policy or generator,
        reference,
        Rewards(judge, config, "abcde_", set(), CPU),
        Optimizer(generator, config),
        some_inputs(B, G or config.group_size),
        config,
        Clock(CPU),
    )


def counted(model, sizes):
    """The model, which adds the number of inputs of each of its passes to `sizes`."""

    def call(tokens):
        sizes.append(len(tokens))
        return model(tokens)

    return call


@pytest.mark.parametrize("K", [1, 4])
@pytest.mark.parametrize("iterations", [1, 2])
def test_inputs_are_never_repeated_through_the_generator(K, iterations):
    """One pass for the rollout and one for each update, whatever the group."""
    sizes = []
    generator = tiny_generator(K=K)
    config = settings(group_size=16, batch_size=4, num_iterations=iterations)
    one_step(config, generator, policy=counted(generator, sizes))
    assert sizes == [4] * (1 + iterations)


def test_the_judge_sees_each_completion_whole():
    """Those of all values of the latent, as (B,G,T) with the visible characters of their input."""
    generator = tiny_generator(K=2)
    seen = []

    def judge(tokens):
        seen.append(tokens)
        return rule(tokens)

    rollout, _ = one_step(settings(group_size=4, batch_size=4), generator, judge=judge)
    inputs = some_inputs(4, 4)
    assert rollout.completions.shape == (8, 2, 8)
    fills = rollout.completions.reshape(4, 4, 8)  # (B,G,T)
    assert ((fills == inputs.tokens[:, None]) | inputs.mask[:, None]).all()
    judged = {tuple(row) for part in seen for row in part.tolist()}
    assert {tuple(row) for row in fills.flatten(0, 1).tolist()} <= judged


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "sum"])
@pytest.mark.parametrize("scale, quantile", [("group", 1.0), ("batch", 0.4)])
@pytest.mark.parametrize("K, kl_of", [(1, "row"), (2, "marginal")])
def test_accumulated_micro_batches_equal_one_batch(loss_type, scale, quantile, K, kl_of):
    """The same update and the same figures, though the micro-batches hold different numbers of
    blanks, and the weight of the KL is the whole step's."""
    results = []
    for batch_size in (6, 2):
        generator = tiny_generator(K=K).double()
        config = settings(
            group_size=4,
            batch_size=batch_size,
            gradient_accumulation_steps=6 // batch_size,
            loss_type=loss_type,
            scale_rewards=scale,
            learning_rate=1e-2,
            num_iterations=2,
            top_entropy_quantile=quantile,
            kl_target=0.01,
            kl_of=kl_of,
        )
        _, metrics = one_step(config, generator, B=6)
        results.append((generator.state_dict(), metrics))
    (whole, figures), (accumulated, figures_of_parts) = results
    for name, value in whole.items():
        torch.testing.assert_close(value, accumulated[name], rtol=1e-9, atol=1e-9)
    for name, value in figures.items():
        part = figures_of_parts[name].double()
        torch.testing.assert_close(value.double(), part, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("K", [1, 2])
@pytest.mark.parametrize("M", [1, 4])
def test_mini_batches_are_updates_of_their_own(M, K):
    """Every input once per inner iteration, in an order that the seed decides; where nothing moves,
    their figures add up to the whole step's."""
    shared = {
        "group_size": 4,
        "batch_size": 2,
        "gradient_accumulation_steps": 6,
        "num_iterations": 2,
    }
    still = settings(**shared, learning_rate=0.0)
    generator = tiny_generator(K=K)
    before = [p.clone() for p in generator.parameters()]
    _, whole = one_step(still, generator, B=12)
    sizes = []
    in_parts = settings(**shared, learning_rate=0.0, minibatch_size=M)
    _, mini = one_step(in_parts, generator, B=12, policy=counted(generator, sizes))
    micro = min(M, 2)
    assert sizes == [2] * 6 + [micro] * (2 * 12 // micro)  # the rollout, then the updates
    for a, b in zip(before, generator.parameters()):
        assert torch.equal(a, b)
    for name in ("pg_loss", "kl_penalty", "mean_reward"):
        torch.testing.assert_close(mini[name], whole[name], rtol=1e-5, atol=1e-6)

    moving = settings(**shared, learning_rate=1e-2, minibatch_size=M)
    _, once = one_step(moving, tiny_generator(K=K), B=12)
    _, again = one_step(moving, tiny_generator(K=K), B=12)
    # Measured against the rollout, not against the update before.
    assert once["approx_kl"] == again["approx_kl"] > 0


def test_another_group_size_than_the_setting_says():
    """The uniforms decide."""
    rollout, have = one_step(settings(group_size=8, batch_size=4), tiny_generator(), G=3)
    _, want = one_step(settings(group_size=3, batch_size=4), tiny_generator())
    assert rollout.completions.shape[1] == 3
    torch.testing.assert_close(have["loss"], want["loss"])


@pytest.mark.parametrize("K", [1, 2])
def test_the_weight_of_the_kl_grows_with_the_fourth_power_of_the_kl(K):
    shared = {"group_size": 4, "batch_size": 4, "loss_type": "dapo", "kl_beta": 0.2}
    _, metrics = one_step(settings(**shared, kl_target=0.01), tiny_generator(K=K))
    kl = metrics["mean_kl"].item()
    weight = metrics["kl_weight"].item()
    assert kl > 0.01
    assert weight == pytest.approx(0.2 * (kl / 0.01) ** 4, rel=1e-5)
    assert metrics["kl_penalty"].item() == pytest.approx(weight * kl, rel=1e-5)
    _, without = one_step(settings(**shared, kl_target=0.0), tiny_generator(K=K))
    assert "kl_weight" not in without


def test_the_kl_of_the_first_step_is_measured_as_the_setting_says():
    """The mixture's marginals are nearer to each other than the rows are."""
    kl = {}
    for kl_of in ("row", "marginal"):
        config = settings(group_size=4, batch_size=4, kl_of=kl_of, learning_rate=0.0)
        _, metrics = one_step(config, tiny_generator(K=4))
        kl[kl_of] = metrics["mean_kl"].item()
    assert 0 < kl["marginal"] < kl["row"]


def learn(seed, steps, K=1, **changes):
    """Two blanks that must agree -> the metrics of each step."""
    own = {
        "batch_size": 8,
        "group_size": 8,
        "learning_rate": 3e-3,
        "kl_beta": 0.01,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    config = settings(**(own | changes))
    generator = tiny_generator(seed, K)
    reference = tiny_generator(seed, K)
    optimizer = Optimizer(generator, config)
    rewards = Rewards(rule, config, "abcde_", set(), CPU)
    clock = Clock(CPU)
    mask = torch.zeros(8, 8, dtype=torch.bool)
    mask[:, :2] = True
    metrics = []
    for step in range(steps):
        g = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(5, (8, 8), generator=g)
        uniforms = draw_uniforms(8, 8, 8, (seed, step))
        orders = draw_orders(config.num_iterations, 8, (seed, step))
        inputs = Inputs(tokens, mask, tokens.masked_fill(mask, 5), uniforms, orders)
        _, figures = train_grpo.grpo_step(
            generator, reference, rewards, optimizer, inputs, config, clock
        )
        metrics.append(figures)
    return metrics


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "baseline": "leave_one_out"},
        {"importance_sampling_level": "sequence", "num_iterations": 2},
        {"K": 4},
    ],
    ids=str,
)
def test_it_learns(changes):
    """Drawn blind to each other the blanks agree one time in five, after 60 steps at least seven
    times in ten."""
    for seed in (1, 2, 3):
        rewards = [metrics["mean_reward"].item() for metrics in learn(seed, 60, **changes)]
        assert rewards[0] < 0.4
        assert sum(rewards[-5:]) / 5 > 0.7, (seed, rewards[::10])


def final_kl(seed, **changes):
    """The mean KL of the last ten of 80 steps."""
    return sum(metrics["mean_kl"].item() for metrics in learn(seed, 80, **changes)[-10:]) / 10


def test_a_target_keeps_the_kl_near_whatever_the_weight():
    """Sixteen times the weight divides it by more than twenty, with a target by about two."""
    for seed in (1, 2):
        free = final_kl(seed, kl_beta=0.05)
        tight = final_kl(seed, kl_beta=0.8)
        loose = final_kl(seed, kl_beta=0.05, kl_target=0.4)
        stiff = final_kl(seed, kl_beta=0.8, kl_target=0.4)
        assert free > 20 * tight
        assert 0.2 < stiff < loose < 0.8


# The whole program.


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def without_times(line):
    return {name: value for name, value in line.items() if not name.endswith("_ms")}


def run(flags, **changes):
    """-> the checkpoint, the lines of metrics.jsonl without times."""
    train_grpo.main(command_line(flags, **changes))
    out = Path((flags | changes)["out_dir"])
    metrics = [without_times(line) for line in read_lines(out / "metrics.jsonl")]
    return read(out / "checkpoint.pt"), metrics


def table_of(flags):
    """evaluation.json, in which no number may be NaN."""
    text = (Path(flags["out_dir"]) / "evaluation.json").read_text()
    return json.loads(text, parse_constant=pytest.fail)


def refused(flags, capsys, **changes):
    """The one line that a user's mistake is answered with; nothing is written."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        train_grpo.main(command_line(flags, **changes))
    assert end.value.code == 2
    assert not Path(flags["out_dir"]).exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.fixture(scope="module")
def coin(world):
    """The file of an untrained generator with a latent of two values."""
    vocabulary = Dataset(world / "text", "train").vocabulary
    torch.manual_seed(1)
    generator = Generator(TransformerConfig(len(vocabulary), 16, 2, 2, 32, n_latent=2))
    torch.nn.init.normal_(generator.head.weight, std=0.1)  # two values that differ
    write(world / "coin.pt", model_file(generator, vocabulary))
    return str(world / "coin.pt")


@pytest.fixture(params=[1, 2], ids="K={}".format)
def generator_file(request, world):
    """Without a latent, and with one of two values."""
    if request.param == 1:
        return str(world / "generator.pt")
    return request.getfixturevalue("coin")


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
    assert json.loads((out / "config.json").read_text())["group_size"] == 4
    assert checkpoint["training"]["iteration"] == 4
    assert [line["iteration"] for line in metrics] == [0, 1, 2, 3]
    for name in FIGURES:
        assert all(isinstance(line[name], float) for line in metrics), name
    result = table_of(flags)
    everywhere = "judge valid_words exact_words exact_chars distinct_words ngram_bits".split()
    for row in ROWS:
        assert {*everywhere, "forward_passes"} <= result[row].keys()
    assert {"entropy", "pass@1", "pass@16"} <= result["after_sample"].keys()
    assert {"gap_closed", "masking", "inputs", "temperature", "seed"} <= result.keys()
    assert result["original"]["exact_chars"] == 1
    assert result["reference_sequential_random"]["forward_passes"] > 1
    shown = capsys.readouterr().out
    assert "gap closed" in shown
    assert "before, one step, argmax" in shown
    evaluate_main([str(out)])  # the table again, from the files alone
    assert table_of(flags) == result


def test_a_run_with_a_latent(flags, coin):
    """The same files and figures; the checkpoint's generator has the latent too."""
    checkpoint, metrics = run(flags, generator_checkpoint=coin, kl_of="marginal", max_iters=2)
    assert checkpoint["architecture"]["n_latent"] == 2
    for name in FIGURES:
        assert all(isinstance(line[name], float) for line in metrics), name
    assert metrics[0]["mean_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics[1]["mean_kl"] > 0
    result = table_of(flags)
    assert set(ROWS) <= result.keys()
    assert result["original"]["exact_chars"] == 1
    evaluate_main([flags["out_dir"]])
    assert table_of(flags) == result


RESUMED = [
    {},
    {"gradient_accumulation_steps": 2, "num_iterations": 2, "loss_type": "dapo", "log_interval": 2},
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
]
CUT_SHORT = """{"iteration": 3, "written": "after the last checkpoint, before the kill"}
{"iteration": 4, "cut sho"""


def check_resume(flags, folder, **changes):
    """n steps, resume, n more = 2n steps never stopped: weights, optimizer, and all figures but
    the times."""
    changes = {"eval_inputs": 1} | changes
    want, metrics = run(flags, out_dir=folder / "whole", max_iters=6, **changes)
    half = {"out_dir": folder / "halves", "lr_decay_iters": 6, **changes}
    run(flags, max_iters=3, **half)
    with open(folder / "halves" / "metrics.jsonl", "a") as f:
        f.write(CUT_SHORT)
    have, resumed = run(flags, max_iters=6, init_from="resume", **half)
    assert metrics == resumed
    assert same(want["weights"], have["weights"])
    assert same(want["training"]["optimizer"], have["training"]["optimizer"])
    assert same(want["training"].get("reference"), have["training"].get("reference"))
    assert ("reference" in have["training"]) == ("reference_mode" in changes)


@pytest.mark.parametrize("changes", RESUMED, ids=str)
def test_resume_is_bit_for_bit(flags, tmp_path, changes):
    check_resume(flags, tmp_path, **changes)


def test_resume_is_bit_for_bit_with_a_latent(flags, tmp_path, coin):
    changes = RESUMED[2] | {"generator_checkpoint": coin, "kl_of": "marginal", "credit": "run"}
    check_resume(flags, tmp_path, **changes)


def test_the_same_command_gives_the_same_run_and_another_seed_another(
    flags, tmp_path, generator_file
):
    results = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        changes = {"generator_checkpoint": generator_file, "max_iters": 2, "eval_inputs": 1}
        results.append(run(flags, out_dir=tmp_path / name, seed=seed, **changes))
    (one, lines), (again, lines_again), (_, lines_of_another) = results
    assert lines == lines_again
    assert same(one["weights"], again["weights"])
    assert lines != lines_of_another


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_inputs": 1},
        {"mask_ratio": 1.0, "masking": "random"},
        {"block_size": 5, "masking": "span"},
    ],
    ids=str,
)
def test_small_and_extreme_inputs(flags, changes):
    run(flags, max_iters=1, **changes)
    table_of(flags)


def test_help():
    command = [sys.executable, "train_grpo.py", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--group_size=" in shown


@pytest.mark.parametrize("path", sorted(Path("config").glob("*.py")), ids=str)
def test_every_config_runs(flags, path):
    own = {"batch_size": 32, "max_iters": 2, "warmup_iters": 0, "eval_inputs": 2}
    train_grpo.main([str(path), *command_line(flags, **own)])
    assert len(read_lines(Path(flags["out_dir"]) / "metrics.jsonl")) == 2


def test_half_precision(flags, generator_file):
    """Forward passes in bfloat16; what is summed stays float32, and the figures of the first step
    are those of float32 to its precision."""
    shared = {"generator_checkpoint": generator_file, "max_iters": 2, "eval_inputs": 1}
    _, half = run(flags, dtype="bfloat16", gradient_checkpointing="true", **shared)
    _, full = run(flags, out_dir=flags["out_dir"] + "-full", **shared)
    for name in ("entropy", "mean_log_prob", "mean_reward", "grad_norm"):
        assert half[0][name] == pytest.approx(full[0][name], rel=0.1), name
    assert full[0]["mean_kl"] == half[0]["mean_kl"] == 0
    assert half[0]["approx_kl"] == 0
    assert half[1]["mean_kl"] > 0


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("mode", ["static", "ema"])
def test_the_reference_may_live_elsewhere(flags, tmp_path, device, mode, monkeypatch):
    """reference_device=cpu: every pass of the reference is made there, and the run is the same to
    rounding."""
    asked = []
    real = grpo.run.forward

    def forward(model, device, config):
        asked.append(device.type)
        return real(model, device, config)

    monkeypatch.setattr(grpo.run, "forward", forward)
    monkeypatch.setattr(grpo.rollout, "forward", forward)
    shared = {"device": device, "reference_mode": mode}
    _, elsewhere = run(flags, out_dir=tmp_path / "a", reference_device="cpu", **shared)
    assert asked == [device, device, "cpu", "cpu"]  # judge, generator, reference, untouched
    asked.clear()
    _, together = run(flags, out_dir=tmp_path / "b", reference_device=device, **shared)
    assert asked == [device] * 4
    for a, b in zip(elsewhere, together):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


def test_prompts_of_the_users_own(flags, tmp_path, generator_file):
    """Of any lengths: what follows a prompt is no character."""
    prompts = {"prompts": ["th_ c_t", "the ___ cat sat", "_"]}
    (tmp_path / "p.json").write_text(json.dumps(prompts))
    _, metrics = run(
        flags,
        generator_checkpoint=generator_file,
        prompts_file=tmp_path / "p.json",
        max_iters=2,
        credit="run",
        reward="judge,valid_words:0.5",
    )
    for line in metrics:
        assert 0 <= line["mean_reward"] <= 1.5
        assert line["mean_kl"] >= 0
    assert table_of(flags)["original"]["exact_chars"] == 1


@pytest.mark.parametrize("group_size", [2, 6])
def test_a_group_that_the_latent_does_not_divide_is_refused(flags, world, capsys, group_size):
    vocabulary = Dataset(world / "text", "train").vocabulary
    generator = Generator(TransformerConfig(len(vocabulary), 16, 1, 1, 16, n_latent=4))
    file = world / "four.pt"
    write(file, model_file(generator, vocabulary))
    told = refused(flags, capsys, generator_checkpoint=file, group_size=group_size)
    assert f"group_size={group_size} is no multiple of the 4 values" in told
    assert "group_size takes 4, 8, 12" in told


def test_a_reference_of_another_latent_is_refused(flags, world, coin, capsys):
    plain = str(world / "generator.pt")
    told = refused(flags, capsys, generator_checkpoint=coin, reference_checkpoint=plain)
    assert "the generator's latent has 2 values, the reference's 1" in told
    told = refused(flags, capsys, generator_checkpoint=plain, reference_checkpoint=coin)
    assert "the generator's latent has 1 values, the reference's 2" in told


OWN_REWARDS = '''
def few_spaces(completions, masked, mask, decode):
    return [[1 - text.count(" ") / len(text) for text in decode(group)] for group in completions]

def early(completions, masked, mask, decode):
    """Of each character: is it early in the alphabet?"""
    return completions < 5

def early_share(completions, masked, mask, decode):
    return (completions < 5).float().mean(dim=-1)

def one_number(completions, masked, mask, decode):
    return completions.float().mean() * float("nan")
'''


@pytest.fixture
def own_rewards(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_REWARDS)
    return tmp_path / "mine.py"


def test_a_reward_of_the_users_own(flags, own_rewards):
    _, metrics = run(flags, max_iters=2, reward=f"judge:0.5,{own_rewards}:few_spaces:2")
    for line in metrics:
        want = 0.5 * line["reward_judge"] + 2 * line["reward_few_spaces"]
        assert line["mean_reward"] == pytest.approx(want, rel=1e-5)
    completions = read_lines(Path(flags["out_dir"]) / "completions.jsonl")
    assert len(completions) == 8 * 16
    assert completions[0].keys() >= {"input", "completion", "judge", "few_spaces"}
    for line in completions:
        few_spaces = 1 - line["completion"].count(" ") / 16
        assert line["few_spaces"] == pytest.approx(few_spaces, abs=1e-5)
        assert all(a in (b, "_") for a, b in zip(line["input"], line["completion"]))


@pytest.mark.parametrize("name", ["early_share", "early"])
def test_a_reward_of_the_users_own_alone(flags, own_rewards, generator_file, name):
    """With credit=run, the default, as well: what it says of the whole, or of each character."""
    _, metrics = run(
        flags,
        generator_checkpoint=generator_file,
        max_iters=2,
        eval_inputs=1,
        credit="run",
        reward=f"{own_rewards}:{name}",
    )
    for line in metrics:
        assert line["mean_reward"] == pytest.approx(line[f"reward_{name}"], rel=1e-6)
        assert 0 < line["mean_reward"] < 1
        assert line["grad_norm"] > 0


def test_a_second_judge(flags, world, tmp_path):
    vocabulary = Dataset(world / "text", "train").vocabulary
    torch.manual_seed(3)
    second = Judge(TransformerConfig(len(vocabulary), 16, 1, 1, 16))
    torch.nn.init.normal_(second.head.weight)
    write(tmp_path / "strict.pt", model_file(second, vocabulary))
    reward = f"judge:0.75,{tmp_path}/strict.pt:0.25"
    _, metrics = run(flags, max_iters=2, credit="run", reward=reward)
    for line in metrics:
        want = 0.75 * line["reward_judge"] + 0.25 * line["reward_strict"]
        assert line["mean_reward"] == pytest.approx(want, rel=1e-5)
        assert line["reward_judge"] != line["reward_strict"]


def test_a_second_judge_of_another_vocabulary_is_refused(flags, tmp_path, capsys):
    other = Judge(TransformerConfig(3, 16, 1, 1, 16))
    write(tmp_path / "other.pt", model_file(other, "ab_"))
    told = refused(flags, capsys, reward=f"judge,{tmp_path}/other.pt")
    assert "other.pt has the vocabulary 'ab_'" in told


def test_a_reward_of_another_shape_is_told_its_shape(flags, own_rewards, capsys):
    told = refused(flags, capsys, reward=f"{own_rewards}:one_number")
    assert "reward one_number returned the shape ()" in told
    assert "not finite" not in told


TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc_per_node=2",
    "--master_port=0",
    "--rdzv_backend=c10d",
    "--rdzv_endpoint=localhost:0",
]
ALL_RUNS = """
import json
import sys
import train_grpo
for arguments in json.load(open(sys.argv[1])):
    train_grpo.main(arguments)
"""


def in_two_processes(folder, command_lines):
    """Runs, one after the other, in the same two processes."""
    (folder / "all.py").write_text(ALL_RUNS)
    (folder / "all.json").write_text(json.dumps(command_lines))
    command = [*TORCHRUN, folder / "all.py", folder / "all.json"]
    environment = os.environ | {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def distance(a, b):
    """Of two models' weights."""
    return sum((a[name] - b[name]).square().sum() for name in a).sqrt()


def test_two_processes_equal_one(flags, tmp_path, coin):
    """torchrun with 2 ranks x B inputs = one process with 2 micro-batches of B, and, but for bnpo,
    with one batch of 2B: weights and metrics."""
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
    runs = {loss_type: extras | {"loss_type": loss_type} for loss_type in LOSS_TYPES}
    runs["coin"] = extras | {"generator_checkpoint": coin, "kl_of": "marginal"}
    commands = [command_line(flags, **own, out_dir=str(tmp_path / k)) for k, own in runs.items()]
    shown = in_two_processes(tmp_path, commands)
    assert shown.count("gap closed") == len(runs)  # one process speaks

    batches = {"micro-batches": {"gradient_accumulation_steps": 2}, "one batch": {"batch_size": 8}}
    for name, own in runs.items():
        have = read(tmp_path / name / "checkpoint.pt")["weights"]
        lines = read_lines(tmp_path / name / "metrics.jsonl")
        start = read(own.get("generator_checkpoint", flags["generator_checkpoint"]))["weights"]
        for title, batch in batches.items():
            if (name, title) == ("bnpo", "one batch"):
                continue
            want, metrics = run(flags, **own, **batch, out_dir=tmp_path / (name + title))
            apart = distance(want["weights"], have)
            assert apart < 1e-4 * distance(want["weights"], start), (name, title)
            for a, b in zip(lines, metrics):
                of_both = {key: a[key] for key in b}
                assert of_both == pytest.approx(b, rel=1e-3, abs=1e-5), (name, title)
