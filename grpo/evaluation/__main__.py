"""Print the table of a finished run, or compare several runs.

    python -m grpo.evaluation out                        # prints the table that the run made
    python -m grpo.evaluation out-a-*                    # compares runs: means over seeds
    python -m grpo.evaluation out --again                # measures again, with the slow rows, too
    python -m grpo.evaluation out --reward=judge,A.pt    # measures again, and asks these judges
    python -m grpo.evaluation my.pt config/rule.py       # a generator, as if this run had made it

Runs that differ only in their seed are averaged. If that's all of them, you get the whole table.
Otherwise each group gets one row: what it did differently, and what it draws after GRPO.

Flags are those of a run, and replace its settings while we measure. What's measured again is only
printed. We don't run a file just because a checkpoint names it. So if the run's reward is a
FILE.py, repeat it with --reward.
"""

from dataclasses import dataclass

from data.user_mistake import Mistake, run_program
from grpo.evaluation.evaluate import evaluate
from grpo.evaluation.table import compare, format_table
from grpo.run.arguments import read_arguments
from grpo.run.config import Config
from grpo.run.load import load_generator, load_run


@dataclass
class Settings(Config):
    again: bool = False  # measure again, with the slow rows


def main(arguments: list[str]) -> None:
    given, paths = read_arguments(Settings, arguments, __doc__)
    if not paths:
        raise Mistake("name the folder of a run: python -m grpo.evaluation out")
    path, *others = paths
    is_generator = path.endswith(".pt")
    if not is_generator and not given:
        print(compare(paths))
        return
    if others:
        raise Mistake(f"only one run can be measured at a time, not {', '.join(paths)}")
    everything = given.pop("again", False)
    if is_generator:
        models, rewards, held_out = load_generator(path, Config(**given))
    else:
        _, models, rewards, held_out = load_run(path, given)
    result, _ = evaluate(models, rewards, held_out, everything)
    print(format_table(result))


if __name__ == "__main__":
    run_program(main)
