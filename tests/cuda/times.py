"""Time the kernel, and the parts of a training step.

    python -m tests.cuda.times

Without a GPU the sizes are tiny, and all you learn is that this file runs.

Shapes: B masked inputs, T characters, G completions of each input, V vocabulary.
"""

import time
from statistics import median
from types import SimpleNamespace

import torch
from torch.utils.benchmark import Timer

import train_grpo
from grpo.batch import draw_batch
from grpo.kernel import FusedLogProbs
from grpo.metrics import rollout_metrics
from grpo.optimizer import Optimizer, make_adamw
from grpo.policy import ComputeLogProbs
from grpo.run.config import load_config
from grpo.run.load import load_data, load_models, load_rewards

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if GPU else "cpu")
SIZES = [(128, 16), (1024, 64)] if GPU else [(8, 4)]  # B, G
STEPS = 40 if GPU else 2
T = 11
parts = {}  # {name: seconds of each call}


def timed(name, function):
    """Make `function` note in `parts` how long each call takes, on the GPU too."""
    wait = torch.cuda.synchronize if GPU else bool

    def call(*args, **kwargs):
        wait()
        began = time.perf_counter()
        result = function(*args, **kwargs)
        wait()
        parts.setdefault(name, []).append(time.perf_counter() - began)
        return result

    return call


def microseconds(call):
    call()  # warms up
    timer = Timer("call()", globals={"call": call})
    return 1e6 * timer.blocked_autorange(min_run_time=0.5 if GPU else 0.01).median


def time_kernel(name, compute, B, G, V):
    """Print how long `compute` takes for log q, and to differentiate it as well."""
    torch.manual_seed(0)
    mask = torch.rand(B, T, device=DEVICE) < 0.5  # (B,T)
    y = torch.randint(27, (B, G, T), device=DEVICE)
    logits, ref_logits = torch.randn(2, B, T, V, device=DEVICE)  # each (B,T,V)
    leaf = logits.clone().requires_grad_()

    def score(logits=logits):
        return compute(logits, ref_logits, y, mask, 1.0)

    def differentiate():
        logp, _, kl, entropy = score(leaf)
        torch.autograd.grad(logp.sum() + kl.sum() - entropy.sum(), leaf)

    took = " · ".join(f"{microseconds(each):.0f}" for each in (score, differentiate))
    print(f"B {B} G {G} V {V} {name}: score · score and gradient {took} µs")


def time_parts(B, G, *flags):
    """Print the parts of a step of the main command, each with the GPU's own time in it."""
    config = load_config([f"--batch_size={B}", f"--group_size={G}", *flags])
    models = load_models(config, DEVICE)
    train, held_out = load_data(config, models.base.network.vocab_size, DEVICE)
    rewards = load_rewards(config, models, held_out.rule, DEVICE)
    optimizer = Optimizer(make_adamw(models.policy.network, config), config.grad_clip)
    update = SimpleNamespace(step_if_finite=timed("optimizer", optimizer.step_if_finite))
    given = timed("policy", models.policy), timed("reference", models.reference)
    given += timed("rewards", rewards), update
    originals = train_grpo.grpo_loss, torch.Tensor.backward
    train_grpo.grpo_loss = timed("loss", train_grpo.grpo_loss)
    torch.Tensor.backward = timed("backward", torch.Tensor.backward)
    parts.clear()
    for step in range(STEPS):
        batch = timed("draw_batch", draw_batch)(train, config, step, DEVICE)
        rollout, *_ = timed("grpo_step", train_grpo.grpo_step)(*given, batch, config)
        timed("rollout_metrics", rollout_metrics)(rollout, held_out.rule)
    train_grpo.grpo_loss, torch.Tensor.backward = originals
    print(f"B {B} G {G} {' '.join(flags)}: ms of a call, and calls in a step")
    for name, seconds in parts.items():
        each = 1000 * median(seconds[len(seconds) // 4 :])  # without those that warm up
        print(f"  {name:16s}{each:9.2f} x {len(seconds) // STEPS}")


def main():
    name = torch.cuda.get_device_name() if GPU else "no GPU"
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    kernels = {"torch": ComputeLogProbs} | ({"cuda": FusedLogProbs} if GPU else {})
    for B, G in SIZES:
        for name, function in kernels.items():
            for V in 28, 40:
                time_kernel(name, function.apply, B, G, V)
            time_parts(B, G, f"--kernel={name}")


if __name__ == "__main__":
    main()
