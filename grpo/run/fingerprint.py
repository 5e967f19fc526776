"""Say what made a result: a hash of the bytes of the code and the files behind it.

Only runs whose settings and fingerprints are equal are averaged (grpo/evaluation/table.py), so a
changed comment sets runs apart, too.
"""

import hashlib
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from data.files import PROJECT
from grpo import distributed
from grpo.run.checkpoint import LATEST
from grpo.run.config import named_files
from grpo.run.load import pick_device

# all of what a run executes; tools, tests and experiments don't change what it computes
CODE = """train_grpo.py grpo/*.py grpo/*.cu grpo/run/*.py grpo/evaluation/*.py model/transformer.py
data/*.py data/sums/*.py"""
PACKAGES = "grpo", "data", "model", "tests"  # of these, each program loads other parts
# These say where a run goes. They don't change what it computes.
PLACES = ("out_dir", "init_from", "wandb_project", "wandb_run_name")


def loaded_from(folder: Path) -> set[Path]:
    """List what Python has loaded from a folder, but for what's installed and what's ours."""
    files = {Path(getattr(module, "__file__", None) or "/") for module in [*sys.modules.values()]}
    others = [sys.prefix, sys.base_prefix, *(PROJECT / name for name in PACKAGES)]
    found = {file for file in files if file.is_relative_to(folder)}
    return {file for file in found if not any(file.is_relative_to(each) for each in others)}


def fingerprint(config) -> str:
    """Hash the code, every file that the settings name, and the kind of machine.

    Call it after the reward has been called, because only then has a FILE.py loaded all it needs.
    """
    code = sorted(path for pattern in CODE.split() for path in PROJECT.glob(pattern))
    device = pick_device(config.device).type
    machine = device, torch.__version__, np.__version__, distributed.PROCESSES
    content = hashlib.sha256(str(machine).encode())
    named = named_files(config)
    rewards = [file for file in named if file.suffix == ".py"]
    loaded = [file for reward in rewards for file in sorted(loaded_from(reward.resolve().parent))]
    for path in [*code, *named, *loaded]:
        path = path / LATEST if path.is_dir() else path
        if path.is_file():
            content.update(hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()[:12]


def made_by(config, before: dict | None) -> str:
    """Name what makes this run, given the training state that it's resumed from, if any.

    That's its fingerprint. But if it was begun with other settings or code, its folder is a part of
    the name, so it's never averaged with other runs.
    """
    now = fingerprint(config)
    if before is None:
        return now
    settings = asdict(config)
    changed = {name for name in settings if before["config"][name] != settings[name]}
    if before["made_by"].split()[0] == now and changed <= {*PLACES}:
        return before["made_by"]
    return f"{now} resumed in {config.out_dir}"
