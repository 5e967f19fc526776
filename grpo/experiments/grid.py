"""What does each method have to be told? Change what scores mean, and see who notices.

    python -m grpo.experiments.grid out-grid        # some four hours on one core; resumable
    python -m grpo.experiments.compare grpo/experiments/results/grid.jsonl

Sums, with the rule's reward as it is (1 if correct, else 0), plus a constant of each input (from -3
to 3), times a unit of each input (from a tenth to ten), or both (grpo/experiments/rewards.py).
Whatever compares the completions of one input shouldn't notice a constant: r - mean(r) has lost it.
And (r - mean(r)) / deviation(r) is the same for a·r + b, so it shouldn't notice a unit either.

Each method has settings that were chosen with the reward as it is, and isn't tuned again. A cell
has five seeds, on 12,000 inputs of the half that's reported. Where a reward can't change anything,
because the method gets the very same numbers from it but for rounding and the 1e-4 that's added to
a deviation, it isn't run again. The runs go to grpo/experiments/results/grid.jsonl.

grid_again.jsonl next to it has what fell, tuned anew or for four times the steps, by `fair`, as in

    python -m grpo.experiments.fair out-tuned config/rule.py --baseline=none --scale_rewards=none \\
        --reward=grpo/experiments/rewards.py:constant --kl_beta=.02,.1 --seeds=1-5
    python -m grpo.experiments.fair out-long config/rule.py --baseline=none --scale_rewards=none \\
        --reward=grpo/experiments/rewards.py:constant --kl_beta=.02 --learning_rate=5e-4 \\
        --max_iters=560 --seeds=1-5
"""

from pathlib import Path

from data.files import PROJECT
from data.user_mistake import Mistake, run_program
from grpo.experiments.fair import report
from grpo.run.log import write_lines

SEEDS = range(1, 6)
OWN = "--reward=grpo/experiments/rewards.py"
CRITIC = "--reward=grpo/experiments/critic.py"
RULE = "config/rule.py --eval_inputs=32"
UNDIVIDED = f"{RULE} --scale_rewards=none --kl_beta=0.02"
ROUNDS = f"--inputs=25600 --updates=400 --rounds=40 --rate=0.002 {OWN}"
SEARCH = f"--inputs=10000 --updates=2000 --rate=0.002 {OWN}"
REWARDS = {"as it is": "successes", "constant": "constant", "unit": "unit", "both": "both"}
# {method: (flags, {reward: the one that gives it the same numbers})}
METHODS = {
    "GRPO, centered and divided": (
        f"{RULE} --kl_beta=0.05 --learning_rate=0.0005 {OWN}",
        {"constant": "as it is", "unit": "as it is"},  # `both` is run, to see it
    ),
    "GRPO, centered": (
        f"{UNDIVIDED} --learning_rate=0.0005 {OWN}",
        {"constant": "as it is", "both": "unit"},
    ),
    "rounds, above the group's mean": (
        f"supervised above {ROUNDS}",
        {"constant": "as it is", "unit": "as it is", "both": "as it is"},
    ),
    "rounds, above 0": (f"supervised accepted {ROUNDS}", {"unit": "as it is"}),
    "search, first above 0": (f"supervised search {SEARCH}", {"unit": "as it is"}),
    "search, best of all tried": (
        f"supervised scan {SEARCH}",
        {"constant": "as it is", "unit": "as it is", "both": "as it is"},
    ),
    "no baseline": (f"{UNDIVIDED} --baseline=none --learning_rate=0.0005 {OWN}", {}),
    "a critic": (f"{UNDIVIDED} --baseline=none --learning_rate=0.0005 {CRITIC}", {}),
}


def cells() -> dict[str, str]:
    """List what's run, the plain reward first: -> {method and reward: command}."""
    found = {}
    for reward, function in REWARDS.items():
        for method, (flags, same) in METHODS.items():
            if reward not in same:
                found[f"{method}, {reward}"] = f"{flags}:{function}"
    critic, _ = METHODS["a critic"]
    return found | {"a critic, predictable": f"{critic}:predictable"}


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise Mistake("name a folder for the runs: python -m grpo.experiments.grid out-grid")
    lines = report(Path(arguments[0]), cells(), SEEDS)
    write_lines(PROJECT / "grpo/experiments/results/grid.jsonl", lines)


if __name__ == "__main__":
    run_program(main, __doc__)
