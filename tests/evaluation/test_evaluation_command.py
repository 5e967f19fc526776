"""Run `python -m grpo.evaluation out` on a run's folder that the tests make without training."""

import json
from dataclasses import asdict

import pytest
import torch

from grpo.evaluation.__main__ import main
from grpo.evaluation.evaluate import EVALUATION_SEED
from grpo.plumbing.checkpoint import model_file, write
from grpo.plumbing.config import Config
from model.transformer import Generator, TransformerConfig


def generator_file(seed):
    torch.manual_seed(seed)
    return model_file(Generator(TransformerConfig(28, 16, 1, 2, 32)))


@pytest.fixture
def finished(flags, tmp_path):
    """Give a function that makes a run's folder, with changed settings, and returns its path."""

    def make(name="run", **changes):
        out = tmp_path / name
        settings = asdict(Config(**flags | {"out_dir": str(out)} | changes))
        training = {"config": settings, "iteration": 4}
        write(out / "checkpoint.pt", generator_file(1) | {"training": training})
        write(out / "config.json", json.dumps(settings).encode())
        return out

    return make


def files_of(out):
    """Read the files that the command has written, as bytes."""
    names = ("evaluation.json", "completions.jsonl")
    return [(out / name).read_bytes() for name in names if (out / name).exists()]


def refused(capsys, *arguments):
    """Run a command that must be refused: -> its one line on stderr."""
    with pytest.raises(SystemExit) as stopped:
        main(list(map(str, arguments)))
    shown = capsys.readouterr()
    assert stopped.value.code == 2 and not shown.out and shown.err.count("\n") == 1
    return shown.err


def test_the_same_table_again_and_another_is_only_printed(finished, flags, capsys):
    out = finished()
    main([str(out), "--again"])
    own = files_of(out)
    first = capsys.readouterr().out
    main([str(out)])
    assert capsys.readouterr().out == first  # it prints the stored table
    json.loads(own[0], parse_constant=pytest.fail)
    for flag in ("--eval_seed=1", f"--reward=judge,{flags['judge_checkpoint']}"):
        main([str(out), flag])
        assert capsys.readouterr().out != first and files_of(out) == own
    main([str(out), f"--eval_seed={EVALUATION_SEED}", "--device=cpu", "--again"])
    assert capsys.readouterr().out == first and files_of(out) == own


def test_runs_stand_side_by_side(finished, flags, capsys):
    """The settings that differ come first, then the rows before and after of each run."""
    judge = flags["judge_checkpoint"]
    reward = f"judge,{judge}"
    outs = [
        str(finished(reward=reward)),
        str(finished("b", reward=reward, kl_beta=0.5, temperature=0.7)),
    ]
    for out in outs:
        main([out, "--again"])
    capsys.readouterr()
    main(outs)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:3] == [
        ["group", "temperature", "kl_beta", "runs"],
        ["1", "0.8", "0.1", outs[0]],
        ["2", "0.7", "0.5", outs[1]],
    ]
    assert lines[4][-2:] == ["judge", judge]  # the columns of the reward
    rows = [line[:3] for line in lines[5:9]]
    both = [["before,", "sampled"], ["after,", "sampled"]]
    assert rows == [[f"{group}:", *title] for title in both for group in (1, 2)]


def test_code_that_a_checkpoint_names_is_not_run(finished, tmp_path, capsys):
    evil = tmp_path / "evil.py"
    evil.write_text(
        f"open({str(tmp_path / 'owned')!r}, 'w').close()\n"
        "def half(completions, masked, mask, decode):\n"
        "    return [[0.5 for _ in row] for row in completions]\n"
    )
    reward = f"judge:1.0,{evil}:half:2.0"
    out = finished(reward=reward)
    assert f"--reward={reward}" in refused(capsys, out, "--again")
    main([str(out), "--reward=judge"])
    assert not (tmp_path / "owned").exists() and not files_of(out)
    main([str(out), f"--reward={reward}"])
    assert (tmp_path / "owned").exists() and files_of(out)  # the run's own reward, so it is saved
    assert " half" in capsys.readouterr().out


def test_before_is_the_generator_that_the_run_began_with(finished, tmp_path):
    out = finished()
    main([str(out), "--again"])
    own = files_of(out)
    write(tmp_path / "other.pt", generator_file(7))
    changes = {"reference_checkpoint": str(tmp_path / "other.pt"), "reference_mode": "ema"}
    main([str(finished(**changes)), "--again"])
    assert files_of(out) == own


def test_mistakes_exit_2_with_one_line_and_write_nothing(finished, capsys):
    out = finished()
    for flag in ("--eval_seed=-1", "--device=cuda:9", "--reward=x", "--agin"):
        line = refused(capsys, out, "--again", flag)
        assert flag.partition("=")[0].strip("-") in line
    assert "--again" in refused(capsys, out)  # a run without a table says how to make one
    assert "name only one" in refused(capsys, out, out, "--again")
    assert not files_of(out)
