"""`python -m grpo.evaluation out`, with the folder of a run that was never run."""

import json
from dataclasses import asdict, fields

import pytest
import torch
from grpo.plumbing.setup import load_data

from grpo.evaluation.__main__ import main
from grpo.evaluation.evaluate import EVALUATION_SEED
from grpo.plumbing.checkpoint import model_file, write
from grpo.plumbing.config import Config
from model.transformer import Generator, TransformerConfig


def generator_file(dataset, seed):
    torch.manual_seed(seed)
    vocabulary = load_data(dataset, 16)[0].vocabulary
    return model_file(Generator(TransformerConfig(len(vocabulary), 16, 1, 2, 32)), vocabulary)


@pytest.fixture
def finished(flags, tmp_path):
    """A function that makes the folder of a run from changes of its settings -> the folder."""

    def make(**changes):
        out = tmp_path / "run"
        known = {field.name for field in fields(Config)}
        settings = {k: v for k, v in (flags | changes).items() if k in known}
        training = {"optimizer": {}, "iteration": 1, "config": asdict(Config(**settings))}
        write(out / "checkpoint.pt", generator_file(flags["dataset"], 1) | {"training": training})
        return out

    return make


def files_of(out):
    """What the command writes, as bytes."""
    names = ("evaluation.json", "completions.jsonl")
    return [(out / name).read_bytes() for name in names if (out / name).exists()]


def test_the_same_table_again_and_another_is_only_printed(finished, capsys):
    out = finished()
    main([str(out)])
    own = files_of(out)
    first = capsys.readouterr().out
    json.loads(own[0], parse_constant=pytest.fail)
    for flag in ("--eval_seed=1", "--eval_inputs=5", "--reward=valid_words"):
        main([str(out), flag])
        assert capsys.readouterr().out != first and files_of(out) == own
    main([str(out), f"--eval_seed={EVALUATION_SEED}", "--eval_inputs=8", "--device=cpu"])
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
        main([str(out)])
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
    main([str(out)])
    own = files_of(out)
    write(tmp_path / "other.pt", generator_file(flags["dataset"], 7))
    changes = {"reference_checkpoint": str(tmp_path / "other.pt"), "reference_mode": "ema"}
    main([str(finished(**changes))])
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
