"""Check settings from files and flags. test_mistakes.py checks those that a user gets wrong."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import run

import train_grpo
from data.text.prepare import prepare
from data.user_mistake import Mistake
from grpo.plumbing import checkpoint, log
from grpo.plumbing.checkpoint import read
from grpo.plumbing.config import Config, from_saved, load_config


def test_files_and_flags_apply_left_to_right(tmp_path):
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("group_size = 32\nkl_beta = 1")
    second.write_text("group_size = 64")
    assert load_config([str(first), str(second)]).group_size == 64
    config = load_config(["--kl_beta=0.9", str(first), "--group_size=4"])
    assert (config.group_size, config.kl_beta) == (4, 1.0)


def test_a_value_takes_the_type_of_its_setting(tmp_path):
    (tmp_path / "a.py").write_text("learning_rate = 1\ncompile = True")
    flags = ["--wandb_run_name=123", "--wandb_log=True", "--min_lr=1e-4", "--out_dir=a=b"]
    config = load_config([str(tmp_path / "a.py"), *flags])
    assert type(config.learning_rate) is float
    assert (config.compile, config.wandb_run_name, config.wandb_log) == ("true", "123", True)
    assert (config.min_lr, config.out_dir) == (1e-4, "a=b")


def test_a_name_that_begins_with_an_underscore_is_the_files_own(tmp_path):
    (tmp_path / "a.py").write_text(
        "from math import floor as _floor\n_half = 0.5\ngroup_size = _floor(9 * _half)"
    )
    assert load_config([str(tmp_path / "a.py")]).group_size == 4


def test_the_defaults_are_the_default_experiment():
    assert load_config([]) == Config() == load_config(["config/grpo_config.py"])


def test_what_ships_is_found_wherever_one_stands(tmp_path, monkeypatch, flags, capsys):
    """A run starts outside the code's folder, so the commands that it prints set PYTHONPATH."""
    own = {"prompts_file": "prompts.json", "dataset": "text", "reward": "judge,vowels.py:vowels"}
    files = {
        "prompts.json": '{"prompts": ["a_"]}',
        "vowels.py": Path("data/vowel_reward.py").read_text(),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    prepare(tmp_path / "data" / "text", Path(flags["dataset"]).with_name("text.txt"))
    monkeypatch.setattr(checkpoint, "ROOT", tmp_path)  # as if the code were there
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run(flags, out_dir="out", max_iters=1, **own)
    assert [path.name for path in Path().iterdir()] == ["out"]
    assert read("out/checkpoint.pt")["training"]["iteration"] == 1
    assert f"  PYTHONPATH={log.ROOT} python -m grpo.evaluation out" in capsys.readouterr().out


def test_a_shorter_run_is_all_warm_up():
    assert load_config(["--max_iters=3"]).warmup_iters == 3
    assert load_config(["--max_iters=6"]).warmup_iters == 5


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_shows_each_setting_as_it_stands_in_the_class_with_its_value(tmp_path, capsys, flag):
    (tmp_path / "a.py").write_text("group_size = 32")
    with pytest.raises(SystemExit) as end:
        train_grpo.main([str(tmp_path / "a.py"), "--out_dir=x", flag])
    lines = capsys.readouterr().out.splitlines()
    assert not end.value.code
    for name in vars(Config()):
        assert sum(line.startswith(f"    {name}: ") for line in lines) == 1
    assert "    group_size: int = 32  # completions per input, G" in "\n".join(lines)
    assert "    out_dir: str = 'x'  # folder for" in "\n".join(lines)


def test_saved_settings_come_back_as_they_were():
    config = replace(load_config(["--kl_beta=0.3", "--wandb_log=true"]), dtype="bfloat16")
    assert from_saved(asdict(config), "checkpoint.pt") == config


@pytest.mark.parametrize("saved", [{"experts": 3}, {"kl_beta": [1]}, {"dtype": "float16"}])
def test_saved_settings_that_are_none_name_their_file(saved):
    with pytest.raises(Mistake, match="^checkpoint.pt: "):
        from_saved(saved, "checkpoint.pt")


def test_mini_batches_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Mistake, match="minibatch_size above 0 allows only one process"):
        load_config(["--minibatch_size=8"])
