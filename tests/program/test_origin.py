"""Check what a result is said to be made with, and who asks before using it again."""

import shutil

import pytest
from conftest import read_json, run, write_text

from grpo.evaluation.__main__ import main as evaluation
from grpo.run import origin

CODE = '"""What it does."""\n\n\ndef f(x):\n    """Add one."""\n    return x + 1  # one\n'


def test_only_what_a_program_does_counts():
    same = CODE.replace("Add one", "Add 1").replace("  # one", "").replace("\n\n\n", "\n\n\n\n\n")
    other = CODE.replace("x + 1", "x + 2")
    reduced = [origin.code_without_comments(text.encode()) for text in (CODE, same, other)]
    assert reduced[0] == reduced[1] != reduced[2]


def test_a_files_own_neighbors_count_and_other_modules_do_not(tmp_path):
    for file, content in {
        "my.py": "import json\nfrom weights import W\nimport mine.deep\nfrom mine import other\n",
        "weights.py": "import my\nW = 1\n",
        "mine/__init__.py": "",
        "mine/deep.py": "from .table import X\nfrom . import side\n",
        "mine/table.py": "",
        "mine/side.py": "",
        "mine/other.py": "",
        "unused.py": "",
        "json_.py": "",
    }.items():
        write_text(tmp_path / file, content)
    found = origin.with_imports(tmp_path / "my.py")
    names = {str(path.relative_to(tmp_path)) for path in found}
    inside = {f"mine/{name}.py" for name in ("__init__", "deep", "table", "side", "other")}
    assert names == {"my.py", "weights.py", *inside}


def test_differences_are_words():
    before = {"files": {"a.py": "1", "b.py": "2", "c.pt": "3"}, "torch": "2.13"}
    now = {"files": {"a.py": "1", "b.py": "4", "d.py": "5"}, "torch": "2.11"}
    want = ["b.py changed", "d.py is new", "c.pt is gone", "torch 2.13 -> 2.11"]
    assert origin.differences(before, now) == want


REWARD = (
    "from weights import W\n\n\ndef mine(completions, batch):\n    return completions[..., 0] * W\n"
)


@pytest.fixture
def mine(flags, tmp_path, monkeypatch):
    """Make a run on a copy of the text, whose reward imports its neighbor."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(flags["dataset"], tmp_path / "text")
    write_text(tmp_path / "mine.py", REWARD)
    write_text(tmp_path / "weights.py", "W = 1.0\n")
    flags |= {"reward": "mine.py:mine", "judge_checkpoint": "", "max_iters": 1}
    flags["dataset"] = tmp_path / "text"
    run(flags)
    return flags


def change_weights(tmp_path):
    write_text(tmp_path / "weights.py", "W = 2.0\n")


def test_resuming_says_what_changed(mine, tmp_path, capsys):
    change_weights(tmp_path)
    write_text(tmp_path / "text" / "train.txt", "the cat sat on a mat")
    run(mine, init_from="resume", max_iters=2)
    changed = [f"{tmp_path}/text/train.txt changed", "weights.py changed"]
    assert ", ".join(changed) in capsys.readouterr().out
    config = read_json(tmp_path / "out" / "config.json")
    assert config["changes"] == [[1, ["max_iters 1 -> 2", *changed]]]


def test_a_table_is_not_measured_again_with_something_else(mine, tmp_path, capsys):
    table = tmp_path / "out" / "evaluation.json"
    for change, saved in ((None, True), (change_weights, False)):
        write_text(table, "{}")
        if change:
            change(tmp_path)
        evaluation(["out", "--again", "--reward=mine.py:mine"])
        printed = capsys.readouterr().out
        assert ("not saved" in printed) != saved and ("weights.py changed" in printed) != saved
        assert (table.read_text(encoding="utf-8") != "{}") == saved


def test_runs_of_different_rewards_are_not_averaged(mine, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    change_weights(tmp_path)
    run(mine, out_dir=tmp_path / "other", seed=2)
    capsys.readouterr()
    evaluation(["out", "other"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:3]] == [
        "weights.py (version 1), out (runs: 1)",
        "weights.py (version 2), other (runs: 1)",
    ]
