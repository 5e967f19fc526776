"""Check what a run writes, how it treats its folder, and how it ends if something fails."""

import errno
import json
import os
import shlex
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import command_line, contents, read_json, read_jsonl, run, same, write_text

import train_grpo
from data.user_mistake import Mistake
from grpo.run.checkpoint import model_file, read, write
from grpo.run.config import Config, read_arguments
from grpo.run.load import load_data
from grpo.run.log import Log, lock_folder
from model.transformer import Judge, TransformerConfig

OWN_REWARDS = """
from beside import last
from data.vocabulary import decode

def few_spaces(completions, batch):
    return [[1 - text.count(" ") / len(text) for text in decode(group)] for group in completions]

def early(completions, batch):
    return (completions < 5).float().mean(dim=-1)

def tired(completions, batch):
    if batch.seed == (1, last):  # of the run's seed, and a step
        raise RuntimeError("too tired")
    return completions.float().mean(dim=-1)
"""


@pytest.fixture
def own(tmp_path):
    """Write rewards of the user's own, which import what lies beside them: -> the file."""
    write_text(tmp_path / "beside.py", "last = 2")
    write_text(tmp_path / "own.py", OWN_REWARDS)
    return tmp_path / "own.py"


def test_a_run_leaves_its_files_and_says_what_to_do_next(flags, tmp_path, capsys):
    out = tmp_path / "my run"
    table = train_grpo.main(command_line(flags, out_dir=out, eval_interval=2))
    made = {"config", "metrics", "snapshots", "checkpoint", "evaluation", "completions"}
    assert made == {path.stem for path in out.iterdir()}
    assert table == read_json(out / "evaluation.json")
    lines = read_jsonl(out / "metrics.jsonl")
    assert [line.pop("iteration") for line in lines] == [0, 1, 2, 3]
    assert all(type(value) is float for line in lines for value in line.values())
    shown, errors = capsys.readouterr()
    assert not errors  # which are no terminal here, so there is no bar
    looks = [line.split(":")[0] for line in shown.splitlines() if line.startswith("step ")]
    assert looks == ["step 0", "step 2", "step 4"]
    assert "after, sampled" in shown and "warning" not in shown
    (fill,) = (shlex.split(line) for line in shown.splitlines() if "grpo.tools.fill" in line)
    first, *_ = read_jsonl(out / "completions.jsonl")
    assert fill[3:] == [first["input"], f"--run={out}"]


@pytest.mark.parametrize("dead, step", [([1.0] * 9, 0), ([0.5, *[1.0] * 9, 0.9, *[1.0] * 15], 20)])
def test_one_step_at_the_start_or_ten_in_a_row_without_anything_to_learn_are_one_warning(
    flags, capsys, dead, step
):
    with Log(Config(**flags), 0, "", quiet=True) as log:
        for number, share in enumerate(dead):
            log.write(number, {"frac_reward_zero_std": share})
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "warning" in x)
    assert f"step {step}: all completions of an input earned the same" in line


# The folder.


@pytest.mark.parametrize("left", ["checkpoint.pt", "metrics.jsonl"])
def test_the_folder_of_an_earlier_run_is_moved_aside_whole(flags, tmp_path, capsys, left):
    """A folder that holds metrics or a checkpoint counts as the folder of a run."""
    out = tmp_path / "my out"
    flags["out_dir"] = out
    run(flags)
    write_text(out / "mine.txt", "a file of the user's")
    for name in {"checkpoint.pt", "metrics.jsonl"} - {left}:
        (out / name).unlink()
    before = contents(out)
    run(flags, seed=2)
    (aside,) = tmp_path.glob("old-my out-*")
    shown = capsys.readouterr().out
    assert f"{out} held a run, which is in {aside} now" in shown
    assert contents(aside) == {"metrics.jsonl": b""} | before
    assert "mine.txt" not in contents(out)


def test_two_runs_do_not_share_a_folder(flags, tmp_path):
    """A folder that holds no step of a run is used as it is."""
    out = tmp_path / "out"
    out.mkdir()
    first = lock_folder(out, 0)
    write_text(out / "mine.txt", "a file of the user's")
    for name in (out, tmp_path / "." / "out"):
        with pytest.raises(Mistake, match="out is in use by another run"):
            run(flags, out_dir=name)
    assert {*contents(out)} == {"mine.txt", "metrics.jsonl"}
    first.close()
    run(flags)
    assert not list(tmp_path.glob("old-out-*")) and "mine.txt" in contents(out)


def test_a_folder_that_somebody_is_in_is_not_moved_aside(flags, monkeypatch):
    run(flags)
    monkeypatch.chdir(flags["out_dir"])
    before = contents(".")
    for name in (".", flags["out_dir"]):
        with pytest.raises(Mistake, match="holds a run, and you're in it"):
            run(flags, out_dir=name)
    assert contents(".") == before


def test_old_runs_are_moved_aside_under_names_of_their_own(tmp_path):
    for number in range(3):
        with lock_folder(tmp_path / "out", 0) as file:
            file.write(json.dumps({"iteration": 0, "number": number}) + "\n")
    aside = sorted(tmp_path.glob("old-out-*/metrics.jsonl"))
    assert [read_json(path)["number"] for path in aside] == [0, 1]


@pytest.mark.parametrize("place", ["save_checkpoint", "peek"])
def test_a_signal_during_the_last_save_or_look_is_not_lost(flags, monkeypatch, place):
    original = getattr(train_grpo, place)

    def interrupted(*arguments):
        if arguments[-1] == 4:  # the last step
            signal.raise_signal(signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(train_grpo, place, interrupted)
    with pytest.raises(SystemExit, match="143"):
        run(flags)
    out = Path(flags["out_dir"])
    assert read(out / "checkpoint.pt")["training"]["iteration"] == 4
    assert not (out / "evaluation.json").exists()


def test_what_the_parent_ignores_stays_ignored(flags):
    """A shell has a job in the background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Log(Config(**flags), 0, "") as log:
        signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        assert not log.stop_requested()


def test_a_run_may_be_quiet_and_in_a_thread(flags, capsys):
    """A sweep of wandb starts it in one. Python takes signals in its main thread only."""
    with ThreadPoolExecutor(1) as pool:
        run_in_thread = pool.submit(train_grpo.main, command_line(flags, max_iters=1), quiet=True)
    assert run_in_thread.result()["after, sampled"] and not capsys.readouterr().out


def test_a_reader_who_leaves_does_not_end_the_run(flags, monkeypatch):
    """So it is after `| head -1`. What's still in the buffer makes no noise, either."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        run(flags, max_iters=1)


def test_held_out_words_are_not_in_the_lexicon(flags):
    """Only the held-out text has the word zebra."""
    config = Config(**read_arguments(Config, command_line(flags)))
    _, held_out = load_data(config, torch.device("cpu"))
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
def test_what_is_not_finite_changes_no_weight(flags, world, monkeypatch, bad, generator):
    """The error names the step and the tensor. The weights stay those of the last checkpoint."""
    seen = []
    real = train_grpo.grpo_step

    def step(*given):
        seen.append(given)
        if len(seen) == 3:
            spoil(bad, *given[:4])
        return real(*given)

    monkeypatch.setattr(train_grpo, "grpo_step", step)
    with pytest.raises(FloatingPointError, match=f"step 2: {bad} is nan"):
        run(flags, eval_interval=1, generator_checkpoint=world / f"{generator}.pt")
    saved = read(Path(flags["out_dir"]) / "checkpoint.pt")
    assert saved["training"]["iteration"] == 2
    policy, _, _, optimizer, *_ = seen[-1]
    assert same(saved["weights"], dict(policy.network.state_dict()))
    assert same(saved["training"]["optimizer"]["state"], optimizer.wrapped.state_dict()["state"])


def ends_early(flags, capsys, error, **changes):
    """Make a run that raises `error`: -> the one line that it prints on stderr."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(error):
        run(flags | {"eval_interval": 1}, **changes)
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    (line,) = (x for x in capsys.readouterr().err.splitlines() if "the run ends early: " in x)
    return line.partition("the run ends early: ")[2]


def test_a_run_that_ends_early_keeps_its_error_and_says_how_to_resume(
    flags, own, capsys, monkeypatch
):
    """Its reward fails, long before the next checkpoint is due, and then the first look does."""
    reward = f"judge,{own}:tired"
    go_on = f"to resume: python train_grpo.py --init_from=resume --out_dir={flags['out_dir']}"
    line = ends_early(flags, capsys, Mistake, reward=reward, eval_interval=50)
    assert line == f"2 of 4 steps are saved; {go_on} --reward={reward}"

    monkeypatch.setattr(train_grpo, "peek", lambda *_: 1 / 0)
    assert ends_early(flags, capsys, ZeroDivisionError) == "0 of 4 steps are saved"


def test_a_full_disk_is_said_once_and_then_how_to_resume(flags, capsys, monkeypatch):
    """It fills up while step 2 writes its checkpoint."""
    sync, synced = os.fsync, []

    def full(number):
        synced.append(number)
        if len(synced) == 3:  # config.json is the first file, step 2's checkpoint the third
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(number)

    monkeypatch.setattr(os, "fsync", full)
    resume = f"--init_from=resume --out_dir={flags['out_dir']}"
    want = f"No space left on device.*; the run ends early: 1 of 4 steps are saved; .*{resume}"
    with pytest.raises(Mistake, match=want) as stopped:
        run(flags, eval_interval=1)
    assert str(stopped.value).count("No space") == 1
    assert read(Path(flags["out_dir"]) / "checkpoint.pt")["training"]["iteration"] == 1
    assert "Traceback" not in capsys.readouterr().err


def test_a_signal_during_the_table_ends_it(flags, monkeypatch, capsys):
    interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
    monkeypatch.setattr(train_grpo, "evaluate", lambda *_, **__: interrupt())
    line = ends_early(flags, capsys, KeyboardInterrupt, out_dir=f"{flags['out_dir']} of mine")
    again = (
        f"to resume: python train_grpo.py --init_from=resume '--out_dir={flags['out_dir']} of mine'"
    )
    assert line == f"4 of 4 steps are saved; {again}"


# Settings that need a file of their own, or that act over several steps.


def test_rewards_of_the_users_own_and_a_second_judge(flags, own, tmp_path):
    """The weights of an untrained judge's head are 0, so its log-odds are always 0."""
    strict = tmp_path / "strict.pt"
    write(strict, model_file(Judge(TransformerConfig(28, 16, 1, 1, 32))))
    parts = {"judge": 0.5, "few_spaces": 2, "early": -1, strict: 0.25}
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
    assert len(steps) == 4
    for step in steps:
        assert step["grad_norm"] > 0
        assert step["valid"] == pytest.approx(step["reward_valid"])
    assert any(step["valid"] for step in steps)
