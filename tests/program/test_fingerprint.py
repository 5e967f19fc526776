"""Check that a result's fingerprint is of all that made it, and who asks for it."""

import shutil
import sys
from dataclasses import asdict, replace

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
UNUSED_CODE = ["grpo/tools/fill.py", "tests/test_it.py", "model/pretrain.py"]
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


def test_an_edited_reward_sets_runs_apart(files, flags, capsys):
    flags |= {"reward": "mine.py:f", "judge_checkpoint": "", "max_iters": 1}
    run(flags, out_dir="a")
    write_text(files / "mine.py", REWARD + "\n# edited")
    run(flags, out_dir="b", seed=2)
    capsys.readouterr()
    evaluation(["a", "b"])
    shown = capsys.readouterr().out
    made_by = [read_json(files / name / "config.json")["made_by"] for name in "ab"]
    assert made_by[0] != made_by[1]
    assert all(f"made_by={name} (runs: 1)" in shown for name in made_by)
