"""Print the table of a finished run, or compare several runs.

    python -m grpo.evaluation out                        # prints the table that the run made
    python -m grpo.evaluation out-a-*                    # compares runs: means over seeds
    python -m grpo.evaluation out --again                # measures again, with the slow rows, too
    python -m grpo.evaluation out --reward=judge,A.pt    # asks these judges, saves nothing
    python -m grpo.evaluation my.pt config/rule.py       # a generator, as if this run had made it

Runs that differ only in their seed are averaged. If that's all of them, you get the whole table.
Otherwise each group gets one row: what it did differently, and what it draws after GRPO.

We don't run a file just because a checkpoint names it. So if the run's reward is a FILE.py, repeat
it with --reward.
"""

from pathlib import Path

from data.user_mistake import Mistake, exit_on_mistake
from grpo.evaluation.evaluate import evaluate
from grpo.evaluation.table import format_rows, format_table
from grpo.run.checkpoint import LATEST, training_state
from grpo.run.config import Parser, load_config
from grpo.run.load import load_generator, load_run
from grpo.run.log import save_table
from grpo.run.origin import differences, made_with
from grpo.run.reward_setting import parse_reward
from grpo.run.runs import group_runs, read_json


def compare(out_dirs: list[str]) -> str:
    """Format the table of one group of runs, or one row for each of several groups."""
    tables = {folder: read_json(folder, "evaluation.json") for folder in out_dirs}
    groups = group_runs(tables)  # {label: folders}
    if len(groups) > 1:
        rows = {}
        for label, folders in groups.items():
            title = f"{', '.join(label)} (runs: {len(folders)})"
            rows[title] = [tables[folder]["after, sampled"] for folder in folders]
    else:
        (folders,) = groups.values()
        first, *others = (tables[folder] for folder in folders)
        if not others:
            config = read_json(folders[0], "config.json")
            judge_pays = "judge" in parse_reward(config["reward"])
            return format_table(first, config.get("rule", ""), judge_pays)
        shared = [title for title in first if all(title in table for table in others)]
        rows = {title: [tables[folder][title] for folder in folders] for title in shared}
    return "\n".join([*format_rows(rows), "mean ± half the range over the seeds"])


def again(out_dir: str, given: dict[str, str], everything: bool) -> None:
    """Measure a run again, and print the table. `given` replaces some of its settings.

    With `everything` it has the slow rows. Then it's saved, if the reward is the run's own and what
    made the run is as it was.
    """
    state = training_state(Path(out_dir) / LATEST)
    own = state["config"]["reward"]
    config, models, rewards, held_out = load_run(out_dir, given)
    result, completions = evaluate(models, rewards, held_out, everything)
    print(format_table(result, held_out.rule_name, "judge" in parse_reward(own)))
    now = made_with(config)
    before = state["made_with"] | {"processes": 1}  # the first process made the table
    # what the table doesn't need, such as a reference, may be gone
    before["files"] = {name: before["files"].get(name) for name in now["files"]}
    changed = differences(before, now)
    if changed:
        print(f"not saved, because what made this run isn't what's here: {', '.join(changed)}")
    elif everything and config.reward == own:
        save_table(out_dir, result, completions)


def measure_generator(path: str, settings: list[str], everything: bool) -> None:
    """Print the table of a run with these settings, as if it had ended with this generator."""
    models, rewards, held_out = load_generator(path, load_config(settings))
    result, _ = evaluate(models, rewards, held_out, everything)
    print(format_table(result, held_out.rule_name, judge_pays=False))


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="python -m grpo.evaluation", description="Print the table of a run.")
    add = parser.add_argument
    add(
        "out_dir",
        nargs="+",
        help="the folder of a run; several are compared; or a generator's file and configs",
    )
    add("--again", action="store_true", help="measure again with the slow rows, and save it")
    add("--reward", help="measure this reward; if it's a FILE.py, it runs")
    add("--device", help="where to measure, if not where the run was")
    with exit_on_mistake("evaluation"):
        args, flags = parser.parse_known_args(arguments)
        first, *others = args.out_dir
        if flags and not first.endswith(".pt"):
            parser.parse_args(arguments)  # which says what's wrong with them
        if first.endswith(".pt"):
            given = {"reward": args.reward, "device": args.device}
            flags += [f"--{name}={x}" for name, x in given.items() if x]
            measure_generator(first, [*others, *flags], args.again)
        elif not (args.again or args.reward):
            print(compare(args.out_dir))
        elif len(args.out_dir) > 1:
            raise Mistake("only one run can be measured at a time; name one out_dir")
        else:
            given = {"reward": args.reward, "device": args.device}
            again(first, {name: x for name, x in given.items() if x}, args.again)


if __name__ == "__main__":
    main()
