"""What judges say of the text, of the base model's draws and of runs' fills: mean P(real).

    PYTHONPATH=. python .github/judges.py out-fooled out-fooled-again

The judges are those of the runs, and the shipped one; the inputs those of the default table.
"""

import sys

import torch
from grpo.plumbing.setup import forward, load_data
from grpo.policy import sample
from grpo.rollout import in_batches

from grpo.evaluation.evaluate import hold_out
from grpo.plumbing.checkpoint import LATEST, load_model, read
from grpo.plumbing.config import Config
from grpo.reward import log_odds, mean_over_blanks

CPU = torch.device("cpu")


@torch.no_grad()
def main(runs):
    config = Config()
    train, val = load_data(config.dataset, config.block_size)
    held_out = hold_out(config, train, val, CPU)
    fills = {"text": held_out.tokens[:, None]}
    judges = {}
    files = [config.generator_checkpoint, *(f"{run}/{LATEST}" for run in runs)]
    for file in files:
        generator = forward(load_model(file, "generator", train.vocabulary), CPU, config)
        logits = in_batches(generator, held_out.masked, 32)
        fills[file] = sample(logits, held_out, config).completions[:, :2]
    for run in runs:
        judges[run] = read(f"{run}/{LATEST}")["training"]["config"]["judge_checkpoint"]
    judges["shipped"] = config.judge_checkpoint
    for name, file in judges.items():
        judge = forward(load_model(file, "judge", train.vocabulary), CPU, config)
        print(f"judge of {name}")
        for title, completions in fills.items():
            scores = log_odds(judge, completions, held_out.mask).sigmoid()
            print(f"  {mean_over_blanks(scores, held_out.mask).mean():.3f}  {title}")


if __name__ == "__main__":
    main(sys.argv[1:])
