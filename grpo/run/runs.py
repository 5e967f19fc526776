"""Group runs by their settings, so that we only average runs that differ in their seed."""

import json
from dataclasses import dataclass
from pathlib import Path

from data.user_mistake import refuse

OWN = ("seed", "out_dir")  # only these settings may differ within a group


@dataclass
class Group:
    settings: dict  # {name: value}, only those that differ between the groups
    folders: list  # of its runs, in the order of their seeds


def group_runs(folders, version=lambda folder: None):
    """Group the folders of runs that have equal settings and an equal `version(folder)`: -> groups.

    A setting that a run's version of the program did not have is "unknown". Raises a Mistake if a
    folder holds no run, or if a run occurs twice, because it would count twice in a mean.
    """
    groups = {}  # {settings and version as text: (settings, {seed: folder})}
    for folder in folders:
        path = Path(folder) / "config.json"
        refuse(not path.exists(), f"{path} is missing; name the out_dir of a run")
        settings = json.loads(path.read_text(encoding="utf-8"))
        seed = settings["seed"]
        shared = {name: value for name, value in settings.items() if name not in OWN}
        key = json.dumps([shared, version(folder)], sort_keys=True)
        _, runs = groups.setdefault(key, (shared, {}))
        refuse(
            seed in runs,
            f"{runs.get(seed)} and {folder} hold the same run, with equal settings and"
            f" seed={seed}; name only one of them",
        )
        runs[seed] = folder
    result = [Group({}, [runs[seed] for seed in sorted(runs)]) for _, runs in groups.values()]
    names = dict.fromkeys(name for shared, _ in groups.values() for name in shared)
    for name in names:
        values = [shared.get(name, "unknown") for shared, _ in groups.values()]
        if any(value != values[0] for value in values):
            for group, value in zip(result, values):
                group.settings[name] = value
    return result
