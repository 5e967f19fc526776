"""Check what a run writes, how it treats its folder, and how it ends if something fails."""

import io
import json
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import command_line, run, same
from tqdm import tqdm

import train_grpo
from data.dataset import Dataset
from grpo.evaluation import evaluate
from grpo.evaluation.rivals import best_by_word
from grpo.plumbing.checkpoint import model_file, read, write
from grpo.plumbing.config import load_config
from grpo.plumbing.log import BAR, SHOWN, Clock, Log, Signals
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
    for line in ("step 0: valid words", "after, sampled", "mean_reward   ", "▁"):
        assert line in shown
    assert f"python -m grpo.evaluation {out} " in shown
    assert f"--run={out}\n" in shown
    assert re.search(r"^the steps took \d+ s, the table \d+ s$", shown, re.MULTILINE)


def test_three_texts_are_shown_that_can_clash(flags, capsys):
    """At step 0 the policy is still the base model, so the texts have no line `now`."""
    run(flags, eval_interval=2, eval_inputs=64, hidden_words=1, masking="word")
    shown = capsys.readouterr().out.split("filled by")[0]
    zero, two, four = (part.splitlines() for part in shown.split("step ")[1:])
    assert [line.split()[0] for line in zero] == ["0:", *["text", "before"] * 3]
    for lines in (two, four):
        assert [line.split()[0] for line in lines[1:]] == ["text", "before", "now"] * 3
    hidden = [len(re.search(r"\[(\w+)\]", line)[1]) for line in zero if "text" in line[:9]]
    assert hidden == [6, 6, 3]  # `number` is the longest word, and two of the inputs hide it


def test_the_bar_fits_into_80_columns():
    """The bar shows its longest numbers and times."""
    options = {"bar_format": BAR, "ncols": 80, "file": io.StringIO(), "ascii": True}
    bar = tqdm(desc="GRPO", total=1000, initial=100, **options)
    bar.set_postfix({name: "-12.345" for name in SHOWN}, refresh=False)
    line = bar.format_meter(**bar.format_dict | {"elapsed": 36000, "n": 200})
    assert len(line) == 80 and "200/1000" in line and line.endswith("kl=-12.345]"), line
    bar.close()


def test_what_a_step_does_is_timed(flags):
    run(flags, reward="judge,valid_words")
    lines = (Path(flags["out_dir"]) / "metrics.jsonl").read_text().splitlines()
    times = {name for name in json.loads(lines[0]) if name.endswith("_ms")}
    parts = {"data_ms", "policy_ms", "reference_ms", "judge_ms", "rest_ms"}
    assert parts | {"step_ms"} == times


# The folder.


@pytest.mark.parametrize("left", ["checkpoint.pt", "checkpoint_prev.pt", "metrics.jsonl", ""])
def test_the_folder_of_an_earlier_run_is_moved_aside_whole(flags, tmp_path, capsys, left):
    """A folder that holds metrics or a checkpoint counts as the folder of a run."""
    run(flags, save_interval=2)
    out = tmp_path / "out"
    (out / "mine.txt").write_text("a file of the user's")
    for name in {"checkpoint.pt", "checkpoint_prev.pt", "metrics.jsonl"} - {left}:
        if left:
            (out / name).unlink()
    before = files(out)
    run(flags, seed=2)
    (aside,) = tmp_path.glob("out-until-*")
    assert f"{out} held a run: it is in {aside} now" in capsys.readouterr().out
    assert files(aside) == before | ({} if "metrics.jsonl" in before else {"metrics.jsonl": b""})
    assert "mine.txt" not in files(out)


def test_a_folder_that_holds_no_run_is_used_as_it_is(flags, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("a file of the user's")
    for _ in range(2):  # a run that took no step is not moved aside either
        start_log(flags).close(failed=True)
    assert not list(tmp_path.glob("out-until-*")) and (tmp_path / "out" / "mine.txt").exists()


def start_log(flags):
    """Open the folder of a run, as a run does after its last mistake could be found."""
    config = load_config(command_line(flags))
    return Log(config, 0, Clock(torch.device("cpu")))


def test_two_runs_do_not_share_a_folder(flags, tmp_path, capsys):
    first = start_log(flags)
    for changes in ({"seed": 2}, {"out_dir": tmp_path / "." / "out"}):
        with pytest.raises(SystemExit) as end:
            run(flags, **changes)
        assert end.value.code == 2
        assert "out is in use by another run, or cannot be written" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "config.json").read_text())["seed"] == 1
    first.close(failed=False)
    run(flags, seed=2)


# Runs in which something fails.


def spoil(monkeypatch, bad):
    """Turn the logits, rewards or gradient that `bad` names into NaN from step 2 on.

    Returns a list to which each step adds the policy and the optimizer.
    """

    def nan(x):
        return x * float("nan")

    def spoiled(batch, policy):
        q = policy(batch)
        name = "letters" if hasattr(q, "letters") else "logits"
        setattr(q, name, nan(getattr(q, name)))
        return q

    def step(policy, reference, rewards, optimizer, batch, config):
        seen.append((policy, optimizer))
        if len(seen) == 3 and bad == "gradient":
            optimizer.parameters[0].register_hook(nan)
        elif len(seen) == 3 and bad == "judge":
            function, weight = rewards.parts["judge"]
            rewards.parts["judge"] = (lambda *given: nan(function(*given)), weight)
        elif len(seen) == 3 and bad == "policy":
            policy = partial(spoiled, policy=policy)
        elif len(seen) == 3:
            reference = partial(spoiled, policy=reference)
        return real(policy, reference, rewards, optimizer, batch, config)

    seen = []
    real = train_grpo.grpo_step
    monkeypatch.setattr(train_grpo, "grpo_step", step)
    return seen


@pytest.mark.parametrize("generator", ["generator", "latent"])
@pytest.mark.parametrize(
    "bad, named",
    [
        ("policy", "the generator's logits (entropy=nan)"),
        ("reference", "the reference's logits (mean_kl=nan)"),
        ("judge", "the rewards (mean_reward=nan)"),
        ("gradient", "the gradient (grad_norm=nan)"),
    ],
)
def test_what_is_not_finite_changes_no_weight(
    flags, world, capsys, monkeypatch, generator, bad, named
):
    """The error names the step and the tensor. The weights stay those of the last checkpoint."""
    path = world / f"{generator}.pt"
    seen = spoil(monkeypatch, bad)
    with pytest.raises(SystemExit) as end:
        run(flags, save_interval=1, generator_checkpoint=path)
    assert end.value.code == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"train_grpo.py: step 2: not finite: {named}")
    saved = read(Path(flags["out_dir"]) / "checkpoint.pt")
    assert saved["training"]["iteration"] == 2
    policy, optimizer = seen[-1]
    assert same(saved["weights"], dict(policy.network.state_dict()))
    assert same(saved["training"]["optimizer"]["state"], optimizer.adamw.state_dict()["state"])


def test_an_error_in_a_users_own_reward_says_where_and_how_to_go_on(flags, own, capsys):
    """The traceback of the user's file comes first, and the line that helps comes last."""
    reward = f"judge,{own}:tired"
    with pytest.raises(SystemExit) as end:
        run(flags, reward=reward, save_interval=1)
    assert end.value.code == 2
    *above, last = capsys.readouterr().err.splitlines()
    assert last.startswith("train_grpo.py: step 2: reward tired failed: RuntimeError: too tired;")
    go_on = f"2 of 4 steps are saved; to go on: --init_from=resume --out_dir={flags['out_dir']}"
    assert f"{go_on} --reward={reward}, for the table" in last
    frames = re.findall(r'File "(.*)", line \d+, in (\w+)', "\n".join(above))
    assert frames == [(str(own), "tired"), (str(own), "sleep")]
    assert above[-1] == "RuntimeError: too tired"


def test_an_error_of_the_program_keeps_its_traceback(flags, monkeypatch, capsys):
    monkeypatch.setattr(train_grpo, "update_reference", lambda *_: 1 / 0)
    with pytest.raises(SystemExit) as end:
        run(flags)
    assert end.value.code == 1
    *above, last = capsys.readouterr().err.splitlines()
    assert above[-1].startswith("ZeroDivisionError") and "nothing was saved yet" in last


def test_a_signal_during_the_table_ends_it_at_the_next_row(flags, monkeypatch, capsys):
    def stopped(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        return best_by_word(*given)

    monkeypatch.setattr(evaluate, "best_by_word", stopped)
    monkeypatch.setattr(evaluate, "fill_blank_by_blank", None)
    with pytest.raises(SystemExit) as end:
        run(flags)
    assert end.value.code == 128 + signal.SIGTERM
    line = capsys.readouterr().err.splitlines()[-1]
    again = f"for the table: python -m grpo.evaluation {flags['out_dir']} --again"
    assert line == f"train_grpo.py: step 3: stopped by SIGTERM; 4 of 4 steps are saved; {again}"


def test_a_signal_that_is_ignored_stays_so(monkeypatch):
    """nohup makes a program ignore SIGHUP, and a run has to leave that as it is."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals():
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    signal.signal(signal.SIGHUP, before)


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint(flags, monkeypatch, capsys):
    real = os.fsync
    syncs = []

    def full(number):
        syncs.append(number)
        if len(syncs) == 4:  # the fourth file is step 2's checkpoint
            raise OSError(28, "No space left on device")
        real(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as end:
        run(flags, save_interval=1)
    assert end.value.code == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "step 1: OSError: [Errno 28] No space left on device; 1 of 4 steps are saved" in line
    assert read(Path(flags["out_dir"]) / "checkpoint.pt")["training"]["iteration"] == 1


# Settings that need a file of their own, or that act over several steps.


@pytest.mark.parametrize("judge_score, undecided", [("log_odds", 0), ("probability", 0.5)])
def test_rewards_of_the_users_own_and_a_second_judge(
    flags, own, world, tmp_path, judge_score, undecided
):
    """The weights of an untrained judge's head are 0, so the second score is always `undecided`."""
    vocabulary = Dataset(world / "text", "train", 16).vocabulary
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
    """The first step has the peak rate, 1e-2. A cosine then lowers it, to reach 0 after 4 steps."""
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
