"""Time a step on this machine, and the two operations that the CUDA kernel can do.

    python -m grpo.tools.bench                        # takes minutes on 2 CPU cores

The variants, such as eager and compiled, take turns in one process. A first round warms up and does
not count. Seven more follow. For each variant we print its median time in milliseconds. We also
divide its time in each round by the first variant's time in that round, and print the median of
these ratios.

step        measures `grpo_step` in the default experiment, but with 16 inputs and one update for
            each rollout. It also measures the judge alone on the same completions. Both run eager
            and compiled.
operations  measures `sample_completions`, and `logprobs` with its gradient, on 64 inputs of 64
            characters, all of them blanks. Both run eager and compiled. Where the CUDA kernel runs,
            we measure it too, as `fused`.

Shapes: B inputs, T characters, G completions of each input, V characters of vocabulary.
"""

from functools import partial

import numpy as np
import torch

from grpo.batch import draw_batch
from grpo.cuda import kernel
from grpo.distributed import pick_device
from grpo.logprobs import compute_logprobs
from grpo.optimizer import Optimizer
from grpo.plumbing import load
from grpo.plumbing.config import Config
from grpo.plumbing.log import Clock
from grpo.policy import Policy, can_compile, make_judge, pick_dtype
from grpo.reward import judge_logits
from grpo.sampling import Sampling, sample_completions
from train_grpo import grpo_step

ROUNDS = 7
STEP = {"batch_size": 16, "num_iterations": 1, "learning_rate": 0}  # at rate 0 all rounds are alike
B, T, V = 64, 64, 28  # the sizes in `operations`


def race(title, variants, device):
    """Time the `variants`, {name: call}, in several rounds, and print a line for each of them."""
    clock = Clock(device)
    times = {name: [] for name in variants}
    for _ in range(1 + ROUNDS):
        for name, call in variants.items():
            clock.start()
            call()
            times[name].append(clock.read()["step_ms"])
    print(title)
    first, *_ = times.values()
    for name, ms in times.items():
        ratio = np.median(np.divide(ms, first)[1:])  # the first round warms up and compiles
        print(f"  {name:22s}{np.median(ms[1:]):10.2f} ms{ratio:8.2f}")


def prepare(config, device):
    """Make two functions to time: a step, and the judge alone on the same completions."""
    config.dtype = pick_dtype(config.dtype, device)
    data, _ = load.load_data(config.dataset, config.block_size)
    config.kernel = kernel.choose(config, device, len(data.vocabulary))
    generator, reference, judge = load.load_models(config, data.vocabulary)
    optimizer = Optimizer(generator.to(device), config)
    policy = Policy(generator, config, device)
    reference = Policy(reference, config, device)
    judge = make_judge(judge, config, device)
    rewards = load.load_rewards(config, judge, data.vocabulary, set(), device)
    batch = draw_batch(data, config, 0, device)
    step = partial(grpo_step, policy, reference, rewards, optimizer, batch, config)
    rollout, _ = step()
    return step, partial(judge_logits, judge, rollout.fills.completions)


def step(G, device):
    variants = {}
    for mode in ["eager", "compiled"] if can_compile() else ["eager"]:
        config = Config(group_size=G, compile=str(mode == "compiled").lower(), **STEP)
        variants[f"step, {mode}"], variants[f"judge alone, {mode}"] = prepare(config, device)
    race(f"step, G = {G}", variants, device)


def gradient(compute, logits, *others):
    """Return the gradient of the sum of all logp, kl and entropy with respect to `logits`."""
    logp, _, kl, entropy = compute(logits, *others)
    return torch.autograd.grad(logp.sum() + kl.sum() + entropy.sum(), logits)


def operations(G, device):
    logits, ref_logits = torch.randn(2, B, T, V, device=device)  # (B,T,V), (B,T,V)
    mask = torch.ones(B, T, device=device).bool()  # (B,T)
    uniforms = torch.rand(B, G, T, device=device)  # (B,G,T)
    sampling = Sampling(temperature=0.8, top_p=0.95)
    draw_from = (logits, mask.long(), mask, uniforms, sampling)
    completions, kept = sample_completions(*draw_from)  # (B,G,T), (B,T,V)
    score = (logits.clone().requires_grad_(), ref_logits, completions, kept, mask, 0.8)

    variants = {"eager": (sample_completions, compute_logprobs)}
    if can_compile():
        variants["compiled"] = [torch.compile(f, dynamic=False) for f in variants["eager"]]
    if kernel.choose(Config(dtype="float32"), device, V) == "cuda":
        variants["fused"] = (kernel.sample_completions, kernel.logprobs)
    sample = {name: partial(f, *draw_from) for name, (f, _) in variants.items()}
    race(f"sample_completions, G = {G}", sample, device)
    scored = {name: partial(gradient, f, *score) for name, (_, f) in variants.items()}
    race(f"logprobs and its gradient, G = {G}", scored, device)


def main():
    device = pick_device("auto")
    print(f"{device}, {torch.get_num_threads()} threads")
    for part in (step, operations):
        for G in (16, 32):
            torch.compiler.reset()
            part(G, device)


if __name__ == "__main__":
    main()
