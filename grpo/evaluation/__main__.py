"""Print the table of a finished run, or compare several runs.

    python -m grpo.evaluation out                        # prints the table that the run made
    python -m grpo.evaluation out-a-*                    # compares runs: means over seeds
    python -m grpo.evaluation out --again                # measures again, with the slow rows, too
    python -m grpo.evaluation out --reward=judge,A.pt    # asks these judges, saves nothing
    python -m grpo.evaluation my.pt config/rule.py       # a generator, as if this run had made it

Runs that differ only in their seed are averaged. If that's all of them, you get the whole table.
Otherwise each group gets one row: what it did differently, and what it draws after GRPO.

Flags are those of a run, and replace its settings while we measure. We don't run a file just
because a checkpoint names it. So if the run's reward is a FILE.py, repeat it with --reward.
"""

from dataclasses import dataclass
from pathlib import Path

from data.user_mistake import Mistake, run_program
from data.weights import parse_weights
from grpo.evaluation.evaluate import evaluate
from grpo.evaluation.table import format_rows, format_table
from grpo.run.arguments import read_arguments
from grpo.run.checkpoint import LATEST, training_state
from grpo.run.config import Config
from grpo.run.fingerprint import fingerprint, group_runs, read_json
from grpo.run.load import load_generator, load_run
from grpo.run.log import save_table


@dataclass
class Settings(Config):
    again: bool = False  # measure again, with the slow rows


def compare(out_dirs: list[str]) -> str:
    """Format the table of one group of runs, or one row for each of several groups."""
    tables = {folder: read_json(folder, "evaluation.json") for folder in out_dirs}
    groups = group_runs(out_dirs)  # {label: folders}
    if len(groups) > 1:
        rows = {}
        for label, folders in groups.items():
            title = f"{label} (runs: {len(folders)})"
            rows[title] = [tables[folder]["after, sampled"] for folder in folders]
    else:
        (folders,) = groups.values()
        first, *others = (tables[folder] for folder in folders)
        if not others:
            config = read_json(folders[0], "config.json")
            judge_pays = "judge" in parse_weights("reward", config["reward"])
            return format_table(first, config["rule"], judge_pays)
        shared = [title for title in first if all(title in table for table in others)]
        rows = {title: [tables[folder][title] for folder in folders] for title in shared}
    return "\n".join([*format_rows(rows), "mean ± half the range over the seeds"])


def measure_run(out_dir: str, given: dict, everything: bool) -> None:
    """Measure a run again, and print the table. `given` replaces some of its settings.

    With `everything` it has the slow rows. Then it's saved, if settings, code and files are the
    run's own.
    """
    config, models, rewards, held_out = load_run(out_dir, given)
    result, completions = evaluate(models, rewards, held_out, everything)
    print(format_table(result, held_out.rule_name, "judge" in rewards.parts))
    state = training_state(Path(out_dir) / LATEST)
    saved = Config(**state["config"])
    if not everything or any(getattr(saved, name) != value for name, value in given.items()):
        print("not saved, because you asked for something else than the run did")
    elif fingerprint(saved) != state["made_by"].split()[0]:
        print("not saved, because code or files have changed since the run")
    else:
        save_table(out_dir, result, completions)


def measure_generator(path: str, config: Config, everything: bool) -> None:
    """Print the table of a run with these settings, as if it had ended with this generator."""
    models, rewards, held_out = load_generator(path, config)
    result, _ = evaluate(models, rewards, held_out, everything)
    print(format_table(result, held_out.rule_name, judge_pays=False))


def main(arguments: list[str]) -> None:
    given, files = read_arguments(Settings, arguments, __doc__)
    everything = given.pop("again", False)
    if not files:
        raise Mistake("name the folder of a run: python -m grpo.evaluation out")
    one = files[0].endswith(".pt") or everything or given
    if one and len(files) > 1:
        raise Mistake(f"only one run can be measured at a time, not {', '.join(files)}")
    if files[0].endswith(".pt"):
        measure_generator(files[0], Config(**given), everything)
    elif not one:
        print(compare(files))
    else:
        measure_run(files[0], given, everything)


if __name__ == "__main__":
    run_program(main)
