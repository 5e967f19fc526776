"""Run `python -m grpo.evaluation out` on a run's folder that the tests make without training."""

import json
import re
from dataclasses import asdict

import pytest
import torch
from conftest import command_line, contents, read_json, write_text

from data.user_mistake import Mistake
from grpo.evaluation.__main__ import main
from grpo.evaluation.table import IGNORED
from grpo.run.checkpoint import model_file, read, write
from grpo.run.config import Config
from grpo.run.fingerprint import fingerprint
from model.transformer import TransformerConfig, make_generator


def generator_file(seed):
    torch.manual_seed(seed)
    return model_file(make_generator(TransformerConfig(28, 16, 2, 2, 32)))


@pytest.fixture
def finished(flags, tmp_path):
    """Give a function that makes a run's folder, with changed settings, and returns its path.

    Its table has made-up figures. `after` is the share of valid completions in the end.
    """

    def make(name="run", after=0.5, **changes):
        out = tmp_path / name
        config = Config(**flags | {"out_dir": str(out)} | changes)
        settings, made_by = asdict(config), fingerprint(config)
        training = {"config": settings, "iteration": 4, "made_by": made_by}
        write(out / "checkpoint.pt", generator_file(1) | {"training": training})
        run = {**settings, "rule": "valid", "made_by": made_by}
        write_text(out / "config.json", json.dumps(run))
        table = {"before, sampled": {"valid": 0.1}, "after, sampled": {"valid": after}}
        write_text(out / "evaluation.json", json.dumps(table))
        return out

    return make


@pytest.fixture
def command(capsys):
    """Give a function that runs the command, and returns the lines that it prints, as cells."""

    def call(*arguments):
        main(list(map(str, arguments)))
        return [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]

    return call


def test_what_is_measured_again_is_only_printed(finished, flags, command):
    out = finished()
    own = contents(out)
    first = command(out, "--again")
    for again in ([], ["--again"]):
        assert command(out, f"--reward=judge,{flags['judge_checkpoint']}", *again) != first
    assert contents(out) == own


def test_a_generator_is_measured_as_if_a_run_had_ended_with_it(finished, flags, tmp_path, command):
    table = command(finished(), "--reward=judge")
    write(tmp_path / "mine.pt", generator_file(1))
    before = sorted(tmp_path.rglob("*"))
    have = command(tmp_path / "mine.pt", *command_line(flags))
    rows = [row for row in have if len(row) > 1]
    assert len(rows) > 5 and rows == [row for row in table if len(row) > 1]
    assert sorted(tmp_path.rglob("*")) == before


def test_each_group_of_runs_has_a_row_with_the_settings_that_differ(finished, command):
    """The figures of a group are means over its seeds, ± half of the range."""
    a = [finished(f"a{seed}", after=x, seed=seed) for seed, x in enumerate((0.1, 0.2, 0.6))]
    b = finished("b", after=0.9, kl_beta=0.5, temperature=0.7)
    assert command(a[2], b, a[0], a[1])[1:-1] == [
        ["temperature=0.8, kl_beta=0.1 (runs: 3)", "0.300 ± 0.250"],
        ["temperature=0.7, kl_beta=0.5 (runs: 1)", "0.900"],
    ]


def test_nothing_is_averaged_over_different_settings_or_code(finished, command):
    outs = [finished("a"), finished("b", seed=2)]
    config = read_json(outs[1] / "config.json")
    for name in (*asdict(Config()), "made_by"):
        write_text(outs[1] / "config.json", json.dumps(config | {name: 7}))
        rows = [row[0] for row in command(*outs)[1:3]]
        averaged = rows == ["before, sampled", "after, sampled"]
        assert averaged == (name in IGNORED), name
        assert averaged or rows[1] == f"{name}=7 (runs: 1)"


def test_code_that_a_checkpoint_names_is_not_run(finished, tmp_path, command):
    evil, owned = tmp_path / "evil.py", tmp_path / "owned"
    write_text(
        evil, f"open({str(owned)!r}, 'w')\ndef half(y, batch):\n    return y[..., 0] * 0.5\n"
    )
    reward = f"judge:1.0,{evil}:half:2.0"
    out = finished(reward=reward)
    before = contents(out)
    with pytest.raises(Mistake, match="--reward="):
        command(out, "--again")
    command(out, "--reward=judge")
    assert not owned.exists() and contents(out) == before
    assert command(out, "--again", f"--reward={reward}") and owned.exists()


def test_before_is_what_the_run_began_with_and_after_is_the_checkpoint(finished, tmp_path, command):
    """One run ended with the weights that another began with. Its reference is neither."""
    write(tmp_path / "same.pt", generator_file(1))  # those of the checkpoint
    write(tmp_path / "other.pt", generator_file(7))
    files = {"generator_checkpoint": "same.pt", "reference_checkpoint": "other.pt"}
    files = {name: str(tmp_path / file) for name, file in files.items()}
    tables = []
    reader = "--chain_checkpoint=" + files["generator_checkpoint"]
    for out in finished(), finished("b", reference_mode="ema", **files):
        tables.append({title: cells for title, *cells in command(out, "--again", reader)})
    for row in "sampled", "argmax":
        assert tables[0][f"after, {row}"] == tables[1][f"before, {row}"]


def test_mistakes_write_nothing(finished, command):
    out = finished()
    before = contents(out)
    for wrong in (
        [out, "--reward=x"],
        [out, "--agin"],
        [out, out / "no"],
        [],
        [out, out, "--again"],
    ):
        with pytest.raises((Mistake, FileNotFoundError)):
            command(*wrong)
    assert contents(out) == before


def test_a_run_on_a_device_that_is_not_here_can_be_measured(finished, command):
    """The table needs no reference, so it doesn't matter where that was."""
    out = finished()
    content = read(out / "checkpoint.pt")
    content["training"]["config"] |= {"device": "cuda:99", "reference_device": "cuda:99"}
    write(out / "checkpoint.pt", content)
    with pytest.raises(Mistake, match="cuda:99"):
        command(out, "--again")
    assert command(out, "--again", "--device=cpu")
