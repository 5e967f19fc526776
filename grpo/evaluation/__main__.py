"""Print the table of a finished run, or of several runs side by side.

    python -m grpo.evaluation out                        # prints the table that the run made
    python -m grpo.evaluation out-*                      # compares runs, with means over seeds
    python -m grpo.evaluation out --again                # computes the table anew, with the target
    python -m grpo.evaluation out --eval_seed=1          # takes other inputs, and keeps nothing
    python -m grpo.evaluation out --reward=judge,A.pt    # what these judges say, and keeps nothing

Several runs are grouped by their settings, and only runs that differ in their seed are averaged. If
there is one group, it gets the whole table, and otherwise each group gets one row.

With another --reward than the run's, a judge's column is its P(real), the probability that a word
is real text. A checkpoint may name a FILE.py as its reward. We do not run a file just because a
checkpoint names it, so you have to name the run's reward again with --reward.
"""

import json
import shlex
from dataclasses import replace
from pathlib import Path

from data.user_mistake import exit_on_mistake, refuse
from grpo.evaluation.evaluate import (
    aligned,
    evaluate,
    format_rows,
    format_table,
)
from grpo.run.checkpoint import LATEST, training_state
from grpo.run.config import Parser, number, saved_settings
from grpo.run.load import EVALUATION_SEED, load_run
from grpo.run.log import save_table
from grpo.run.runs import group_runs

BEFORE, AFTER = "before, sampled", "after, sampled"  # rows of the table
SPREAD = "± half of the distance between the least and the largest"
APART = "groups in different tables cannot be compared, because their inputs or columns differ"
NOT_AVERAGED = (
    "groups with the same settings are not averaged, because their tables have other rows or"
    " columns; make these tables anew with --again"
)
# The held-out inputs of a run depend on these settings.
INPUTS = ("dataset", "block_size", "masking", "eval_inputs")


def stored(out_dir):
    """Read the table of a finished run: -> {row: {column: number}}."""
    path = Path(out_dir) / "evaluation.json"
    refuse(
        not path.exists(),
        f"{path} is missing, because the run has not ended, or {out_dir} is not a run's folder;"
        " name another folder, or compute the table: python -m grpo.evaluation"
        f" {shlex.quote(str(out_dir))} --again",
    )
    return json.loads(path.read_text(encoding="utf-8"))


def shape(out_dir):
    """Return the rows and columns of a run's table: -> {row: columns}. Old runs had others."""
    return {title: sorted(row) for title, row in stored(out_dir).items()}


def compare(out_dirs):
    """Return the whole table of a group of runs, or one row for each of several groups: -> text."""
    groups = group_runs(out_dirs, shape)
    if len(groups) > 1:
        return side_by_side(groups)
    results = [stored(out_dir) for out_dir in groups[0].folders]
    if len(results) == 1:
        return format_table(results[0])
    rows = {title: [result[title] for result in results] for title in results[0]}
    return "\n".join([*format_rows(rows), f"means of {len(results)} runs, {SPREAD}"])


def side_by_side(groups):
    """Return the settings in which groups differ, and what they had before and after: -> text.

    Groups that were measured on other inputs, or in other columns, get a table of their own.
    """
    lines = [["group", *groups[0].settings, "runs"]]
    tables = {}  # {inputs and columns as text: {number of a group: the tables of its runs}}
    for i, group in enumerate(groups, 1):
        lines.append([str(i), *map(str, group.settings.values()), " ".join(group.folders)])
        results = [stored(folder) for folder in group.folders]
        inputs = [group.settings.get(name) for name in INPUTS]
        opinions = ("judge", "reward_")  # they may differ, because each run has its own reward
        columns = [name for name in sorted(results[0][AFTER]) if not name.startswith(opinions)]
        tables.setdefault(str([inputs, columns]), {})[str(i)] = results
    text = aligned(lines)
    if len(tables) > 1:
        text.append(APART)
    if len({str(group.settings) for group in groups}) < len(groups):
        text.append(NOT_AVERAGED)
    for results in tables.values():
        text += ["", *format_rows(before_and_after(results))]
    return "\n".join([*text, f"means of the runs, {SPREAD}"])


def before_and_after(groups):
    """Make two rows of {number of a group: the tables of its runs}: -> {title: rows}.

    Groups that began with the same draws of the same model share their row before GRPO.
    """
    starts = {}  # {rows before GRPO as text: numbers of groups}
    for i, results in groups.items():
        before = json.dumps([result[BEFORE] for result in results])
        starts.setdefault(before, []).append(i)
    rows = {}
    for before, numbers in starts.items():
        runs = json.loads(before)
        rows[f"{', '.join(numbers)}: {BEFORE} (runs: {len(runs)})"] = runs
    for i, results in groups.items():
        rows[f"{i}: {AFTER} (runs: {len(results)})"] = [result[AFTER] for result in results]
    return rows


def again(args):
    """Compute a run's table. It replaces the stored one if it has the run's inputs and reward."""
    path = Path(args.out_dir[0]) / LATEST
    names = ("reward", "device")
    given = {name: getattr(args, name) for name in names if getattr(args, name)}
    own = saved_settings(training_state(path), given, path)
    other_reward = given.get("reward", own.reward) != own.reward
    # The table compares with the generator that the run started from, and not with its reference.
    config = replace(own, reference_checkpoint="", **given)
    run = load_run(config, path, args.eval_seed)
    result, fills = evaluate(run.models, run.rewards, run.held_out, everything=True)
    if args.eval_seed == EVALUATION_SEED and not other_reward:
        save_table(args.out_dir[0], result, fills)
    return format_table(result)


def main(arguments=None):
    parser = Parser(prog="python -m grpo.evaluation", description="Print the table of a run.")
    add = parser.add_argument
    add("out_dir", nargs="+", help="a run's folder; several are compared, with means over seeds")
    add("--again", action="store_true", help="compute the table again, and save it")
    seed_help = "a number that chooses the held-out inputs"
    add("--eval_seed", type=number(int, 0, 2**32), default=EVALUATION_SEED, help=seed_help)
    reward_help = "measure this reward; if the run's reward is a FILE.py that you trust, repeat it"
    add("--reward", help=reward_help)
    add("--device", help="device to compute on; default: the run's device")
    with exit_on_mistake("evaluation"):
        args = parser.parse_args(arguments)
        other_inputs = args.eval_seed != EVALUATION_SEED
        compute = args.again or other_inputs or args.reward or args.device
        refuse(compute and len(args.out_dir) > 1, "a table is computed for one run; name only one")
        print(again(args) if compute else compare(args.out_dir))


if __name__ == "__main__":
    main()
