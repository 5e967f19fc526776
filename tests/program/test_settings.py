"""Check settings from files and flags. test_mistakes.py checks those that a user gets wrong."""

import pytest

import train_grpo
from grpo.run.config import Config, load_config


def test_files_and_flags_apply_left_to_right(tmp_path):
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("group_size = 32\nkl_beta = 1\ncompile = True\n_half = 0.5", encoding="utf-8")
    second.write_text("group_size = 64", encoding="utf-8")
    assert load_config([str(first), str(second)]).group_size == 64
    config = load_config(["--kl_beta=0.9", str(first), "--group_size=4", "--out_dir=a=b"])
    assert (config.group_size, config.kl_beta, config.out_dir) == (4, 1.0, "a=b")
    assert type(config.kl_beta) is float and config.compile == "true"


def test_a_bool_alone_means_true_and_a_path_may_begin_at_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")  # no shell expands the ~ of --out_dir=~/out
    config = load_config(["--out_dir=~/out", "--gradient_checkpointing"])
    assert (config.gradient_checkpointing, config.out_dir) == (True, "/home/me/out")


def test_the_defaults_are_the_default_experiment():
    assert load_config([]) == Config() == load_config(["config/grpo_config.py"])


def test_help_shows_each_setting_as_it_stands_in_the_class(capsys):
    with pytest.raises(SystemExit) as end:
        train_grpo.main(["--out_dir=x", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert not end.value.code
    for name in vars(Config()):
        assert sum(line.startswith(f"    {name}: ") for line in lines) == 1
    assert "    group_size: int = 16  # completions per input, G" in "\n".join(lines)
