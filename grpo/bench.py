"""How long a GRPO step takes on this machine, and the two operations that a GPU has fused.

    python -m grpo.bench                        # all of it: minutes on 2 CPU cores
    python -m grpo.bench --only step --rounds 3 --json bench.json

Letters: B masked inputs, T characters, G group size, V vocabulary, C width, K values of the latent.

Variants take turns in one process, after a round that does not count. [a b c] are the quartiles
over the rounds; a ratio is taken within each round first. `again` is the first variant timed
twice: what its ratio differs from 1 is noise. Wall clock on a CPU, the time between two events on
CUDA.

step        One turn of train_grpo.py's loop in the default experiment (config/grpo_config.py), but
            with 16 inputs, one update per rollout, in float32, and with learning rate 0, so that
            all rounds do the same.
              shared       grpo_step: each input once through generator and reference
              plain_judge  all B·G completions are judged, in one batch, on a CPU too
              repeated     the usual way: each input G times through generator and reference
              latent       with the shipped coin: a latent of 8 values
              inputs_64    with B = 64 instead of 16; over_shared of 4 is in proportion
              group_64     with G = 64
              length_16    with T = 16 instead of 64
              bfloat16     every forward pass in bfloat16, where the machine multiplies it
              compiled     every forward pass compiled, in the dtype that a run would take
              judge_alone  B·G rows in one batch through the judge, in float32, and nothing else
            over_shared, over_judge_alone: its time ÷ that of `shared`, of `judge_alone`.
            reward_off: by how much its judge's scores of the completions of `shared` are off, the
            mean and the largest. The milliseconds of the phases, and distinct, the different
            completions ÷ all, are the last round's. kept_MiB: what the backward pass needs kept,
            weights included.
operations  `sample_completions`, `stats`, and `stats` with its gradient: eager, compiled, and fused
            on CUDA; every row a blank.
startup     Seconds from the command `python train_grpo.py` to its first line of metrics.jsonl, not
            compiled, and compiled with nothing in the compiler's cache.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial

import numpy as np
import torch
from tqdm import tqdm

from grpo import kernel
from grpo.optimizer import Optimizer
from grpo.plumbing import setup
from grpo.plumbing.checkpoint import write
from grpo.plumbing.config import Parser, exit_on_mistake, load_config
from grpo.plumbing.log import Clock
from grpo.reward import Rewards, judge_scores
from grpo.rollout import as_policy, draw_inputs
from grpo.sampling import sample_completions
from grpo.stats import stats
from grpo.words import lexicon
from train_grpo import grpo_step

USUAL = {
    "batch_size": 16,
    "num_iterations": 1,
    "learning_rate": 0,
    "dtype": "float32",
}
VARIANTS = {  # of the step: what each sets; two do more, see `Turn`
    "shared": {},
    "again": {},
    "plain_judge": {},
    "repeated": {},
    "latent": {"generator_checkpoint": "model/pretrained/generator_coin.pt"},
    "inputs_64": {"batch_size": 64},
    "group_64": {"group_size": 64},
    "length_16": {"block_size": 16},
    "bfloat16": {"dtype": "bfloat16"},
    "compiled": {"dtype": "auto", "compile": "true"},
}


def quartiles(times, others=1):
    """Of the times, or of their ratio within each round."""
    return np.percentile(np.divide(times, others), (25, 50, 75)).tolist()


def compare(measures, rounds, *others):
    """A row for each variant: its milliseconds, and their ratio to those of the `others`."""
    times = {name: [] for name in measures}
    with tqdm(total=(1 + rounds) * len(measures), leave=False, dynamic_ncols=True) as bar:
        for i in range(1 + rounds):
            for name, measure in measures.items():
                bar.set_description(name)
                ms = measure()
                bar.update()
                if i > 0:  # the first round warms up, compiles
                    times[name].append(ms)
    for name in measures:
        row = {"variant": name, "ms": quartiles(times[name])}
        for other in others:
            row[f"over_{other}"] = quartiles(times[name], times[other])
        yield row


def milliseconds(device, call, *arguments):
    if device.type == "cuda":
        # Empty the L2 cache. Reading leaves nothing behind that would be written back during the
        # call, and takes so long that the call is launched meanwhile: Python's time is not counted.
        other = torch.empty(1 << 26, device=device)  # 256 MiB
        for _ in range(16):
            other.sum()
    clock = Clock(device)
    call(*arguments)
    clock.mark("call")
    return clock.read()["step_ms"]


def flags(settings):
    return [f"--{name}={value}" for name, value in settings.items()]


def repeat(policy, group_size):
    """The same logits, from `group_size` copies of each input."""

    def run(tokens):
        logits = policy(tokens.repeat_interleave(group_size, dim=0))  # (B·G,T,V)
        return logits.unflatten(0, (-1, group_size)).mean(dim=1)  # (B,T,V)

    return run


class Turn:
    """One turn of train_grpo.py's loop, without a run -> its milliseconds.

    `figures`, `rollout` and `completions` tell of the last one.
    """

    def __init__(self, config, device, variant="shared"):
        config.dtype = setup.pick_dtype(config.dtype, device)
        self.data, _ = setup.load_data(config.dataset, config.block_size, config.prompts_file)
        vocabulary = self.data.vocabulary
        words = lexicon(self.data.decode(self.data.tokens))
        config.kernel = kernel.choose(config.kernel, device, len(vocabulary), config.group_size)
        *generators, judge, _ = setup.load_models(config, vocabulary)
        policies = [as_policy(generator.to(device), device, config) for generator in generators]
        if variant == "repeated":
            policies = [repeat(policy, config.group_size) for policy in policies]
        self.judge = setup.forward(judge.to(device), device, config)
        rewards = Rewards(self.judge, config, vocabulary, words, device)
        if variant == "plain_judge":
            rewards.judges = {}
            rewards.functions["judge"] = self.judge_all
        self.models = (*policies, rewards, Optimizer(generators[0], config))
        self.config = config
        self.to_device = partial(setup.to_device, device=device)
        self.clock = Clock(device)

    def judge_all(self, completions, *_):
        """The judge's reward without anything clever: all completions, in one batch."""
        logits = self.judge(completions.flatten(0, 1))  # (B·G,T)
        return logits.float().sigmoid().view(completions.shape)

    def __call__(self):
        self.clock.start()
        inputs = draw_inputs(self.data, self.config, 0, self.to_device)
        self.clock.mark("data")
        self.rollout, _ = grpo_step(*self.models, inputs, self.config, self.clock)
        self.figures = self.clock.read()
        self.completions = self.rollout.completions.reshape(inputs.uniforms.shape)  # (B,G,T)
        return self.figures["step_ms"]


def usual_turn(device, variant="shared", **changes):
    return Turn(load_config(flags(USUAL | changes | VARIANTS[variant])), device, variant)


def can_run(variant, device):
    if variant == "bfloat16":
        return setup.pick_dtype("auto", device) == "bfloat16"
    return variant != "compiled" or setup.can_compile()


def kept_memory(turn):
    """MiB that the backward pass needs kept."""
    kept = {}

    def keep(x):
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        turn()
    return sum(kept.values()) / 2**20


def bench_step(args, device):
    for G in args.G:
        torch.compiler.reset()
        turns = {}
        for name in VARIANTS:
            if can_run(name, device):
                turns[name] = usual_turn(device, name, group_size=G)
        shared = turns["shared"]
        shared()  # makes the completions
        scores = judge_scores(shared.judge, shared.completions)  # (B,G,T)
        alone = partial(milliseconds, device, shared.judge_all, shared.completions)
        measures = {**turns, "judge_alone": alone}
        for row in compare(measures, args.rounds, "shared", "judge_alone"):
            turn = turns.get(row["variant"])
            if turn:
                off = judge_scores(turn.judge, shared.completions) - scores  # (B,G,T)
                off = off.mean(dim=-1).abs()  # (B,G)
                row["reward_off"] = [off.mean().item(), off.max().item()]
                row |= turn.figures | {"kept_MiB": kept_memory(turn)}
                fills = turn.completions.flatten(0, 1)  # (B·G,T)
                row["distinct"] = len(fills.unique(dim=0)) / len(fills)
            yield {"G": G} | row


def with_gradient(compute, logits, *others):
    """The gradient of `stats`, as if what it returns came in as gradients."""
    z = logits.detach().requires_grad_()  # (B,T,V)
    logp, _, kl, entropy = compute(z, *others)
    return torch.autograd.grad((logp, kl, entropy), z, (logp, kl, entropy))


def bench_operations(args, device, T=64):
    B = 64 if device.type == "cpu" else 1024
    for dtype, V, G in itertools.product(args.dtype, args.V, args.G):
        torch.compiler.reset()  # after eight shapes of one function the ninth would be left eager
        logits, ref_logits = torch.randn(
            2, B, T, V, device=device, dtype=getattr(torch, dtype)
        )  # (B,T,V), (B,T,V)
        mask = torch.ones(B, T, device=device).bool()  # (B,T)
        uniforms = torch.rand(B, G, T, device=device)  # (B,G,T)
        draw_from = (logits, mask.long(), mask, uniforms, 0.8, 0, 0.95)
        completions, kept = sample_completions(*draw_from)  # (B,G,T), (B,T,V)
        inputs = (logits, ref_logits, completions.contiguous(), kept, mask)

        variants = {"eager": (sample_completions, stats), "again": (sample_completions, stats)}
        if setup.can_compile():
            variants["compiled"] = [torch.compile(f, dynamic=False) for f in variants["eager"]]
        if kernel.choose("auto", device, V, G) == "cuda":
            variants["fused"] = (kernel.sample_completions, kernel.stats)
        operations = {"sample": {}, "stats": {}, "stats+grad": {}}
        timed = partial(milliseconds, device)
        for name, (draw, compute) in variants.items():
            operations["sample"][name] = partial(timed, draw, *draw_from)
            operations["stats"][name] = partial(timed, compute, *inputs)
            operations["stats+grad"][name] = partial(timed, with_gradient, compute, *inputs)
        for operation, measures in operations.items():
            for row in compare(measures, args.rounds, "eager"):
                yield {"operation": operation, "dtype": dtype, "V": V, "G": G} | row


def bench_startup(args, device):
    for compiled in ("false", "true"):
        with tempfile.TemporaryDirectory() as out:
            settings = {"device": device, "out_dir": out, "max_iters": 1, "compile": compiled}
            command = [sys.executable, "train_grpo.py", "--eval_inputs=16", *flags(settings)]
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = out
            begin = time.time()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            end = os.stat(f"{out}/metrics.jsonl").st_mtime
        yield {"compiled": compiled, "seconds": end - begin}


PARTS = {"operations": bench_operations, "step": bench_step, "startup": bench_startup}


def show(rows):
    """Print each row as soon as it is there."""
    for row in rows:
        for key, value in row.items():
            short = value if isinstance(value, str) else np.round(value, 4)
            print(key, short, end="  ")
        print()
        yield row


def main(argv=None):
    parser = Parser(
        prog="python -m grpo.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several = partial(parser.add_argument, nargs="+")
    several("--only", choices=PARTS, default=PARTS)
    several("--G", choices=(8, 16, 32), type=int, default=[16, 32])
    several("--V", choices=(28, 96, 256, 1024), type=int, default=[28, 96])
    several("--dtype", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json")
    with exit_on_mistake("bench"):
        args = parser.parse_args(argv)
        if args.rounds < 1:
            raise ValueError(f"--rounds={args.rounds} measures nothing; take 1 or more")
        device = setup.pick_device(args.device)
        if args.json:
            write(args.json, b"{}")  # what cannot be written is noticed now
        usual_turn(device)  # finds what is missing before anything is timed
        result = {"device": args.device, "threads": torch.get_num_threads()}
    print(result)
    for part in args.only:
        result[part] = list(show(PARTS[part](args, device)))
    if args.json:
        write(args.json, json.dumps(result).encode())


if __name__ == "__main__":
    main()
