"""Every mistake in a setting is one line that names the setting, the value and what is allowed."""
import pytest

from grpo.config import FIELDS, Config, check_resume, help_text, load_config
from dataclasses import asdict

MISTAKES = {
    "--grup_size=8": "did you mean 'group_size'", "--banana=1": "no setting 'banana'", "--group_size": "--group_size=VALUE", "--group_size=": "whole number",
    "--group_size=many": "whole number", "--group_size=8.5": "whole number", "--group_size=1": "from 2 to 1024", "--group_size=2000": "from 2 to 1024",
    "--temperature=0": "a number from", "--temperature=hot": "a number", "--temperature=nan": "a number", "--temperature=inf": "a number", "--top_p=0": "a number from",
    "--top_p=1.5": "a number from", "--top_k=-1": "0 or more", "--min_p=2": "a number from", "--kl_beta=-1": "0.0 or more", "--kl_estimator=k4": "exact, k1, k2, k3",
    "--loss_type=ppo": "grpo, dapo", "--baseline=median": "mean, leave_one_out", "--scale_rewards=yes": "group, batch, none",
    "--importance_sampling_level=word": "token, sequence, none", "--masking=words": "random, span, word, sticky", "--masking=word:-1": "WEIGHT >= 0",
    "--masking=word:0": "no positive weight", "--masking=": "random, span, word, sticky", "--mask_ratio=1.5": "from 0.0 to 1.0", "--hidden_words=0": "1 or more",
    "--batch_size=0": "1 or more", "--gradient_accumulation_steps=0": "1 or more", "--block_size=4": "5 or more", "--out_dir=": "names no folder", "--max_iters=0": "1 or more",
    "--learning_rate=-1": "0.0 or more", "--min_lr=1": "above learning_rate", "--warmup_iters=1000": "more than lr_decay_iters", "--beta1=1": "from 0.0 to",
    "--grad_clip=-1": "0.0 or more", "--clip_eps=2": "from 0.0 to 1.0", "--num_iterations=0": "1 or more", "--save_interval=0": "1 or more",
    "--log_interval=0": "1 or more", "--eval_interval=0": "1 or more", "--eval_inputs=0": "1 or more", "--wandb_log=maybe": "true or false", "--compile=maybe": "auto, true, false",
    "--dtype=float8": "float32, bfloat16", "--init_from=scratch": "pretrained, resume", "--seed=-1": "from 0 to", "--clip_delta=1.1": "more than 1 + clip_eps_high", "--minibatch_size=5": "a divisor of 32", "--top_entropy_quantile=0": "a number from", "--reference_mode=moving": "static, ema, periodic",
    "--ema_alpha=0.5": "needs reference_mode=ema", "--reference_update_freq=3": "needs reference_mode=periodic", "--xtc_threshold=0.2": "needs xtc_probability above 0",
    "--xtc_probability=2": "from 0.0 to 1.0", "--repetition_penalty=0": "a number from", "--reward=": "judge, valid_words or FILE.py:FUNCTION", "--reward=jugde": "judge, valid_words or",
    "--reward=judge:heavy": "judge, valid_words or", "--reward=judge:0": "no part of a weight", "--reward=a.py:f,b.py:f": "two functions of one name", "--reward=a.py:": "FILE.py:FUNCTION",
    "nowhere.py": "does not exist", "group_size=8": "does not exist",
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_a_mistake_is_one_clear_line(argument):
    with pytest.raises(ValueError) as error:
        load_config([argument])
    assert MISTAKES[argument] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text, message", [
    ("grup_size = 8", "did you mean 'group_size'"), ("group_size = '8 or so'", "whole number"), ("group_size = 8.0", "whole number"), ("group_size = True", "whole number"),
    ("learning_rate = None", "a number"), ("out_dir = None", "text"), ("wandb_log = 1", "true or false"), ("group_size == 8", "does not run: NameError"),
    ("group_size = ", "does not run: SyntaxError"), ("raise SystemExit(3)", "does not run: SystemExit")])
def test_mistakes_in_a_file(tmp_path, text, message):
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(ValueError, match=None) as error:
        load_config([str(tmp_path / "c.py")])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_files_and_flags_apply_left_to_right(tmp_path):
    (tmp_path / "a.py").write_text("import math\n_half = 0.5\ngroup_size = 32\nlearning_rate = 1\nkl_beta = _half\ncompile = True")
    (tmp_path / "b.py").write_text("group_size = 64")
    assert load_config([str(tmp_path / "a.py"), str(tmp_path / "b.py")]).group_size == 64
    config = load_config(["--kl_beta=0.9", str(tmp_path / "a.py"), "--group_size=4"])
    assert (config.group_size, config.learning_rate, config.kl_beta, config.compile) == (4, 1.0, 0.5, "true")
    assert type(config.learning_rate) is float


def test_flags_take_the_type_of_their_field():
    config = load_config(["--wandb_run_name=123", "--learning_rate=1", "--compile=false", "--wandb_log=True", "--out_dir=a=b"])
    assert (config.wandb_run_name, config.learning_rate, config.compile, config.wandb_log, config.out_dir) == ("123", 1.0, "false", True, "a=b")


def test_importance_sampling_level_none_needs_one_update_per_rollout():
    with pytest.raises(ValueError, match="num_iterations"):
        load_config(["--importance_sampling_level=none", "--num_iterations=2"])


@pytest.mark.parametrize("arguments, message", [
    (["--importance_sampling_level=none", "--minibatch_size=8"], "leave minibatch_size at 0"), (["--importance_sampling_level=none", "--clip_eps=0.1"], "the ratio"),
    (["--importance_sampling_level=none", "--clip_delta=4"], "the ratio"), (["--reward=valid_words", "--credit=run"], "the judge in reward"),
    (["--batch_size=4", "--gradient_accumulation_steps=3", "--minibatch_size=6"], "a multiple of it")])
def test_combinations_that_mean_nothing(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        load_config(arguments)
    assert "\n" not in str(error.value)


def test_mini_batches_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes.*set minibatch_size=0"):
        load_config(["--minibatch_size=8"])


def test_common_defaults():
    config = Config()
    assert (config.group_size, config.kl_beta, config.temperature, config.top_p, config.learning_rate, config.clip_eps) == (8, 0.1, 0.8, 0.95, 1e-5, 0.2)


def test_help_names_every_setting():
    assert all(f"--{name}=" in help_text() for name in FIELDS)


def test_resume_may_raise_max_iters_but_not_change_the_mathematics():
    saved = asdict(load_config(["--max_iters=10", "--min_lr=1e-6"]))
    del saved["kernel"]  # a checkpoint older than that setting
    longer = load_config(["--max_iters=20", "--log_interval=5", "--min_lr=1e-6"])
    check_resume(longer, saved)
    assert longer.lr_decay_iters == 10  # the schedule is not stretched
    for change, message in [("--kl_beta=0.3", "kl_beta=0.3.*kl_beta=0.1"), ("--lr_decay_iters=20", "lr_decay_iters=20.*lr_decay_iters=10"), ("--min_lr=0", "min_lr=0.0")]:
        with pytest.raises(ValueError, match=message):
            check_resume(load_config(["--max_iters=20", "--min_lr=1e-6", change]), saved)
    with pytest.raises(ValueError, match="the learning rate is 0 from step 10 on"):
        check_resume(load_config(["--max_iters=20"]), asdict(load_config(["--max_iters=10"])))
