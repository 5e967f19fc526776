"""What a run leaves, what it promises of its folder, and how it ends where something fails."""

import json
import os
import traceback
from pathlib import Path

import pytest
import torch
from conftest import command_line, run, same

import train_grpo
from data.dataset import Dataset
from grpo.plumbing.checkpoint import model_file, read, write
from grpo.plumbing.config import load_config
from grpo.plumbing.run import Run
from grpo.reward import RewardFailed
from model.transformer import Judge, TransformerConfig

OWN_REWARDS = """
calls = []

def few_spaces(completions, masked, mask, decode):
    return [[1 - text.count(" ") / len(text) for text in decode(group)] for group in completions]

def early(completions, masked, mask, decode):
    return completions < 5

def tired(completions, masked, mask, decode):
    calls.append(1)
    if len(calls) == 4:
        return sleep()
    return completions.float().mean(dim=-1)

def sleep():
    raise RuntimeError("too tired")
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN_REWARDS)
    return tmp_path / "own.py"


def files(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_run_leaves_its_files_and_says_what_to_do_next(flags, capsys):
    checkpoint, metrics = run(flags)
    out = Path(flags["out_dir"])
    made = {"config", "metrics", "replay", "checkpoint", "evaluation", "completions"}
    assert made == {path.stem for path in out.iterdir()}
    assert json.loads((out / "config.json").read_text())["group_size"] == 4
    assert checkpoint["training"]["iteration"] == 4
    assert [line["iteration"] for line in metrics] == [0, 1, 2, 3]
    assert all(type(value) is float for line in metrics for value in list(line.values())[1:])
    shown = capsys.readouterr().out
    for line in ("step 0: valid words", "after, one step, sampled", "mean_reward   ", "▁"):
        assert line in shown
    assert f"python -m grpo.evaluation {out}\n" in shown
    assert f"--run={out}\n" in shown


def test_what_a_step_does_is_timed(flags):
    run(flags, reward="judge,valid_words")
    lines = (Path(flags["out_dir"]) / "metrics.jsonl").read_text().splitlines()
    times = {name for name in json.loads(lines[0]) if name.endswith("_ms")}
    parts = {"data_ms", "policy_ms", "reference_ms", "judge_ms", "update_ms"}
    assert parts | {"step_ms"} == times


# The folder.


def test_the_folder_of_an_earlier_run_is_moved_aside_whole(flags, tmp_path, capsys):
    run(flags)
    out = tmp_path / "out"
    (out / "mine.txt").write_text("a file of the user's")
    before = files(out)
    run(flags, seed=2)
    (aside,) = tmp_path.glob("out-until-*")
    assert f"{out} held a run: it is in {aside} now" in capsys.readouterr().out
    assert files(aside) == before
    assert files(out).keys() == before.keys() - {"mine.txt"}


def test_two_runs_do_not_share_a_folder(flags, tmp_path, capsys):
    first = Run(load_config(command_line(flags)))
    for changes in ({"seed": 2}, {"out_dir": tmp_path / "." / "out"}):
        with pytest.raises(SystemExit) as end:
            run(flags, **changes)
        assert end.value.code == 2
        assert "out is in use by another run, or cannot be written" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["seed"] == 1
    first.log.close(failed=False)
    run(flags, seed=2)


# Where something fails.


def spoil(run, bad):
    """From step 2 on it is not a number."""

    def no_number(call):
        return lambda *arguments: call(*arguments) * float("nan")

    def inputs(step):
        if step == 2 and bad == "gradient":
            run.optimizer.parameters[0].register_hook(no_number(lambda gradient: gradient))
        elif step == 2 and bad == "judge":
            run.rewards.score = no_number(run.rewards.score)
        elif step == 2:
            setattr(run, bad, no_number(getattr(run, bad)))
        return real(step)

    real = run.inputs
    run.inputs = inputs


@pytest.mark.parametrize("generator", ["generator", "mixture"])
@pytest.mark.parametrize(
    "bad, named",
    [
        ("policy", "the generator's logits (entropy=nan)"),
        ("reference", "the reference's logits (mean_kl=nan)"),
        ("judge", "the rewards (mean_reward=nan)"),
        ("gradient", "the gradient (grad_norm=nan)"),
    ],
)
def test_what_is_not_finite_changes_no_weight(flags, world, capsys, generator, bad, named):
    """The line names step and tensor; the weights stay those of the last checkpoint."""
    path = world / f"{generator}.pt"
    run = Run(load_config(command_line(flags, save_interval=1, generator_checkpoint=path)))
    spoil(run, bad)
    with pytest.raises(SystemExit) as end, run:
        train_grpo.train(run)
    assert end.value.code == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"step 2: FloatingPointError: not finite: {named}" in line
    saved = read(Path(flags["out_dir"]) / "checkpoint.pt")
    assert saved["training"]["iteration"] == 2
    assert same(saved["weights"], dict(run.generator.state_dict()))
    assert same(saved["training"]["optimizer"]["state"], run.optimizer.adamw.state_dict()["state"])


def test_an_error_in_a_users_own_reward_says_where_and_how_to_go_on(flags, own, capsys):
    """Its own frames are in the traceback, which Python prints."""
    reward = f"judge,{own}:tired"
    with pytest.raises(RewardFailed) as failed:
        run(flags, reward=reward, save_interval=1)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("train_grpo.py: step 2: RewardFailed: reward tired failed: RuntimeError")
    go_on = f"2 of 4 steps are saved; to go on: --init_from=resume --out_dir={flags['out_dir']}"
    assert f"{go_on} --reward={reward}, for the table" in line
    frames = traceback.extract_tb(failed.value.__cause__.__traceback__)
    assert [frame.name for frame in frames[-2:]] == ["tired", "sleep"]
    assert {frame.filename for frame in frames[-2:]} == {str(own)}


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint(flags, monkeypatch, capsys):
    real = os.fsync
    syncs = []

    def full(number):
        syncs.append(number)
        if len(syncs) == 4:  # config.json, a checkpoint, its copy, and the next
            raise OSError(28, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as end:
        run(flags, save_interval=1)
    assert end.value.code == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "step 1: OSError: [Errno 28] No space left on device; 1 of 4 steps are saved" in line
    assert read(Path(flags["out_dir"]) / "checkpoint.pt")["training"]["iteration"] == 1


# Settings that need more than a flag.


@pytest.mark.parametrize("judge_score, undecided", [("log_odds", 0), ("probability", 0.5)])
def test_rewards_of_the_users_own_and_a_second_judge(
    flags, own, world, tmp_path, judge_score, undecided
):
    """The second is untrained."""
    vocabulary = Dataset(world / "text", "train").vocabulary
    second = Judge(TransformerConfig(len(vocabulary), 16, 1, 1, 32))
    write(tmp_path / "strict.pt", model_file(second, vocabulary))
    parts = {"judge": 0.5, "few_spaces": 2, "early": -1, "strict": 0.25}
    reward = f"judge:0.5,{own}:few_spaces:2,{own}:early:-1,{tmp_path}/strict.pt:0.25"
    _, metrics = run(flags, reward=reward, credit="run", judge_score=judge_score)
    shares = all(0 < line["reward_judge"] < 1 for line in metrics)
    assert shares == (judge_score == "probability")
    for line in metrics:
        assert line["reward_strict"] == undecided
        want = sum(weight * line[f"reward_{name}"] for name, weight in parts.items())
        assert line["mean_reward"] == pytest.approx(want, rel=1e-4)
    table = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert table["before_sample"].keys() >= {"reward_few_spaces", "reward_early", "reward_strict"}


def test_prompts_of_the_users_own_may_have_any_length(flags, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({"prompts": ["th_ c_t", "the ___ cat sat", "_"]}))
    reward = "judge,valid_words:0.5"
    _, steps = run(flags, prompts_file=tmp_path / "p.json", credit="run", reward=reward)
    assert len(steps) == 4
    assert all(0 <= step["reward_valid_words"] <= 1 and step["grad_norm"] > 0 for step in steps)


def test_a_periodic_reference_is_the_policy_after_each_period(flags, world):
    own = {"reference_mode": "periodic", "reference_update_freq": 2}
    first, _ = run(flags, max_iters=1, **own)
    assert same(first["training"]["reference"], dict(read(world / "generator.pt")["weights"]))
    second, _ = run(flags, max_iters=2, **own)
    assert same(second["training"]["reference"], second["weights"])


def test_the_rate_of_a_step_is_the_schedules(flags):
    """Cosine from 1e-2 to 0 in 4 steps, the first at the peak."""
    _, lines = run(flags, max_iters=4)
    have = [line["lr"] for line in lines]
    assert have == pytest.approx([1e-2, 0.8535533905932737e-2, 0.5e-2, 0.14644660940672624e-2])


def test_before_is_the_generator_also_where_the_reference_is_another(flags, world, tmp_path):
    other = read(world / "generator.pt")
    torch.manual_seed(7)
    other["weights"] = {k: torch.randn_like(w) for k, w in other["weights"].items()}
    write(tmp_path / "other.pt", other)
    rows = []
    for reference in ("", str(tmp_path / "other.pt")):
        run(flags, max_iters=1, reference_checkpoint=reference)
        rows.append(json.loads((tmp_path / "out" / "evaluation.json").read_text()))
    assert rows[0]["before_sample"] == rows[1]["before_sample"]
