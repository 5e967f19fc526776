"""Time the parts of a training step on this device.

    python -m grpo.tools.bench config/grpo_config.py

Takes config files and flags as train_grpo.py does. It prints the median milliseconds of each part,
and its share of the whole step. What's left over is the updates: forward, backward and AdamW.
"""

import sys
from functools import partial

import torch
from torch.utils.benchmark import Timer

from data.user_mistake import exit_on_mistake
from grpo.batch import draw_batch
from grpo.optimizer import Optimizer, make_adamw
from grpo.run.config import load_config
from grpo.run.load import load_run
from grpo.run.network import pick_device
from train_grpo import grpo_step

SECONDS = 3  # for which each part is timed, after a first call that warms up and compiles


def median(call) -> float:
    """Return the median seconds of a call. On a GPU the timer waits for it to finish."""
    call()
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=SECONDS).median


@torch.no_grad()
def make_parts(run, batch, config):
    """List what a step does before its updates: -> {name: a call}."""
    policy, reference, rewards = run.models.policy, run.models.reference, run.rewards
    q, q_ref = policy(batch), reference(batch)
    fills = q.sample()
    return {
        "policy's forward pass": partial(policy, batch),
        "reference's forward pass": partial(reference, batch),
        "draw": q.sample,
        "score": partial(q.score, fills, q_ref),
        "reward": partial(rewards, fills.completions, batch),
    }


def main(arguments):
    with exit_on_mistake("bench"):
        config = load_config(arguments)
        device = pick_device(config.device)
        run = load_run(config, config.generator_checkpoint)
        optimizer = Optimizer(make_adamw(run.models.policy.network, config), config.grad_clip)
        optimizer.set_learning_rate(0)  # so that all calls are alike
        batch = draw_batch(run.train, config, 0, device)
        models = run.models.policy, run.models.reference, run.rewards
        parts = {"whole step": partial(grpo_step, *models, optimizer, batch, config)}
        parts |= make_parts(run, batch, config)
        print(f"{device}, {torch.get_num_threads()} threads")
        whole = None
        for name, call in parts.items():
            with torch.set_grad_enabled(whole is None):
                seconds = median(call)
            whole = whole or seconds
            print(f"  {name:26s}{1000 * seconds:10.2f} ms{seconds / whole:8.1%}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
