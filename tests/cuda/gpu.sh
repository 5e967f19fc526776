#!/usr/bin/env bash
# Everything we'd like to ask a GPU, in ten minutes at most. From the repository's root:
#
#     bash tests/cuda/gpu.sh
#
# Each part writes its output to out-gpu/ (or to $OUT), and its last lines to the screen. A part
# that fails doesn't stop the next one, so look for the lines that begin with ==.
export OUT=${OUT:-out-gpu} PYTHONUNBUFFERED=1 PYTHONPATH=.
mkdir -p "$OUT"

part() {  # part SECONDS NAME COMMAND...
    local limit=$1 name=$2
    shift 2
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
    echo "== $name: exit code $?"
    tail -n 24 "$OUT/$name.log" | cut -c1-160
}

cat >"$OUT/times.py" <<'END_OF_PYTHON'
"""Time what the kernel does, and see what share of a whole training step that is.

The networks have the default size and random weights, so nearly all completions differ, and the
judge has to read each of them. Late in a run it reads far fewer, and the shares are larger.

Shapes: B masked inputs, T characters, G completions of each input, V vocabulary.
"""

import sys

import torch
from torch.utils.benchmark import Timer

from grpo import kernel, policy
from grpo.batch import make_batch
from grpo.reward import judge_logits
from model.transformer import Generator, Judge, TransformerConfig
from train_grpo import Optimizer, grpo_step, load_config, make_adamw

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
T = 11


def milliseconds(call):
    call()  # warms up, and compiles
    return 1000 * Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=1).median


def operations(sample, compute, logits, ref_logits, batch):
    """Make a function that draws, scores and differentiates once."""
    leaf = logits.clone().requires_grad_()

    def call():
        y = sample(logits, batch.masked, batch.mask, batch.uniforms, 1.0)  # (B,G,T)
        logp, _, kl, entropy = compute(leaf, ref_logits, y, batch.mask, 1.0)
        torch.autograd.grad(logp.sum() + kl.sum() - entropy.sum(), leaf)

    return call


def step(kind, batch, V, G):
    """Make a function that takes a training step, compiled and in bfloat16."""
    config = load_config([f"--group_size={G}", f"--batch_size={len(batch.mask)}"])
    shape = TransformerConfig(vocab_size=V, block_size=T)
    networks = [network(shape).to(DEVICE) for network in (Generator, Generator, Judge)]
    generator, reference, judge = networks
    for network in networks:
        network.trunk.compile(dynamic=False)

    def distribution(network):
        return lambda batch: kind(*run(network, batch.masked, batch.words), batch, config)

    def run(network, *inputs):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return network(*inputs)

    def rewards(completions, batch):
        reward = judge_logits(lambda rows: run(judge, rows), completions)  # (B,G,T)
        return reward, {"judge": reward}

    models = distribution(generator), distribution(reference), rewards
    optimizer = Optimizer(make_adamw(generator, config), config.grad_clip)
    return lambda: grpo_step(*models, optimizer, batch, config)


print(f"torch {torch.__version__} on {torch.cuda.get_device_name() if DEVICE.type == 'cuda' else 'cpu'}")
print("milliseconds of sample + score + gradient, and their share of a step with the same code")
sizes = [(128, 16), (1024, 64)] if DEVICE.type == "cuda" else [(8, 4)]
for B, G in sizes:
    for V in 28, 40, 96:
        torch.manual_seed(0)
        torch.compiler.reset()
        mask = torch.rand(B, T) < 0.5  # (B,T)
        batch = make_batch(torch.randint(27, (B, T)), mask, mask.long(), G, (0,))
        batch = batch.map(lambda x: x.to(DEVICE))
        logits = torch.randn(2, B, T, V, device=DEVICE)
        eager = policy.sample_completions, policy.compute_logprobs
        compiled = [torch.compile(f, dynamic=False) for f in eager]
        kinds = {"eager": (policy.Product, eager), "compiled": (None, compiled)}
        if DEVICE.type == "cuda":
            fused = kernel.sample_completions, kernel.compute_logprobs
            kinds["kernel"] = kernel.FusedProduct, fused
        for name, (kind, functions) in kinds.items():
            line = f"B {B:4d}  G {G:2d}  V {V:2d}  {name:8s}"
            took = milliseconds(operations(*functions, *logits, batch))
            line += f" {took:8.3f} ms"
            if kind:
                whole = milliseconds(step(kind, batch, V, G))
                line += f"  step {whole:8.2f} ms  share {took / whole:.1%}"
            print(line)
END_OF_PYTHON

part 90 tests python3 -m pytest -q -p no:cacheprovider --tb=short tests/cuda
if command -v compute-sanitizer >/dev/null; then
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 part 120 memcheck compute-sanitizer --error-exitcode 9 \
        python3 -m pytest -q -p no:cacheprovider tests/cuda -k "cuda:0 and scores"
fi
part 60 run python3 train_grpo.py config/quick.py --out_dir="$OUT/run"
part 60 pretrain python3 -m model.pretrain --dataset=sums --block_size=11 --n_layer=2 --n_embd=32 \
    --masking=columns --judge_masking=columns --generator_steps=2 --judge_steps=2 \
    --out_dir="$(mktemp -d)/models"
part 300 times python3 "$OUT/times.py"
