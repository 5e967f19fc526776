"""Group runs by what they did, so that only runs of different seeds are averaged."""

import json
from pathlib import Path

from data.user_mistake import Mistake
from grpo.run.config import NAMES

IGNORED = ("seed", *NAMES)  # runs of one group may differ in these


def group_runs(folders: list[str]) -> dict[str, list[str]]:
    """Group runs with the same settings and the same changes on the way: {label: folders}.

    A label names the settings in which the groups differ. A setting that a run's version of the
    program didn't have is None. Runs of a group with the same seed count once.
    """
    runs = {folder: read_json(folder, "config.json") for folder in folders}
    names = dict.fromkeys(name for run in runs.values() for name in run if name not in IGNORED)
    differing = [n for n in names if len({str(run.get(n)) for run in runs.values()}) > 1]
    groups = {}  # {label: {seed: folder}}
    for folder, run in runs.items():
        label = ", ".join(f"{name}={run.get(name)}" for name in differing)
        groups.setdefault(label, {})[run["seed"]] = folder
    return {label: list(group.values()) for label, group in groups.items()}


def read_json(folder: str, name: str) -> dict:
    """Read a file of a run's folder, or raise a Mistake if there's none."""
    path = Path(folder) / name
    if not path.exists():
        raise Mistake(f"{path} is missing; finish that run, or measure it as it is with --again")
    return json.loads(path.read_text(encoding="utf-8"))
