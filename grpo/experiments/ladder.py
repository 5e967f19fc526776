"""How far does each method get, and what does it have to know? Each rung with its settings.

    python -m grpo.experiments.ladder out-ladder    # some two hours on one core; resumable
    python -m grpo.experiments.compare grpo/experiments/results/ladder.jsonl

`fair` chose the settings (rungs.jsonl has the runs that chose), but the slow −q's were chosen by
hand, and two rungs are files as they stand. A rung has five seeds, on 12,000 inputs of the half
that's reported, and three seeds where it has 2,000 updates instead of 400. The runs go to
grpo/experiments/results/ladder.jsonl. The first rung is what the others are compared with.
"""

from pathlib import Path

from data.files import PROJECT
from data.user_mistake import Mistake, run_program
from grpo.experiments.fair import report
from grpo.run.log import write_lines

GRPO = "--learning_rate=0.001 --eval_inputs=32"
ROUNDS = "supervised accepted --rate=0.004"
ONES_FIRST = "supervised slow --order=2-6-1-5-0-4 --inputs=25600 --updates=600"
RUNGS = {
    "GRPO, judge": f"config/grpo_config.py --kl_beta=0.1 {GRPO}",
    "−log q, any answer": "supervised any --updates=500 --rate=0.002",
    "−q, any answer": "supervised any --updates=2000 --power=1 --rate=0.0005",
    "−log Σ q, all answers": "supervised all --inputs=40000 --updates=400 --rounds=20 --rate=0.004",
    "−log q, easy convention": "supervised smallest --inputs=4096 --updates=2700 --rate=0.002",
    "−log q, base's convention": f"{ONES_FIRST} --share=0.3 --rate=0.004",
    "−log q, the same, if accepted": f"{ONES_FIRST} --share=0.2 --rate=0.002 --reward=judge",
    "−log q, search": "supervised search --inputs=10000 --updates=2000 --rate=0.002",
    "40 rounds, judge": f"{ROUNDS} --inputs=25600 --updates=400 --rounds=40",
    "GRPO, judge, the file": f"config/grpo_config.py {GRPO}",
    "GRPO, rule, the file": f"config/rule.py {GRPO}",
    "GRPO, chain": f"config/chain.py --kl_beta=0.5 {GRPO}",
}
LONGER = {
    "GRPO, judge, 2,000 updates": f"config/grpo_config.py --kl_beta=0.1 --max_iters=1000 {GRPO}",
    "GRPO, rule, 2,000 updates": f"config/rule.py --max_iters=1000 {GRPO}",
    "200 rounds, judge": f"{ROUNDS} --inputs=128000 --updates=2000 --rounds=200",
}


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise Mistake("name a folder for the runs: python -m grpo.experiments.ladder out-ladder")
    folder = Path(arguments[0])
    lines = report(folder, RUNGS, range(1, 6)) + report(folder, LONGER, range(1, 4))
    write_lines(PROJECT / "grpo/experiments/results/ladder.jsonl", lines)


if __name__ == "__main__":
    run_program(main, __doc__)
