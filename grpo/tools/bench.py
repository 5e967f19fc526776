"""Time a step on this machine, and the two operations that the CUDA kernel can do.

    python -m grpo.tools.bench                        # takes minutes on 2 CPU cores

It prints medians in milliseconds, and each median divided by the first one of its group.

step        measures `grpo_step` in the default experiment, but with 16 inputs and one update for
            each rollout. It also measures the judge alone on the same completions. Both run eager
            and compiled.
operations  measures `sample_completions`, and `logprobs` with its gradient, on 64 inputs of 64
            characters, all of them blanks. Both run eager and compiled. Where the CUDA kernel runs,
            we measure it too, as `fused`.

Shapes: B inputs, T characters, G completions of each input, V characters of vocabulary.
"""

from functools import partial
from types import SimpleNamespace

import torch
from torch.utils.benchmark import Timer

from grpo.batch import draw_batch
from grpo.cuda import kernel
from grpo.optimizer import Optimizer, make_adamw
from grpo.policy import compute_logprobs, sample_completions
from grpo.reward import judge_logits
from grpo.run.config import Config
from grpo.run.load import load_run
from grpo.run.network import can_compile, pick_device
from train_grpo import grpo_step

SECONDS = 5  # for which each variant is timed, after one call that warms up and compiles
STEP = {"batch_size": 16, "num_iterations": 1, "learning_rate": 0}  # at rate 0 all calls are alike
B, T, V = 64, 64, 28  # the sizes in `operations`


def compare(title, variants):
    """Time the `variants`, {name: call}, and print a line for each of them."""
    print(title)
    first = None
    for name, call in variants.items():
        call()
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        median = timer.blocked_autorange(min_run_time=SECONDS).median
        first = first or median
        print(f"  {name:22s}{1000 * median:10.2f} ms{median / first:8.2f}")


def prepare(config, device):
    """Make two functions to time: a step, and the judge alone on the same completions."""
    run = load_run(config, config.generator_checkpoint)
    policy, reference, _, judge = run.models
    optimizer = Optimizer(make_adamw(policy.network, config), config.grad_clip)
    batch = draw_batch(run.train, config, 0, device)
    step = partial(grpo_step, policy, reference, run.rewards, optimizer, batch, config)
    rollout, _ = step()
    return step, partial(judge_logits, judge, rollout.fills.completions)


def step(G, device):
    variants = {}
    for mode in ["eager", "compiled"] if can_compile(device.type) else ["eager"]:
        config = Config(group_size=G, compile=str(mode == "compiled").lower(), **STEP)
        variants[f"step, {mode}"], variants[f"judge alone, {mode}"] = prepare(config, device)
    compare(f"step, G = {G}", variants)


def gradient(compute, logits, *others):
    """Return the gradient of the sum of all logp, kl and entropy with respect to `logits`."""
    logp, _, kl, entropy = compute(logits, *others)
    return torch.autograd.grad(logp.sum() + kl.sum() + entropy.sum(), logits)


def operations(G, device):
    logits, ref_logits = torch.randn(2, B, T, V, device=device)  # (B,T,V), (B,T,V)
    mask = torch.ones(B, T, device=device).bool()  # (B,T)
    uniforms = torch.rand(B, G, T, 2, device=device)  # (B,G,T,2)
    config = Config(temperature=0.8, top_p=0.95)
    draw_from = (logits, mask.long(), mask, uniforms, config)
    completions, kept = sample_completions(*draw_from)  # (B,G,T), (B,T,V)
    score = (logits.clone().requires_grad_(), ref_logits, completions, kept, mask, 0.8)

    variants = {"eager": (sample_completions, compute_logprobs)}
    if can_compile(device.type):
        variants["compiled"] = [torch.compile(f, dynamic=False) for f in variants["eager"]]
    if (
        kernel.choose(Config(dtype="float32"), device, SimpleNamespace(vocab_size=V, n_latent=1))
        == "cuda"
    ):
        variants["fused"] = (kernel.sample_completions, kernel.logprobs)
    sample = {name: partial(f, *draw_from) for name, (f, _) in variants.items()}
    compare(f"sample_completions, G = {G}", sample)
    scored = {name: partial(gradient, f, *score) for name, (_, f) in variants.items()}
    compare(f"logprobs and its gradient, G = {G}", scored)


def main():
    device = pick_device("auto")
    print(f"{device}, {torch.get_num_threads()} threads")
    for part in (step, operations):
        for G in (16, 32):
            torch.compiler.reset()
            part(G, device)


if __name__ == "__main__":
    main()
