"""Say what made a result, and which results may be averaged.

A result depends on its settings, and on the bytes of the code and files that made it.
`fingerprint` hashes the second. Only runs in which both are equal are averaged, so a changed
comment sets runs apart, too.
"""

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from data.dataset import files_of
from data.files import PROJECT, shipped_path
from data.user_mistake import Mistake
from data.weights import parse_weights
from grpo import distributed
from grpo.run.checkpoint import LATEST
from grpo.run.config import PLACES, checkpoints
from grpo.run.load import pick_device, pick_dtype

# what a run executes; tools, tests and experiments don't change what it computes
CODE = """train_grpo.py grpo/*.py grpo/*.cu grpo/run/*.py grpo/evaluation/*.py model/transformer.py
data/*.py data/sums/*.py"""
TO_READ = {"one_file.py", "tokens.py"}  # no run imports these
PACKAGES = "grpo", "data", "model", "tests"
# what may differ between runs that are averaged; the device is in the fingerprint
IGNORED = ("seed", "eval_interval", "device", *PLACES)


def fingerprint(config) -> str:
    """Hash the code, every file that the settings name, and the kind of machine.

    Call it after the reward has been called, because only then has a FILE.py loaded all it needs.
    """
    code = sorted(path for pattern in CODE.split() for path in PROJECT.glob(pattern))
    named = [*checkpoints(config), config.prompts_file, *files_of(config.dataset, config.held_out)]
    for part in parse_weights("reward", config.reward):
        file, python, _ = part.rpartition(".py:")
        named += loaded_with(f"{file}.py") if python else [part]  # a rule's name is no file
    files = [path for path in code if path.name not in TO_READ]
    files += [shipped_path(name) for name in named if name]
    device = pick_device(config.device)
    precision = pick_dtype(config.dtype, device)
    versions = torch.__version__, np.__version__, distributed.PROCESSES
    content = hashlib.sha256(str((device.type, precision, *versions)).encode())
    for path in files:
        path = path / LATEST if path.is_dir() else path
        if path.is_file():
            content.update(hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()[:12]


def loaded_with(file: str) -> list[Path]:
    """List a user's FILE.py, and what Python has loaded from its folder, in a fixed order.

    That leaves out what's installed, and the project's own code, but for modules that the file
    names: other programs load those, too.
    """
    file = shipped_path(file).resolve()
    others = [sys.prefix, sys.base_prefix, *(PROJECT / name for name in PACKAGES)]
    its_names = vars(sys.modules.get(f"{file.stem} of the user", object)).values()
    found = {file}
    for module in [*sys.modules.values()]:  # a look at one may import others
        path = Path(getattr(module, "__file__", None) or "/")
        ours = any(path.is_relative_to(each) for each in others)
        named = any(value is module for value in its_names)
        if path.is_relative_to(file.parent) and (named or not ours):
            found.add(path)
    return sorted(found)


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


def group_runs(folders: list[str]) -> dict[str, list[str]]:
    """Group runs that differ in nothing but their seed: -> {label: folders}.

    A label lists what the groups differ in. If a seed comes twice in a group, each of its runs
    stands alone.
    """
    runs = {folder: read_json(folder, "config.json") for folder in folders}
    names = [name for name in runs[folders[0]] if name not in IGNORED]
    differ = [name for name in names if len({str(run.get(name)) for run in runs.values()}) > 1]
    groups = {}
    for folder, run in runs.items():
        label = ", ".join(f"{name}={run.get(name)}" for name in differ)
        groups.setdefault(label, []).append(folder)
    separate = {}
    for label, group in groups.items():
        if len({runs[folder]["seed"] for folder in group}) == len(group):
            separate[label or group[0]] = group
        else:
            separate |= {f"{label} {folder}".strip(): [folder] for folder in group}
    return separate


def read_json(folder: str, name: str) -> dict:
    """Read a file of a run's folder, or raise a Mistake if there's none."""
    path = Path(folder) / name
    if not path.exists():
        raise Mistake(f"{path} is missing; name the out_dir of a run that's finished")
    return json.loads(path.read_bytes())
