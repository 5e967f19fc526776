"""Check what a run writes, how it treats its folder, and how it ends if something fails."""

import json
import shlex
import signal
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from conftest import command_line, contents, read_json, read_jsonl, run, same, write_text

import grpo.run.log
import train_grpo
from data.user_mistake import Mistake
from grpo.run.checkpoint import model_file, read, write
from grpo.run.config import load_config
from grpo.run.load import load_data
from grpo.run.log import lock_folder
from grpo.tools import fill
from model.transformer import Judge, TransformerConfig

OWN_REWARDS = """
from beside import last
from data.vocabulary import decode

calls = []

def few_spaces(completions, batch):
    return [[1 - text.count(" ") / len(text) for text in decode(group)] for group in completions]

def early(completions, batch):
    return (completions < 5).float().mean(dim=-1)

def tired(completions, batch):
    calls.append(1)
    if len(calls) == last:
        raise RuntimeError("too tired")
    return completions.float().mean(dim=-1)
"""


@pytest.fixture
def own(tmp_path):
    """Write rewards of the user's own, which import what lies beside them: -> the file."""
    write_text(tmp_path / "beside.py", "last = 13")
    write_text(tmp_path / "own.py", OWN_REWARDS)
    return tmp_path / "own.py"


def test_a_run_leaves_its_files_and_says_what_to_do_next(flags, tmp_path, capsys):
    out = tmp_path / "my run"
    table = train_grpo.main(command_line(flags, out_dir=out, eval_interval=2))
    made = {"run", "config", "metrics", "snapshots", "checkpoint", "evaluation", "completions"}
    assert made == {path.stem for path in out.iterdir()}
    assert table == read_json(out / "evaluation.json")
    assert [line["iteration"] for line in read_jsonl(out / "metrics.jsonl")] == [0, 1, 2, 3]
    shown, errors = capsys.readouterr()
    assert not errors  # which are no terminal here, so there is no bar
    looks = [line.split(":")[0] for line in shown.splitlines() if line.startswith("step ")]
    assert looks == ["step 0", "step 2", "step 4"] and "after, sampled" in shown
    (command,) = (shlex.split(line) for line in shown.splitlines() if "grpo.tools.fill" in line)
    fill.main(command[3:])


def test_the_same_seed_again_and_prompts_that_are_not_held_out_are_warned_of(
    flags, tmp_path, capsys
):
    run(flags, max_iters=1)
    held_out, *_ = read_jsonl(tmp_path / "out" / "completions.jsonl")
    write_text(tmp_path / "p.json", json.dumps({"prompts": [held_out["input"], "th_ cat"]}))
    for changes, warned in {
        "": "",
        f"--generator_checkpoint={tmp_path}/out": "was trained with seed=1, too",
        f"--generator_checkpoint={tmp_path}/out --seed=2": "",
        f"--prompts_file={tmp_path}/p.json": "1 of 2 prompts are inputs of the table, too",
    }.items():
        capsys.readouterr()
        train_grpo.main(command_line(flags, out_dir=tmp_path / "b") + changes.split())
        first, *_ = capsys.readouterr().out.split("step 0: ")
        assert warned in first and ("too" in first) == bool(warned)


# The folder.


def test_the_folder_of_an_earlier_run_is_moved_aside_whole(flags, tmp_path, capsys):
    out = tmp_path / "my out"
    flags |= {"out_dir": out, "max_iters": 1}
    run(flags)
    write_text(out / "mine.txt", "a file of the user's")
    before = contents(out)
    run(flags, seed=2)
    (aside,) = tmp_path.glob("old-my out-*")
    shown = capsys.readouterr().out
    assert f"{out} held a run, which is in {aside} now" in shown
    assert contents(aside) == before
    assert "mine.txt" not in contents(out)


def test_two_runs_do_not_share_a_folder(flags, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    first = lock_folder(out)
    write_text(out / "mine.txt", "a file of the user's")
    for name in (out, tmp_path / "." / "out"):
        with pytest.raises(Mistake, match="out is in use by another run"):
            run(flags, out_dir=name)
    assert {*contents(out)} == {"mine.txt", "run.lock"}
    first.close()
    run(flags, max_iters=1)


@pytest.mark.parametrize("module, place", [(grpo.run.log, "save_checkpoint"), (train_grpo, "peek")])
def test_a_signal_during_the_last_save_or_look_is_not_lost(flags, monkeypatch, module, place):
    original = getattr(module, place)

    def interrupted(*arguments):
        if arguments[-1] == 4:  # the last step
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(module, place, interrupted)
    with pytest.raises(SystemExit, match="143"):
        run(flags)
    out = Path(flags["out_dir"])
    assert read(out / "checkpoint.pt")["training"]["iteration"] == 4
    assert not (out / "evaluation.json").exists()


def test_a_run_may_be_quiet_and_in_a_thread(flags, capsys):
    """A sweep of wandb starts it in one. Python takes signals in its main thread only."""
    with ThreadPoolExecutor(1) as pool:
        run_in_thread = pool.submit(train_grpo.main, command_line(flags, max_iters=1), quiet=True)
    assert run_in_thread.result()["after, sampled"] and not capsys.readouterr().out


def test_held_out_words_are_not_in_the_lexicon(flags):
    """Only the held-out text has the word zebra."""
    _, held_out = load_data(load_config(command_line(flags)), 28, torch.device("cpu"))
    assert "cat" in held_out.rule.lexicon
    assert "zebra" not in held_out.rule.lexicon


# Runs in which something fails.


def nan(x):
    return x * float("nan")


def spoil(bad, policy, reference, rewards, optimizer):
    """Turn the policy's logits, the reference's, the judge's scores, or a gradient into NaN."""
    if bad == "grad_norm":
        optimizer.parameters[0].register_hook(nan)
    elif bad == "reward_judge":
        function, weight = rewards.parts["judge"]
        rewards.parts["judge"] = (lambda *given: nan(function(*given)), weight)
    else:
        network = policy.network if bad == "entropy" else reference.network
        network.trunk.register_forward_hook(lambda *given: nan(given[-1]))


@pytest.mark.parametrize(
    "bad, generator",
    [
        ("entropy", "latent"),
        ("mean_kl", "generator"),
        ("reward_judge", "generator"),
        ("grad_norm", "generator"),
    ],
)
def test_what_is_not_finite_changes_no_weight_and_the_line_names_the_last_saved_step(
    flags, world, monkeypatch, capsys, bad, generator
):
    """The error names the step and the metric. No option makes the run save more often."""
    seen = []
    real = train_grpo.grpo_step

    def step(policy, reference, rewards, optimizer, *given):
        state = {**policy.network.state_dict(), "adamw": optimizer.wrapped.state_dict()["state"]}
        seen.append((state, deepcopy(state)))
        if len(seen) == 13:
            spoil(bad, policy, reference, rewards, optimizer)
        return real(policy, reference, rewards, optimizer, *given)

    monkeypatch.setattr(train_grpo, "grpo_step", step)
    with pytest.raises(FloatingPointError, match=f"step 12: {bad} is nan"):
        run(flags, max_iters=20, generator_checkpoint=world / f"{generator}.pt")
    after, before = seen[-1]
    assert same(after, before) and not same(before, seen[-2][1])
    assert "10 of 20 steps are saved" in capsys.readouterr().err
    saved = read(Path(flags["out_dir"]) / "checkpoint.pt")
    assert saved["training"]["iteration"] == 10


def test_a_run_that_ends_early_says_how_to_resume(flags, own, tmp_path, capsys):
    """Its reward fails, and the command goes on from the last step that was saved."""
    out, reward = f"{tmp_path}/my out", f"judge,{own}:tired"
    with pytest.raises(RuntimeError, match="too tired"):
        run(flags, out_dir=out, reward=reward, max_iters=14)
    line = capsys.readouterr().err.splitlines()[-1]
    saved, _, command = line.partition("; to resume: ")
    assert saved == "the run ends early: 10 of 14 steps are saved"
    words = ["--init_from=resume", f"--out_dir={out}"]
    assert shlex.split(command) == ["python", "train_grpo.py", *words]


# Settings that need a file of their own, or that act over several steps.


def test_rewards_of_the_users_own_and_a_second_judge(flags, own, tmp_path):
    """The weights of an untrained judge's head are 0, so its log-odds are always 0."""
    strict = tmp_path / "strict.pt"
    write(strict, model_file(Judge(TransformerConfig(28, 16, 1, 1, 32))))
    parts = {"judge": 0.5, f"{own}:few_spaces": 2, f"{own}:early": -1, strict: 0.25}
    reward = f"judge:0.5,{own}:few_spaces:2,{own}:early:-1,{strict}:0.25"
    _, metrics = run(flags, reward=reward)
    for line in metrics:
        assert line[f"reward_{strict}"] == 0
        want = sum(weight * line[f"reward_{name}"] for name, weight in parts.items())
        assert line["mean_reward"] == pytest.approx(want, rel=1e-4)


def test_prompts_of_the_users_own_may_have_any_length(flags, tmp_path):
    write_text(tmp_path / "p.json", json.dumps({"prompts": ["th_ cat", "the ___ cat sat", "_"]}))
    reward = "judge,valid:0.5"
    _, steps = run(flags, prompts_file=tmp_path / "p.json", reward=reward, group_size=16)
    assert len(steps) == 4 and any(step["valid"] for step in steps)
    for step in steps:
        assert step["grad_norm"] > 0 and step["valid"] == pytest.approx(step["reward_valid"])
