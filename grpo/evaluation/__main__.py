"""Print the table of a finished run, or compare several runs.

    python -m grpo.evaluation out                        # prints the table that the run made
    python -m grpo.evaluation out-a-*                    # compares runs: means over seeds
    python -m grpo.evaluation out --again                # measures again, with the slow rows, too
    python -m grpo.evaluation out --reward=judge,A.pt    # asks these judges, saves nothing

Runs that differ only in their seed are averaged. If that's all of them, you get the whole table.
Otherwise each group gets one row: what it did differently, and what it draws after GRPO.

We don't run a file just because a checkpoint names it. So if the run's reward is a FILE.py, repeat
it with --reward.
"""

import shutil
from dataclasses import replace
from pathlib import Path

from data.user_mistake import Mistake, exit_on_mistake
from grpo.evaluation.evaluate import evaluate, format_rows, format_table
from grpo.reward import Rewards
from grpo.run.checkpoint import LATEST, load_weights, read, training_state
from grpo.run.config import Config, Parser, saved_settings
from grpo.run.load import HeldOut, Models, load_data, load_models, load_rewards
from grpo.run.log import save_table
from grpo.run.network import pick_device
from grpo.run.runs import group_runs, read_json


def compare(out_dirs: list[str]) -> str:
    """Format the table of one group of runs, or one row for each of several groups."""
    tables = {folder: read_json(folder, "evaluation.json") for folder in out_dirs}
    groups = {
        label: [tables[folder] for folder in folders]
        for label, folders in group_runs(tables).items()
    }
    if len(groups) > 1:
        rows = {
            f"{label} (runs: {len(tables)})": [table["after, sampled"] for table in tables]
            for label, tables in groups.items()
        }
        if max(map(len, format_rows(rows))) > shutil.get_terminal_size().columns:
            rows = {title.replace(", ", ",\n"): row for title, row in rows.items()}
    else:
        (tables,) = groups.values()
        if len(tables) == 1:
            return format_table(tables[0], read_json(out_dirs[0], "config.json")["reward"])
        shared = [title for title in tables[0] if all(title in table for table in tables)]
        rows = {title: [table[title] for table in tables] for title in shared}
    return "\n".join([*format_rows(rows), "mean ± half the range over the seeds"])


def load_run(out_dir: str, given: dict[str, str]) -> tuple[Config, Models, Rewards, HeldOut]:
    """Load what a finished run ended with. `given` replaces some of its settings."""
    path = Path(out_dir) / LATEST
    saved = saved_settings(training_state(path), given, path)
    # the table needs no reference, and its file may be gone
    config = replace(saved, reference_checkpoint="", **given)
    device = pick_device(config.device)
    models = load_models(config, device)
    load_weights(models.policy.network, read(path)["weights"], path)
    _, rule, held_out = load_data(config, device)
    return config, models, load_rewards(config, models.judge, rule, device), held_out


def again(out_dir: str, reward: str | None, everything: bool) -> None:
    """Measure a run again, and print the table.

    With `everything` it has the slow rows, and is saved if the reward is the run's own.
    """
    own = training_state(Path(out_dir) / LATEST)["config"]["reward"]
    given = {"reward": reward} if reward else {}
    config, models, rewards, held_out = load_run(out_dir, given)
    result, completions = evaluate(models, rewards, held_out, everything)
    print(format_table(result, own))
    if everything and config.reward == own:
        save_table(out_dir, result, completions)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m grpo.evaluation", description="Print the table of a run.")
    add = parser.add_argument
    add("out_dir", nargs="+", help="the folder of a run; several are compared")
    add("--again", action="store_true", help="measure again with the slow rows, and save it")
    add("--reward", help="measure this reward; if it's a FILE.py, it runs")
    with exit_on_mistake("evaluation"):
        args = parser.parse_args(arguments)
        if not (args.again or args.reward):
            print(compare(args.out_dir))
        elif len(args.out_dir) > 1:
            raise Mistake("only one run can be measured at a time; name one out_dir")
        else:
            again(args.out_dir[0], args.reward, args.again)


if __name__ == "__main__":
    main()
