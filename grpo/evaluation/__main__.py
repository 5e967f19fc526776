"""Print the table of a finished run, or of several runs side by side.

    python -m grpo.evaluation out                        # prints the table that the run made
    python -m grpo.evaluation out-a out-b                # and the settings in which runs differ
    python -m grpo.evaluation out-1 out-2 out-3 --mean   # means over runs, and their spread
    python -m grpo.evaluation out --again                # computes the table anew, with the target
    python -m grpo.evaluation out --eval_seed=1          # takes other inputs, and keeps nothing
    python -m grpo.evaluation out --reward=judge,A.pt    # what these judges say, and keeps nothing

With another --reward than the run's, a judge's column is its P(real), the probability that a word
is real text. A checkpoint may name a FILE.py as its reward. We do not run a file just because a
checkpoint names it, so you have to name the run's reward again with --reward.
"""

import json
from dataclasses import replace
from pathlib import Path

from data.user_mistake import exit_on_mistake, refuse
from grpo.evaluation.evaluate import (
    COLUMNS,
    EVALUATION_SEED,
    aligned,
    evaluate,
    format_rows,
    format_table,
)
from grpo.plumbing.checkpoint import LATEST, training_state
from grpo.plumbing.config import Config, Parser, number, saved_settings
from grpo.plumbing.load import load_run
from grpo.plumbing.log import read_lines, save_table

MORE_COLUMNS = {"entropy": ("entropy", 2), "mean_kl": ("KL", 2)}


def stored(out_dir):
    """Read the settings and the table of a finished run: -> {name: value}, {row: {column: x}}."""
    path = Path(out_dir) / "evaluation.json"
    refuse(
        not path.exists(),
        f"{path} is missing, because the run has not ended, or {out_dir} is not a run's folder;"
        f" name another folder, or compute the table: python -m grpo.evaluation {out_dir} --again",
    )
    settings = json.loads(path.with_name("config.json").read_text())
    return settings, json.loads(path.read_text())


def side_by_side(out_dirs):
    """Return the settings in which runs differ, and what they had before and after: -> text."""
    runs = {out_dir: stored(out_dir) for out_dir in out_dirs}
    cells = [["settings that differ", *out_dirs]]
    for name in vars(Config()):
        values = [str(settings.get(name)) for settings, _ in runs.values()]
        if name != "out_dir" and len({*values}) > 1:
            cells.append([f"  {name}", *values])
    rows = {}
    for out_dir, (_, result) in runs.items():
        for title in ("before, sampled", "after, sampled"):
            rows[f"{out_dir}: {title}"] = [result[title]]
    return "\n".join([*aligned(cells), "", *format_rows(rows)])


def mean(out_dirs):
    """Return the whole table as text, with the mean over several runs and its spread in each cell.

    Two columns are added: the entropy of a blank, and the KL in the last step of training.
    """
    rows = {}
    for out_dir in out_dirs:
        _, result = stored(out_dir)
        metrics = read_lines(Path(out_dir) / "metrics.jsonl")
        result["after, sampled"]["mean_kl"] = metrics[-1]["mean_kl"]
        for title, row in result.items():
            rows.setdefault(title, []).append(row)
    return "\n".join(format_rows(rows, COLUMNS | MORE_COLUMNS))


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
    result, fills = evaluate(run.models, run.rewards, run.held_out, config, everything=True)
    if args.eval_seed == EVALUATION_SEED and not other_reward:
        save_table(args.out_dir[0], result, fills)
    return format_table(result)


def main(arguments=None):
    parser = Parser(prog="python -m grpo.evaluation", description="Print the table of a run.")
    add = parser.add_argument
    add("out_dir", nargs="+", help="a run's folder; several are put side by side")
    add("--mean", action="store_true", help="average several runs, which differ in their seed")
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
        if compute:
            print(again(args))
        elif args.mean:
            print(mean(args.out_dir))
        elif len(args.out_dir) > 1:
            print(side_by_side(args.out_dir))
        else:
            print(format_table(stored(args.out_dir[0])[1]))


if __name__ == "__main__":
    main()
