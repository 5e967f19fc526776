"""What the README says exists, exists."""
import importlib
import re
import shlex
from pathlib import Path

import pytest

from grpo.config import load_config

README = Path("README.md").read_text()
COMMANDS = sorted(set(re.findall(r"python train_grpo\.py ([^`\n]+)", README)))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\w+\.\w+)`", README)) - {"requirements.txt", "config.json", "train_grpo.py"}))
def test_every_function_named_exists(name):
    module, function = name.split(".")
    if function in ("py", "json", "jsonl", "pt", "txt", "bin", "cu"):
        return
    assert callable(getattr(importlib.import_module(f"grpo.{module}"), function))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_training_command_is_understood(command):
    if "--help" not in command:
        load_config([argument for argument in shlex.split(command) if "=" in argument or argument.endswith(".py")])


def test_every_file_named_exists():
    for name in re.findall(r"`((?:grpo|model|data|config|tests)/[\w/]+\.py)`", README):
        assert Path(name).is_file(), name
