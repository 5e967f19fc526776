"""Run `python -m grpo.evaluation out` on a run's folder that the tests make without training."""

import json
from dataclasses import asdict, fields

import pytest
import torch

from grpo.evaluation.__main__ import main
from grpo.evaluation.evaluate import EVALUATION_SEED
from grpo.plumbing.checkpoint import TRAINING_KEYS, model_file, write
from grpo.plumbing.config import Config
from grpo.plumbing.load import load_data
from model.transformer import Generator, TransformerConfig


def generator_file(dataset, seed):
    torch.manual_seed(seed)
    vocabulary = load_data(dataset, 16)[0].vocabulary
    return model_file(Generator(TransformerConfig(len(vocabulary), 16, 1, 2, 32)), vocabulary)


@pytest.fixture
def finished(flags, tmp_path):
    """Give a function that makes a run's folder, with changed settings, and returns its path."""

    def make(**changes):
        out = tmp_path / "run"
        known = {field.name for field in fields(Config)}
        settings = {k: v for k, v in (flags | changes).items() if k in known}
        training = dict.fromkeys(TRAINING_KEYS, {}) | {"config": asdict(Config(**settings))}
        write(out / "checkpoint.pt", generator_file(flags["dataset"], 1) | {"training": training})
        return out

    return make


def files_of(out):
    """Read the files that the command has written, as bytes."""
    names = ("evaluation.json", "completions.jsonl")
    return [(out / name).read_bytes() for name in names if (out / name).exists()]


def test_the_same_table_again_and_another_is_only_printed(finished, capsys):
    out = finished()
    main([str(out), "--again"])
    own = files_of(out)
    first = capsys.readouterr().out
    main([str(out)])
    assert capsys.readouterr().out == first  # it prints the stored table
    json.loads(own[0], parse_constant=pytest.fail)
    for flag in ("--eval_seed=1", "--eval_inputs=5", "--reward=valid_words"):
        main([str(out), flag])
        assert capsys.readouterr().out != first and files_of(out) == own
    main([str(out), f"--eval_seed={EVALUATION_SEED}", "--eval_inputs=8", "--device=cpu", "--again"])
    assert capsys.readouterr().out == first and files_of(out) == own


def test_code_that_a_checkpoint_names_is_not_run(finished, tmp_path, capsys):
    evil = tmp_path / "evil.py"
    evil.write_text(
        f"open({str(tmp_path / 'owned')!r}, 'w').close()\n"
        "def half(completions, masked, mask, decode):\n"
        "    return [[0.5 for _ in row] for row in completions]\n"
    )
    reward = f"judge:1.0,{evil}:half:2.0"
    out = finished(reward=reward)
    with pytest.raises(SystemExit) as stopped:
        main([str(out), "--again"])
    shown = capsys.readouterr()
    assert stopped.value.code == 2 and shown.err.count("\n") == 1
    assert f"--reward={reward}" in shown.err
    main([str(out), "--reward=judge"])
    assert not (tmp_path / "owned").exists() and not files_of(out)
    main([str(out), f"--reward={reward}"])
    assert (tmp_path / "owned").exists()
    assert json.loads(files_of(out)[0])["after_sample"]["reward_half"] == 0.5


def test_before_is_the_generator_that_the_run_began_with(finished, flags, tmp_path):
    out = finished()
    main([str(out), "--again"])
    own = files_of(out)
    write(tmp_path / "other.pt", generator_file(flags["dataset"], 7))
    changes = {"reference_checkpoint": str(tmp_path / "other.pt"), "reference_mode": "ema"}
    main([str(finished(**changes)), "--again"])
    assert files_of(out) == own


@pytest.mark.parametrize(
    "flag", ["--eval_inputs=0", "--eval_seed=-1", "--eval_seed=x", "--device=cuda:9", "--reward=x"]
)
def test_mistakes_exit_2_with_one_line_and_write_nothing(finished, flag, capsys):
    out = finished()
    with pytest.raises(SystemExit) as stopped:
        main([str(out), flag])
    shown = capsys.readouterr()
    assert stopped.value.code == 2 and not shown.out and shown.err.count("\n") == 1
    assert not files_of(out)


def test_a_run_without_a_table_says_how_to_make_one(finished, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([str(finished())])
    shown = capsys.readouterr().err
    assert stopped.value.code == 2 and shown.count("\n") == 1 and "--again" in shown


def test_temperatures_and_judges(finished, flags, capsys):
    """One table has the base model at three temperatures, and another the judges' scores."""
    out = str(finished())
    main([out, "--temperatures"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 1 + 3 and rows[0].startswith("after") and "valid" in head
    main([out, f"--judges={flags['judge_checkpoint']},own"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert rows and all(0 <= float(x) <= 1 for row in rows for x in row.split()[-3:])


def test_a_fresh_judge_cannot_tell_what_has_not_changed(finished, flags, monkeypatch, capsys):
    """The run's generator equals its base model here, so the AUC is the same before and after."""
    monkeypatch.setattr("grpo.evaluation.__main__.FRESH_STEPS", 2)
    monkeypatch.setattr(Config, "judge_checkpoint", flags["judge_checkpoint"])
    out = finished()
    write(out.parent / "same.pt", generator_file(flags["dataset"], 1))
    main([str(finished(generator_checkpoint=str(out.parent / "same.pt"))), "--fresh_judge"])
    before, after, _ = capsys.readouterr().out.splitlines()
    assert before.split()[-1] == after.split()[-1]
