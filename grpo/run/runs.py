"""Group runs by what they did, so that only runs of different seeds are averaged."""

import json
from pathlib import Path

from data.user_mistake import Mistake
from grpo.run.config import NAMES

IGNORED = ("seed", *NAMES)  # runs of one group may differ in these


def group_runs(results: dict[str, object]) -> dict[str, list[str]]:
    """Group runs, given {folder: its result}, by settings and files: -> {label: folders}.

    A label names what the groups differ in. A setting that a run's version of the program didn't
    have is None. Two runs with one seed count once if their results are equal. If they aren't, each
    run of the group stands alone, with its folder's name.
    """
    runs = {folder: read_json(folder, "config.json") for folder in results}
    runs = {folder: run | run.pop("made_with", {}) for folder, run in runs.items()}
    names = dict.fromkeys(name for run in runs.values() for name in run if name not in IGNORED)
    differing = [n for n in names if len({str(run.get(n)) for run in runs.values()}) > 1]
    groups = {}  # {label: [folder]}
    for folder, run in runs.items():
        group = groups.setdefault(make_label(run, differing), [])
        with_its_seed = [results[each] for each in group if runs[each]["seed"] == run["seed"]]
        if results[folder] not in with_its_seed:
            group.append(folder)
    separate = {}
    for label, group in groups.items():
        if len({runs[folder]["seed"] for folder in group}) == len(group):
            separate[label] = group
        else:
            separate |= {f"{label}, {folder}".removeprefix(", "): [folder] for folder in group}
    return separate


def make_label(run: dict, differing: list[str]) -> str:
    """Name the settings of a run in which it differs. A file has its content's hash behind it."""
    parts = {}
    for name in differing:
        setting = name.removesuffix(" file")
        parts[setting] = f"{setting}={run.get(setting)}"
        if f"{setting} file" in differing:
            parts[setting] += f" ({run.get(f'{setting} file')})"
    return ", ".join(parts.values())


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
