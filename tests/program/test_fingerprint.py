"""Check that a result's fingerprint is of all that made it, and who asks for it."""

import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import read_json, run, write_text

from grpo import distributed
from grpo.evaluation.__main__ import main as evaluation
from grpo.run import fingerprint
from grpo.run.config import Config
from grpo.run.load import load_function

REWARD = "import parts.sub\n\ndef f(y, batch):\n    return y[..., 0] * parts.sub.W\n"
USED = ["mine.py", "parts/__init__.py", "parts/sub.py", "text/train.txt", "text/choose.txt"]
USED += ["generator.pt", "latent.pt", "judge.pt", "other.pt", "p.json"]
CODE = ["train_grpo.py", "grpo/advantage.py", "grpo/kernel.cu", "grpo/run/load.py", "data/rules.py"]
UNUSED = ["text/val.txt", "parts/other.py"]
UNUSED_CODE = ["grpo/one_file.py", "grpo/tools/fill.py", "tests/test_it.py", "model/pretrain.py"]
USED += [f"project/{name}" for name in CODE]
UNUSED += [f"project/{name}" for name in UNUSED_CODE]


@pytest.fixture
def files(world, tmp_path, monkeypatch):
    """Write a project, and all that settings can name: -> the folder, which is the working one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copytree(world, tmp_path, dirs_exist_ok=True)
    for name in (*USED, *UNUSED):
        if not name.endswith(".pt"):
            write_text(tmp_path / name, REWARD if name == "mine.py" else "W = 1")
    yield tmp_path
    for name in "mine", "parts", "parts.sub":
        sys.modules.pop(name, None)


def test_it_changes_with_the_code_and_with_every_file_that_the_settings_name(files, monkeypatch):
    """Also with what a reward has loaded from its folder, and with half of the held-out data."""
    monkeypatch.setattr(fingerprint, "PROJECT", files / "project")
    config = Config(
        dataset=f"{files}/text",
        held_out="choose",
        generator_checkpoint="generator.pt",
        reference_checkpoint="latent.pt",
        judge_checkpoint="judge.pt",
        reward="other.pt,mine.py:f:0.5",
        prompts_file="p.json",
        device="cpu",
    )
    load_function("mine.py", "f")  # as a run does
    before = fingerprint.fingerprint(config)
    changed = set()
    for name in (*USED, *UNUSED):
        whole = (files / name).read_bytes()
        (files / name).write_bytes(whole + b" ")
        if fingerprint.fingerprint(config) != before:
            changed.add(name)
        (files / name).write_bytes(whole)
    assert changed == {*USED}
    assert fingerprint.fingerprint(replace(config, seed=2, kl_beta=0.0)) == before
    monkeypatch.setattr(distributed, "PROCESSES", 2)  # a step has twice as many inputs
    assert fingerprint.fingerprint(config) != before


def test_what_is_installed_is_not_a_part_of_a_reward_in_a_folder_around_it():
    mine = Path(sys.base_prefix).parent / "mine.py"
    assert fingerprint.loaded_with(str(mine)) == [mine]


def test_a_run_that_is_resumed_with_something_else_has_another_history(files):
    config = Config(judge_checkpoint="", device="cpu")
    new = fingerprint.made_by(config, None)

    def resumed(step, made_by=new, **changes):
        before = {"config": asdict(config), "made_by": made_by, "iteration": step}
        return fingerprint.made_by(replace(config, **changes), before)

    assert resumed(5) == resumed(5, out_dir="copy", init_from="resume") == new
    others = resumed(5, kl_beta=0.0), resumed(5, kl_beta=0.0, out_dir="b"), resumed(5, "other")
    assert new not in others and others[0] != others[1]
    assert resumed(5, others[0]) == others[0]


def test_an_edited_reward_sets_runs_apart_and_its_table_is_not_measured_again(
    files, flags, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    flags |= {"reward": "mine.py:f", "judge_checkpoint": "", "max_iters": 1}
    run(flags, out_dir="a")
    table = files / "a" / "evaluation.json"
    for edited in (False, True):
        table.write_text("{}", encoding="utf-8")
        if edited:
            write_text(files / "parts" / "sub.py", "W = 2")
            del sys.modules["parts"], sys.modules["parts.sub"]
        evaluation(["a", "--again", "--reward=mine.py:f"])
        assert ("not saved" in capsys.readouterr().out) == edited
        assert (table.read_text(encoding="utf-8") == "{}") == edited
    run(flags, out_dir="b", seed=2)
    shutil.copy(files / "b" / "evaluation.json", table)
    capsys.readouterr()
    evaluation(["a", "b"])
    made_by = [read_json(files / name / "config.json")["made_by"] for name in "ab"]
    shown = capsys.readouterr().out
    for name in made_by:
        assert f"made_by={name} (runs: 1)" in shown
    assert made_by[0] != made_by[1]
