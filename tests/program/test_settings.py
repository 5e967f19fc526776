"""Check settings from files and flags. test_mistakes.py checks those that a user gets wrong."""

import re
from dataclasses import fields
from typing import get_args

import pytest
from conftest import write_text

import train_grpo
from grpo.run.config import Config, load_config


def test_files_and_flags_apply_left_to_right(tmp_path, monkeypatch):
    """A bool alone means true, and a path may begin at home."""
    monkeypatch.setenv("HOME", "/home/me")  # no shell expands the ~ of --out_dir=~/a=b
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    write_text(first, "group_size = 32\nkl_beta = 1\n_half = 0.5")
    write_text(second, "group_size = 64")
    assert load_config([str(first), str(second)]).group_size == 64
    config = load_config(["--kl_beta=0.9", str(first), "--group_size=4", "--out_dir=~/a=b"])
    assert (config.group_size, config.kl_beta, config.out_dir) == (4, 1.0, "/home/me/a=b")
    assert type(config.kl_beta) is float
    assert not config.compile and load_config(["--compile"]).compile is True


def test_a_config_file_that_was_just_rewritten_is_read_again(tmp_path):
    """As in a sweep that writes one after the other: no bytecode of the old one is used."""
    for seed in range(3):
        write_text(tmp_path / "a.py", f"seed = {seed}")
        assert load_config([f"{tmp_path}/a.py"]).seed == seed


def test_the_defaults_are_the_default_experiment():
    assert load_config([]) == Config() == load_config(["config/grpo_config.py"])


def test_a_config_file_may_import_define_and_compute_with_numpy(tmp_path):
    write_text(
        tmp_path / "a.py",
        "import math\nimport numpy as np\nfrom pathlib import Path\n"
        "def half(x):\n    return x / 2\n"
        "kl_beta = np.float32(0.1)\ngroup_size = np.int64(3)\nlearning_rate = half(0.5)\n"
        "gradient_checkpointing = np.bool_(True)\nmasking = np.array(['word'])[0]\n"
        "top_k = int(math.sqrt(9))\n",
    )
    config = load_config([str(tmp_path / "a.py")])
    assert (config.kl_beta, config.group_size, config.learning_rate) == (0.1, 3, 0.25)
    assert config.gradient_checkpointing is True
    assert (config.masking, config.top_k) == ("word", 3)
    plain = {type(value) for value in vars(config).values()}
    assert plain <= {str, int, float, bool}, "a checkpoint holds nothing else"


def test_help_shows_every_setting_and_what_it_may_be(capsys):
    with pytest.raises(SystemExit) as end:
        train_grpo.main(["--out_dir=x", "--help"])
    shown = capsys.readouterr().out
    assert not end.value.code
    for field in fields(Config):
        assert len(re.findall(rf"^    {field.name}: ", shown, re.MULTILINE)) == 1
        for choice in get_args(field.type):
            assert re.search(rf"^{field.name}: .*\b{choice}\b", shown, re.MULTILINE)
