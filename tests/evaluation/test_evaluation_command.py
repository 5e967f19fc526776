"""Run `python -m grpo.evaluation out` on a run's folder that the tests make without training."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import contents, read_json, write_text

from grpo.evaluation.__main__ import main
from grpo.run.checkpoint import model_file, read, write
from grpo.run.config import Config
from grpo.run.origin import made_with
from grpo.run.runs import IGNORED
from model.transformer import TransformerConfig, make_generator


def generator_file(seed):
    torch.manual_seed(seed)
    return model_file(make_generator(TransformerConfig(28, 16, 2, 2, 32)))


@pytest.fixture
def finished(flags, tmp_path):
    """Give a function that makes a run's folder, with changed settings, and returns its path."""

    def make(name="run", **changes):
        out = tmp_path / name
        config = Config(**flags | {"out_dir": str(out)} | changes)
        settings, origin = asdict(config), {"made_with": made_with(config)}
        training = {"config": settings, "iteration": 4, **origin}
        write(out / "checkpoint.pt", generator_file(1) | {"training": training})
        write_text(out / "config.json", json.dumps({**settings, "rule": "valid", **origin}))
        return out

    return make


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
    own = contents(out)
    first = capsys.readouterr().out
    main([str(out)])
    assert capsys.readouterr().out == first  # it prints the stored table
    json.loads(own["evaluation.json"], parse_constant=pytest.fail)
    for again in ([], ["--again"]):
        main([str(out), f"--reward=judge,{flags['judge_checkpoint']}", *again])
        assert capsys.readouterr().out != first and contents(out) == own


def test_a_generator_is_measured_as_if_a_run_had_ended_with_it(finished, flags, tmp_path, capsys):
    out = finished()
    main([str(out), "--reward=judge"])
    table = capsys.readouterr().out.splitlines()
    write(tmp_path / "mine.pt", generator_file(1))
    settings = "".join(f"{name} = {value!r}\n" for name, value in flags.items())
    write_text(tmp_path / "mine.py", settings)
    before = sorted(tmp_path.rglob("*"))
    main([str(tmp_path / "mine.pt"), str(tmp_path / "mine.py")])
    fooled = "the judge accepts much more than is valid: it's being fooled"
    assert fooled in table  # it isn't for a generator that never met the judge
    table.remove(fooled)
    assert capsys.readouterr().out.splitlines() == table
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def with_table(finished):
    """Give a function that makes a finished run whose table has made-up figures.

    `after` is its share of valid completions in the end.
    """

    def make(name, after=0.5, **changes):
        out = finished(name, **changes)
        table = {"before, sampled": {"valid": 0.1}, "after, sampled": {"valid": after}}
        write_text(out / "evaluation.json", json.dumps(table))
        return str(out)

    return make


def printed(capsys, *arguments):
    """Run the command, and return the lines that it prints, split into cells."""
    main(list(map(str, arguments)))
    return [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]


MEAN = ["mean ± half the range over the seeds"]


def test_each_group_of_runs_has_a_row_with_the_settings_that_differ(with_table, capsys):
    """The figures of a group are means over its seeds, ± half of the range."""
    a = [with_table(f"a{seed}", after=x, seed=seed) for seed, x in enumerate((0.1, 0.2, 0.6))]
    b = with_table("b", after=0.9, kl_beta=0.5, temperature=0.7)
    assert printed(capsys, a[2], b, a[0], a[1]) == [
        ["filled by", "valid"],
        ["temperature=0.8, kl_beta=0.1 (runs: 3)", "0.300 ± 0.250"],
        [f"temperature=0.7, kl_beta=0.5, {b} (runs: 1)", "0.900"],
        MEAN,
    ]


def edit_config(out, **changes):
    path = Path(out) / "config.json"
    write_text(path, json.dumps(read_json(path) | changes))


def test_nothing_is_averaged_over_different_settings(with_table, capsys):
    outs = [with_table("a"), with_table("b", seed=2)]
    config = read_json(Path(outs[1]) / "config.json")
    for name in asdict(Config()):
        edit_config(outs[1], **config | {name: 7})
        rows = printed(capsys, *outs)
        if name in IGNORED:
            assert rows[1][0] == "before, sampled"
        else:
            assert [row[0] for row in rows[1:-1]] != ["before, sampled", "after, sampled"]
            assert rows[2][0] == f"{name}=7, {outs[1]} (runs: 1)"


def test_a_resumed_run_is_grouped_by_what_it_changed_and_when(with_table, capsys):
    """Seed 2 was resumed as it was. Two others changed to the same value, but at other steps."""
    outs = [with_table(f"{seed}", seed=seed) for seed in (1, 2, 3, 4, 5)]
    for out in outs:
        edit_config(out, changes=[])
    edit_config(outs[1], init_from="resume", out_dir="elsewhere")
    same = printed(capsys, *outs[:3])
    assert [row[0] for row in same] == ["filled by", "before, sampled", "after, sampled", *MEAN]
    for step, out in ((1, outs[3]), (2, outs[4])):
        edit_config(out, kl_beta=0.3, changes=[[step, ["kl_beta 0.1 -> 0.3"]]])
    rows = printed(capsys, *outs)
    assert [row[0].rpartition(" (")[2] for row in rows[1:-1]] == [f"runs: {n})" for n in (3, 1, 1)]


def test_a_run_counts_once_and_needs_a_folder(with_table, capsys):
    a, b = with_table("a", after=0.2), with_table("b", after=0.2, seed=2)
    copy = with_table("c", after=0.2)
    other = with_table("d", kl_beta=0.3)
    (line,), _, (row, _), *_ = printed(capsys, a, b, copy, a, other)
    assert line == f"{copy} and {a} are the same run, so it counts once"
    assert row == "kl_beta=0.1 (runs: 2)"
    assert "there is no folder nowhere" in refused(capsys, a, "nowhere")


def test_a_named_run_is_never_dropped(with_table, capsys):
    """Two runs with one seed but another result have rows of their own, with their folders."""
    a, b = with_table("a", after=0.2), with_table("b", after=0.3)
    assert [row[0] for row in printed(capsys, a, b)[1:-1]] == [f"{x} (runs: 1)" for x in (a, b)]
    for out, changed in ((a, "3f2a"), (b, "9c01")):
        edit_config(out, made_with={"files": {"grpo/loss.py": changed}, "machine": changed})
    assert [row[0] for row in printed(capsys, a, b)[1:-1]] == [
        f"machine=3f2a, grpo/loss.py (version 1), {a} (runs: 1)",
        f"machine=9c01, grpo/loss.py (version 2), {b} (runs: 1)",
    ]


def test_a_mean_over_some_of_the_runs_says_so(with_table, capsys):
    """Rows that only some of them have are left out."""
    outs = [with_table(str(i), seed=i) for i in range(3)]
    path = Path(outs[0]) / "evaluation.json"
    table = read_json(path) | {"slow": {}}
    table["after, sampled"]["fooled"] = 0.5
    write_text(path, json.dumps(table))
    _, before, after, mean = printed(capsys, *outs)
    assert before == ["before, sampled", "0.100"] and mean == MEAN
    assert after == ["after, sampled", "0.500", "0.500 (1 of 3)"]


def test_code_that_a_checkpoint_names_is_not_run(finished, tmp_path, capsys):
    evil, owned = tmp_path / "evil.py", tmp_path / "owned"
    write_text(
        evil,
        f"open({str(owned)!r}, 'w').close()\n"
        "def half(completions, batch):\n"
        "    return [[0.5 for _ in row] for row in completions]\n",
    )
    reward = f"judge:1.0,{evil}:half:2.0"
    out = finished(reward=reward)
    before = contents(out)
    assert f"--reward={reward}" in refused(capsys, out, "--again")
    main([str(out), "--reward=judge"])
    assert not owned.exists() and contents(out) == before
    main([str(out), "--again", f"--reward={reward}"])
    assert owned.exists() and contents(out) != before  # the run's own reward, so it is saved
    assert " half" in capsys.readouterr().out


def test_before_is_the_generator_that_the_run_began_with_and_after_is_the_checkpoint(
    finished, tmp_path
):
    """One run ended with the weights that another began with. Its reference is neither."""
    files = {}
    for name, seed in {"reference": 7, "generator": 1}.items():  # 1 is that of the checkpoint
        write(tmp_path / f"{name}.pt", generator_file(seed))
        files[f"{name}_checkpoint"] = str(tmp_path / f"{name}.pt")
    tables = []
    for out in finished(), finished("b", reference_mode="ema", **files):
        main([str(out), "--again"])
        tables.append(read_json(out / "evaluation.json"))
        for row in tables[-1].values():
            del row["chain"]  # it's how likely the base model finds a row, and they have two
    for row in "sampled", "argmax":
        assert tables[0][f"after, {row}"] == tables[1][f"before, {row}"]


def test_mistakes_exit_2_with_one_line_and_write_nothing(finished, capsys):
    out = finished()
    before = contents(out)
    for flag in ("--reward=x", "--agin"):
        line = refused(capsys, out, "--again", flag)
        assert flag.partition("=")[0].strip("-") in line
    assert "--again" in refused(capsys, out)  # a run without a table says how to make one
    assert contents(out) == before


def test_a_run_on_a_device_that_is_not_here_can_be_measured(finished, capsys):
    """The table needs no reference, so it doesn't matter where that was."""
    out = finished()
    content = read(out / "checkpoint.pt")
    content["training"]["config"] |= {"device": "cuda:99", "reference_device": "cuda:99"}
    write(out / "checkpoint.pt", content)
    assert "device=cuda:99 isn't on this machine" in refused(capsys, out, "--again")
    main([str(out), "--again", "--device=cpu"])
    assert "evaluation.json" in contents(out) and "after, sampled" in capsys.readouterr().out
