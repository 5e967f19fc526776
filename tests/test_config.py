"""Settings from files and flags; what a user gets wrong with them is in test_mistakes.py."""

from dataclasses import asdict

import pytest

from grpo.plumbing.config import FIELDS, Config, check_resume, help_text, load_config


def test_files_and_flags_apply_left_to_right(tmp_path):
    (tmp_path / "a.py").write_text(
        "import math\n_half = 0.5\ngroup_size = 32\nlearning_rate = 1\nkl_beta = _half\ncompile = True"
    )
    (tmp_path / "b.py").write_text("group_size = 64")
    assert load_config([str(tmp_path / "a.py"), str(tmp_path / "b.py")]).group_size == 64
    config = load_config(["--kl_beta=0.9", str(tmp_path / "a.py"), "--group_size=4"])
    assert (config.group_size, config.learning_rate, config.kl_beta, config.compile) == (
        4,
        1.0,
        0.5,
        "true",
    )
    assert type(config.learning_rate) is float


def test_flags_take_the_type_of_their_field():
    config = load_config(
        [
            "--wandb_run_name=123",
            "--learning_rate=1",
            "--compile=false",
            "--wandb_log=True",
            "--out_dir=a=b",
        ]
    )
    assert (
        config.wandb_run_name,
        config.learning_rate,
        config.compile,
        config.wandb_log,
        config.out_dir,
    ) == ("123", 1.0, "false", True, "a=b")


def test_mini_batches_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes.*set minibatch_size=0"):
        load_config(["--minibatch_size=8"])


def test_common_defaults():
    config = Config()
    assert (
        config.group_size,
        config.kl_beta,
        config.temperature,
        config.top_p,
        config.learning_rate,
        config.clip_eps,
    ) == (8, 0.1, 0.8, 0.95, 1e-5, 0.2)


def test_help_names_every_setting():
    assert all(f"--{name}=" in help_text() for name in FIELDS)


def test_resume_may_raise_max_iters_but_not_change_the_mathematics():
    saved = asdict(load_config(["--max_iters=10", "--min_lr=1e-6"]))
    del saved["kernel"]  # a checkpoint older than that setting
    longer = load_config(["--max_iters=20", "--save_interval=5", "--min_lr=1e-6"])
    check_resume(longer, saved)
    assert longer.lr_decay_iters == 10  # the schedule is not stretched
    for change, message in [
        ("--kl_beta=0.3", "kl_beta=0.3.*kl_beta=0.1"),
        ("--lr_decay_iters=20", "lr_decay_iters=20.*lr_decay_iters=10"),
        ("--min_lr=0", "min_lr=0.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_resume(load_config(["--max_iters=20", "--min_lr=1e-6", change]), saved)
    with pytest.raises(ValueError, match="the learning rate is 0 from step 10 on"):
        check_resume(load_config(["--max_iters=20"]), asdict(load_config(["--max_iters=10"])))
