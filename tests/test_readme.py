"""What the README says exists, exists."""
import importlib
import re
import shlex
from pathlib import Path

import pytest

from grpo.config import FIELDS, convert, load_config

README = Path("README.md").read_text()
COMMANDS = sorted(set(re.findall(r"python train_grpo\.py ([^`\n]+)", README)))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+\.\w+)`", README)) - {"requirements.txt", "config.json", "train_grpo.py"}))
def test_every_function_named_exists(name):
    module, function = name.split(".")
    if function in ("py", "json", "jsonl", "pt", "txt", "bin", "cu"):
        return
    assert callable(getattr(importlib.import_module(f"grpo.{module}"), function))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_training_command_is_understood(command, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda self: True)  # a file that another command makes
    if "--help" not in command:
        load_config([argument for argument in shlex.split(command) if "=" in argument or argument.endswith(".py")])


def test_every_file_named_exists():
    for name in re.findall(r"`((?:grpo|model|data|config|tests)/[\w/]+\.py)`", README):
        assert Path(name).is_file(), name


def test_every_flag_of_the_variants_exists():
    """The table's flags are settings, its values are allowed, its functions are there."""
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \| `(\w+)\.(\w+)`.* \|$", README[README.index("## Variants"):], re.MULTILINE)
    assert len(rows) > 20
    seen = set()
    for _, _, flags, module, function in rows:
        assert hasattr(importlib.import_module(f"grpo.{module}"), function), (module, function)
        for flag in re.findall(r"`--([^`]+)`", flags):
            name, _, value = flag.partition("=")
            assert name in FIELDS, flag
            if value:
                convert(name, value, flag)
            seen.add(name)
    assert {"loss_type", "clip_delta", "minibatch_size", "importance_sampling_level", "baseline", "scale_rewards", "kl_estimator", "entropy_coef", "top_entropy_quantile",
            "reference_mode", "xtc_probability", "repetition_penalty", "reward", "prompts_file", "gradient_checkpointing", "dtype"} <= seen
