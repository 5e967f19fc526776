"""Settings from files and flags; what a user gets wrong with them is in test_mistakes.py."""

from dataclasses import asdict

import pytest

from grpo.plumbing.config import FIELDS, Config, check_resume, help_text, load_config


def test_files_and_flags_apply_left_to_right(tmp_path):
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text(
        "import math\n_half = 0.5\n"
        "group_size = 32\nlearning_rate = 1\nkl_beta = _half\ncompile = True"
    )
    second.write_text("group_size = 64")
    assert load_config([str(first), str(second)]).group_size == 64
    config = load_config(["--kl_beta=0.9", str(first), "--group_size=4"])
    assert config.group_size == 4
    assert config.learning_rate == 1.0
    assert config.kl_beta == 0.5
    assert config.compile == "true"
    assert type(config.learning_rate) is float


def test_flags_take_the_type_of_their_field():
    flags = ["--wandb_run_name=123", "--learning_rate=1", "--compile=false", "--wandb_log=True"]
    config = load_config([*flags, "--out_dir=a=b"])
    assert config.wandb_run_name == "123"
    assert config.learning_rate == 1.0
    assert config.compile == "false"
    assert config.wandb_log is True
    assert config.out_dir == "a=b"


def test_mini_batches_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes.*set minibatch_size=0"):
        load_config(["--minibatch_size=8"])


def test_the_defaults_are_the_default_experiment():
    assert load_config([]) == Config() == load_config(["config/grpo_config.py"])
    config = Config()
    assert (config.group_size, config.batch_size, config.max_iters) == (16, 64, 110)
    assert (config.learning_rate, config.kl_beta, config.kl_target) == (1e-3, 0.09, 0.65)
    assert (config.temperature, config.top_p, config.clip_eps) == (1.0, 1.0, 0.2)


@pytest.mark.parametrize("files", [[], ["config/grpo_config.py"]])
def test_a_default_gives_way_to_what_is_set(files):
    """A short run and one without a ratio need no second flag; a value of one's own stays."""
    assert load_config([*files, "--max_iters=3"]).warmup_iters == 3
    assert load_config([*files, "--lr_decay_iters=2"]).warmup_iters == 2
    assert load_config([*files, "--importance_sampling_level=none"]).num_iterations == 1
    assert load_config([*files, "--max_iters=6"]).warmup_iters == 5
    with pytest.raises(ValueError, match="warmup_iters=5 is more than max_iters=3; lower"):
        load_config([*files, "--max_iters=3", "--warmup_iters=5"])
    with pytest.raises(ValueError, match="num_iterations=2 needs the ratio"):
        load_config([*files, "--num_iterations=2", "--importance_sampling_level=none"])


def test_any_reward_may_be_credited_per_run():
    assert load_config(["--reward=valid_words"]).credit == "run"


def test_help_names_every_setting():
    assert all(f"--{name}=" in help_text() for name in FIELDS)


def test_resume_may_raise_max_iters_but_not_change_the_mathematics():
    saved = asdict(load_config(["--max_iters=10", "--min_lr=1e-6"]))
    del saved["kernel"]  # a checkpoint older than that setting
    longer = load_config(["--max_iters=20", "--save_interval=5", "--min_lr=1e-6"])
    check_resume(longer, saved)
    assert longer.lr_decay_iters == 10  # the schedule is not stretched
    for change, message in [
        ("--kl_beta=0.3", "kl_beta=0.3.*kl_beta=0.09"),
        ("--lr_decay_iters=20", "lr_decay_iters=20.*lr_decay_iters=10"),
        ("--min_lr=0", "min_lr=0.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_resume(load_config(["--max_iters=20", "--min_lr=1e-6", change]), saved)
    with pytest.raises(ValueError, match="the learning rate is 0 from step 10 on"):
        check_resume(load_config(["--max_iters=20"]), asdict(load_config(["--max_iters=10"])))
