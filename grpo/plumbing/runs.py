"""Group runs by their settings, so that we only average runs that differ in their seed."""

import json
from dataclasses import dataclass
from pathlib import Path

from data.user_mistake import refuse

OWN = ("seed", "out_dir")  # only these settings may differ within a group


@dataclass
class Group:
    settings: dict  # {name: value}, without those in OWN
    folders: list  # of its runs, in the order of their seeds


def group_runs(folders, version=lambda folder: None):
    """Group the folders of runs that have equal settings and an equal `version(folder)`: -> groups.

    Raises a Mistake if a folder holds no run, or if a run occurs twice, because it would count
    twice in a mean.
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
    return [
        Group(shared, [runs[seed] for seed in sorted(runs)]) for shared, runs in groups.values()
    ]


def differences(groups):
    """Return the settings in which groups differ: -> for each group {name: value}.

    A setting that a run's version of the program did not have is "unknown".
    """
    names = dict.fromkeys(name for group in groups for name in group.settings)
    own = [{name: group.settings.get(name, "unknown") for name in names} for group in groups]
    differ = [name for name in names if any(each[name] != own[0][name] for each in own)]
    return [{name: each[name] for name in differ} for each in own]
