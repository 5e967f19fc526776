"""Measure a variant of GRPO fairly: with a β of its own, over several seeds, on sums.

    python -m grpo.tools.fair out-no-baseline config/rule.py --baseline=none --scale_rewards=none
    python -m grpo.tools.fair out-no-kl config/rule.py --betas=0
    python -m grpo.tools.fair out-one config/rule.py --num_iterations=1 --rates=5e-4,1e-3,2e-3

Of held-out sums, half are for choosing settings, and half for reporting. Each β gets a run with a
seed that isn't reported, on the half for choosing. If some come close to the best, a second seed
decides between those. The same goes for learning rates, at the best β. What's chosen gets the seeds
that are reported, on the other half.

Each run has a folder in that of the variant and is made only once, so you can interrupt this. A
line of results.jsonl is a reported run. grpo/claims.md has what came of many variants.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import torch

from data.user_mistake import Mistake, exit_on_mistake
from grpo.evaluation import exact
from grpo.evaluation.__main__ import load_run
from grpo.run.checkpoint import write
from grpo.run.config import Parser, load_config
from grpo.run.log import read_lines
from grpo.run.runs import read_json
from train_grpo import main as train

UNREPORTED = 9, 10  # the seeds that choose
CLOSE = 0.02  # this far from the best, and the second seed has to decide
K = [2**i for i in range(13)]  # of pass@k
COURSE = "correct", "entropy", "grad_norm"  # metrics of each step


def numbers(text: str) -> list[float]:
    """Read numbers such as 0.5,1."""
    return [float(number) for number in text.split(",")]


def run(args, half: str, seed: int, tuned: dict[str, float]) -> Path:
    """Make a run, unless it's there, and return its folder."""
    name = "-".join([half, *map(str, tuned.values()), str(seed)])
    out_dir = Path(args.out_dir, name)
    if not (out_dir / "evaluation.json").exists():
        given = tuned | {"seed": seed, "out_dir": out_dir}
        given["dataset"] = "sums" if half == "report" else "sums_choose"
        train([*args.settings, *(f"--{key}={value}" for key, value in given.items())], quiet=True)
    return out_dir


def choose(args, candidates: list[dict[str, float]]) -> dict[str, float]:
    """Return the candidate with the most correct on the half for choosing."""
    left = {i: 0.0 for i in range(len(candidates))}  # {number: correct, over the seeds so far}
    for seed in UNREPORTED:
        if len(left) > 1:
            for i in left:
                out_dir = run(args, "choose", seed, candidates[i])
                left[i] += read_json(out_dir, "evaluation.json")["after, sampled"]["correct"]
            best = max(left.values())
            left = {i: correct for i, correct in left.items() if correct >= best - CLOSE}
    return candidates[max(left, key=left.get)]


def describe(out_dir: Path) -> dict:
    """Sum a run up: its row of the table, exact pass@k, and its course, in means of ten steps."""
    _, models, _, held_out = load_run(out_dir, {"reward": "correct"})
    with torch.no_grad():
        q = exact.probabilities(models.policy(held_out.batch), held_out.answers)
    p = torch.stack([each.sum() for each in q]).clamp(max=1)  # (N,) correct, for each input
    steps = read_lines(out_dir / "metrics.jsonl")
    tens = [steps[i : i + 10] for i in range(0, len(steps), 10)]
    return {
        **read_json(out_dir, "evaluation.json")["after, sampled"],
        "pass": [(1 - (1 - p) ** k).mean().item() for k in K],
        "lost": (p < 1e-6).double().mean().item(),  # inputs without hope
        "course": {name: [mean(step[name] for step in ten) for ten in tens] for name in COURSE},
    }


def check(args) -> None:
    """Raise a Mistake if a run would, or if the folder holds anything else. Else claim it."""
    for name in ("kl_beta", "seed", "dataset", "out_dir"):
        if any(flag.startswith(f"--{name}=") for flag in args.settings):
            raise Mistake(f"fair sets {name} itself; leave it out (see --betas and --seeds)")
    tried = {"kl_beta": args.betas, "learning_rate": args.rates, "seed": args.seeds}
    flags = [f"--{name}={value:g}" for name, values in tried.items() for value in values]
    for flag in flags:
        load_config([*args.settings, flag])
    settings = asdict(load_config(args.settings))
    if settings["dataset"] != "sums":
        raise Mistake(f"fair is only for sums, not for dataset={settings['dataset']}")
    folder = Path(args.out_dir)
    claimed = folder / "settings.json"
    if folder.exists() and (not claimed.exists() or json.loads(claimed.read_bytes()) != settings):
        raise Mistake(f"out_dir={folder} holds something else; name another folder")
    write(claimed, json.dumps(settings).encode())


def main(arguments: list[str]) -> None:
    parser = Parser(prog="python -m grpo.tools.fair", allow_abbrev=False)
    add = parser.add_argument
    add("out_dir", help="the folder of this variant; config files and flags of a run follow")
    grid = [0.01, 0.02, 0.05, 0.1]
    add("--betas", type=numbers, default=grid, help="values of kl_beta to choose from")
    add("--rates", type=numbers, default=[], help="values of learning_rate to choose from")
    add("--seeds", type=numbers, default=[1, 2, 3, 4, 5], help="the seeds to report")
    with exit_on_mistake("fair"):
        args, args.settings = parser.parse_known_args(arguments)
        check(args)
        tuned = choose(args, [{"kl_beta": beta} for beta in args.betas])
        if args.rates:
            tuned = choose(args, [tuned | {"learning_rate": rate} for rate in args.rates])
        lines = []
        for seed in map(int, args.seeds):
            lines.append(tuned | {"seed": seed} | describe(run(args, "report", seed, tuned)))
        content = "".join(json.dumps(line) + "\n" for line in lines)
        write(Path(args.out_dir, "results.jsonl"), content.encode())
        correct = [line["correct"] for line in lines]
        chosen = ", ".join(f"{name}={value}" for name, value in tuned.items())
        print(f"{chosen}: correct {mean(correct):.3f} ({min(correct):.3f} to {max(correct):.3f})")


if __name__ == "__main__":
    main(sys.argv[1:])
