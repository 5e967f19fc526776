"""Settings from files and flags; what a user gets wrong with them is in test_mistakes.py."""

from dataclasses import asdict, replace

import pytest

import train_grpo
from grpo.plumbing.config import FIELDS, GROUPS, Config, help_text, load_config, resumed


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


def test_a_config_file_may_use_helpers_and_imports(tmp_path):
    """What is imported, defined, or was used to make a setting, is none."""
    base = tmp_path / "base.py"
    base.write_text(
        "import math\nfrom math import floor, pi\nfrom pathlib import Path as _Path\n"
        "base = 4\nsizes = [base * i for i in range(1, 5)]\n\n"
        "def double(x):\n    twice = 2 * x\n    return twice\n\n"
        "group_size = double(sizes[1])\nbatch_size = group_size * 2\nhidden_words = floor(pi)\n"
    )
    config = load_config([str(base)])
    assert (config.group_size, config.batch_size, config.hidden_words) == (16, 32, 3)
    base.write_text("grup_size = 8")
    with pytest.raises(ValueError, match="did you mean 'group_size'"):
        load_config([str(base)])


def test_a_mistake_in_a_config_file_names_its_line(tmp_path):
    (tmp_path / "a.py").write_text("group_size = 8\nbatch_size = 1 / 0\n")
    with pytest.raises(ValueError, match=r"ZeroDivisionError: .* \(.*a.py, line 2\); mend it"):
        load_config([str(tmp_path / "a.py")])


def test_help_shows_every_setting_aligned_in_groups_with_its_value(tmp_path, capsys):
    (tmp_path / "a.py").write_text("group_size = 32")
    train_grpo.main([str(tmp_path / "a.py"), "--seed=7", "--help"])
    shown = capsys.readouterr().out
    assert "--group_size=32 " in shown
    assert "--seed=7 " in shown
    lines = help_text(Config()).splitlines()
    assert all(any(line.startswith(f"  --{name}=") for line in lines) for name in FIELDS)
    assert all(title in lines for title in GROUPS.values())
    starts = {line.index(FIELDS[name].metadata["about"]) for name, line in settings(lines)}
    assert len(starts) == 1


def settings(lines):
    """The lines of --help that show a setting: (its name, the line)."""
    shown = [line for line in lines if line.startswith("  --")]
    return [(line[4:].partition("=")[0], line) for line in shown]


def saved(*flags):
    """What a checkpoint of a run with these flags holds."""
    return asdict(load_config(["--max_iters=10", "--min_lr=1e-6", *flags]))


def test_a_run_goes_on_with_the_settings_of_its_checkpoint():
    config = resumed(load_config(["--init_from=resume", "--out_dir=moved"]), saved("--kl_beta=0.3"))
    assert (config.kl_beta, config.out_dir, config.init_from) == (0.3, "moved", "resume")
    assert (config.max_iters, config.lr_decay_iters) == (10, 10)


def test_a_run_that_goes_on_may_be_longer_but_not_another():
    old = saved("--kernel=torch")
    del old["kernel"]  # a checkpoint older than that setting
    again = ["--init_from=resume", "--min_lr=1e-6", "--dtype=auto", "--max_iters=20"]
    config = resumed(load_config([*again, "--save_interval=5"]), old)
    assert (config.max_iters, config.save_interval) == (20, 5)
    assert config.lr_decay_iters == 10  # the schedule is not stretched
    changes = ["--kl_beta=0.3", "--lr_decay_iters=20", "--seed=2"]
    with pytest.raises(ValueError) as mistake:
        resumed(load_config([*again, *changes]), old)
    for told in ("kl_beta=0.3 (it was 0.09)", "lr_decay_iters=20 (it was 10)", "seed=2"):
        assert told in str(mistake.value)  # all at once


def test_a_run_whose_learning_rate_has_ended_begins_anew():
    config = load_config(["--init_from=resume", "--max_iters=20"])
    with pytest.raises(ValueError, match="rate is 0 from step 10 on; .*--generator_checkpoint=out"):
        resumed(config, saved("--min_lr=0"))


def test_a_checkpoint_asks_for_no_code(tmp_path):
    """A reward's file is run where it is given again, and only then."""
    old = saved("--reward=judge,my.py:f")
    with pytest.raises(ValueError, match="give it again: --reward=judge,my.py:f"):
        resumed(load_config(["--init_from=resume"]), old)
    again = load_config(["--init_from=resume", "--reward=judge,my.py:f"])
    assert resumed(again, old).reward == "judge,my.py:f"


@pytest.mark.parametrize(
    "damage",
    [{"kl_beta": [1]}, {"experts": 3}, {7: 1}, {"dtype": "float16"}, {"out_dir": "a\0b"}],
)
def test_what_a_checkpoint_says_of_settings_is_checked(damage):
    with pytest.raises(ValueError, match="^out/checkpoint.pt: "):
        resumed(load_config(["--init_from=resume"]), saved() | damage)


def test_saved_settings_come_back_as_they_were():
    config = load_config(["--max_iters=10", "--kl_beta=0.3", "--init_from=resume"])
    assert resumed(config, asdict(config)) == replace(config, lr_decay_iters=10)
