"""Group runs by what they did, so that only runs of different seeds are averaged."""

import json
from pathlib import Path

from data.user_mistake import Mistake
from grpo.run.config import PLACES

# runs of one group may differ in these; the device is in `made_with`, as the machine
IGNORED = ("seed", "eval_interval", "device", *PLACES)


def group_runs(results: dict[str, object]) -> dict[tuple[str, ...], list[str]]:
    """Group runs, given {folder: its result}, by all that made them: -> {label: folders}.

    A label lists what the groups differ in, and the folder of a run that's alone. Two runs with one
    seed count once if their results are equal, and a line says so. If they aren't, each run of the
    group stands alone.
    """
    runs = {folder: flatten(read_json(folder, "config.json")) for folder in results}
    names = dict.fromkeys(name for run in runs.values() for name in run if name not in IGNORED)
    versions = {
        name: list(dict.fromkeys(str(run.get(name)) for run in runs.values())) for name in names
    }
    groups = {}  # {what differs: [folder]}
    for folder, run in runs.items():
        label = describe(run, versions)
        group = groups.setdefault(label, [])
        twins = [each for each in group if runs[each]["seed"] == run["seed"]]
        equal = [each for each in twins if results[each] == results[folder]]
        if equal:
            print(f"{folder} and {equal[0]} are the same run, so it counts once")
        else:
            group.append(folder)
    separate = {}
    for label, group in groups.items():
        if len(group) > 1 and len({runs[folder]["seed"] for folder in group}) == len(group):
            separate[label] = group
        else:
            separate |= {(*label, folder): [folder] for folder in group}
    return separate


def flatten(config: dict) -> dict:
    """Put settings, `made_with` and its files into one dict. A file's name ends in ` file`."""
    made_with = config.pop("made_with", {})
    files = {f"{path} file": content for path, content in made_with.pop("files", {}).items()}
    return config | made_with | files


def describe(run: dict, versions: dict[str, list[str]]) -> tuple[str, ...]:
    """List what runs differ in, as this run has it. `versions` are the values of each name.

    A setting that a run's version of the program didn't have is None. Of a file we say which of its
    versions it is.
    """
    parts = []
    for name, values in versions.items():
        if len(values) == 1:
            continue
        path = name.removesuffix(" file")
        if path == name:
            parts.append(f"{name}={run.get(name)}")
        elif name in run and "None" not in values:  # otherwise a setting says which files it has
            parts.append(f"{path} (version {values.index(run[name]) + 1})")
    return tuple(parts)


def read_json(folder: str, name: str) -> dict:
    """Read a file of a run's folder, or raise a Mistake if there's none."""
    path = Path(folder) / name
    if not path.parent.is_dir():
        raise Mistake(f"there is no folder {folder}; name the out_dir of a run")
    if not path.exists():
        raise Mistake(f"{path} is missing; finish that run, or measure it as it is with --again")
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise Mistake(f"{path} is damaged; make that run again") from None
