#!/usr/bin/env bash
# This script runs all checks that need a GPU, in at most eleven minutes. Start it in the
# repository's root:
#
#     bash tests/cuda/gpu.sh
#
# Each part writes its output to a file in out-gpu/, or in $OUT if that is set, and its last lines
# to the screen. Each part has a time limit in seconds. If one fails, the next one still runs, and
# the exit code of the script does not tell, so read the line that begins with == for each part.
# compute-sanitizer and ncu belong to the CUDA toolkit. Without them their parts fail.
export OUT=${OUT:-out-gpu} PYTHONUNBUFFERED=1 PYTHONPATH=.
mkdir -p "$OUT"

part() {  # part SECONDS NAME COMMAND...
    local limit=$1 name=$2 begun=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$OUT/$name.log" 2>&1
    echo "== $name: exit code $?, $((SECONDS - begun)) s"
    tail -n 14 "$OUT/$name.log" | cut -c1-240
}

cat >"$OUT/check.py" <<'END'
"""Compare the kernel with its definitions on the same GPU.

Shapes: B inputs, T characters, G completions of each, V vocabulary.
"""

import sys
from types import SimpleNamespace

import torch

from grpo import policy
from grpo.cuda import kernel
from grpo.run.config import Config
from grpo.tools import bench

DEVICE = torch.device("cuda", 0)
NETWORK = SimpleNamespace(vocab_size=28, n_latent=1)  # what `choose` reads of a generator


def make(B, T, G, V, dtype):
    torch.manual_seed(V)
    logits, ref_logits = torch.empty(2, B, T, V, device=DEVICE, dtype=dtype)  # (B,T,V), (B,T,V)
    logits.normal_(std=3)
    ref_logits.normal_(std=3)
    mask = torch.rand(B, T, device=DEVICE) < 0.6  # (B,T)
    masked = torch.zeros(B, T, dtype=torch.long, device=DEVICE)  # (B,T)
    return logits, ref_logits, mask, masked, torch.rand(B, G, T, 2, device=DEVICE)


def both(given, setting, sample, compute):
    """Draw, score and differentiate, with the kernel or with its definitions."""
    logits, ref_logits, mask, masked, uniforms = given
    top_k, top_p, min_p = setting
    config = Config(temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    completions, kept = sample(logits, masked, mask, uniforms, config)
    leaf = logits.detach().clone().requires_grad_()
    found = compute(leaf, ref_logits, completions, kept, mask, 0.8)
    logp, ref_logp, kl, entropy = found
    (logp.sum() + kl.sum() - entropy.sum()).backward()
    return [x.detach() for x in (completions, kept, *found, leaf.grad)]


def fused(given, *setting):
    return both(given, setting, kernel.sample_completions, kernel.logprobs)


def agree(have, given, *setting):
    want = both(given, setting, policy.sample_completions, policy.compute_logprobs)
    assert all(map(torch.equal, have[:2], want[:2])), "draws differ from the definition's"
    for x, y in zip(have[2:], want[2:]):
        rtol = 2e-2 if y.dtype == torch.bfloat16 else 2e-4
        torch.testing.assert_close(x.float(), y.float(), rtol=rtol, atol=2e-3)


def shapes():
    """Compare every compiled variant, also where columns do not fill a team, or rows a block."""
    for dtype in torch.float32, torch.bfloat16:
        for V in 1, 27, 28, 32, 33, 95, 96:
            for G, *setting in (5, 0, 1.0, 0.0), (33, 5, 0.9, 0.01):
                given = make(3, 7, G, V, dtype)
                agree(fused(given, *setting), given, *setting)
    print("all shapes agree")


def large():
    """Use tensors of more than 2^31 elements, and compare the first and the last input."""
    T, V, G = 64, 96, 2
    B = 2**31 // (T * V) + 2
    given = make(B, T, G, V, torch.bfloat16)
    everything = fused(given, 0, 0.9, 0.0)
    for b in 0, B - 1:
        agree([x[b : b + 1] for x in everything], [x[b : b + 1] for x in given], 0, 0.9, 0.0)
    print("rows beyond 2^31 elements agree")


def step():
    """Take four steps of GRPO with the kernel, and four with its definitions, and compare them."""
    found = []
    for name in "cuda", "torch":
        config = Config(kernel=name, batch_size=16, minibatch_size=8, dtype="float32")
        call, _ = bench.prepare(config, DEVICE)  # this takes the first step
        found.append([call()[1] for _ in range(3)][-1])
    for name, x in found[0].items():
        # The tolerance is wide, because attention adds up its gradient in an order that differs
        # from run to run.
        torch.testing.assert_close(x, found[1][name], rtol=5e-2, atol=2e-2, msg=name)
    print("steps agree")


def once():
    """Launch everything once, for ncu to measure."""
    for dtype in torch.float32, torch.bfloat16:
        for V in 28, 96:
            fused(make(1024, 64, 16, V, dtype), 0, 0.95, 0.0)


if __name__ == "__main__":
    print("torch", torch.__version__, "on", torch.cuda.get_device_name())
    print("kernel:", kernel.choose(Config(kernel="cuda", dtype="float32"), DEVICE, NETWORK))
    for name in sys.argv[1:]:
        globals()[name]()
END

metrics=gpu__time_duration.sum
metrics+=,dram__throughput.avg.pct_of_peak_sustained_elapsed
metrics+=,sm__inst_executed.avg.per_cycle_active
metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active
check="python3 $OUT/check.py"

part 60 check $check shapes
part 60 large $check large
part 60 steps $check step
part 80 tests python3 -m pytest -q -p no:cacheprovider --tb=short tests/cuda -k gpu
PYTORCH_NO_CUDA_MEMORY_CACHING=1 part 80 memcheck \
    compute-sanitizer --tool memcheck --error-exitcode 9 $check shapes
part 60 racecheck compute-sanitizer --tool racecheck --error-exitcode 9 $check shapes
part 40 ncu ncu --clock-control none -k 'regex:logprobs_|sample_' --metrics "$metrics" $check once
part 60 run python3 train_grpo.py config/grpo_config.py --out_dir="$OUT/run" --compile=false
part 5 times tail -n 1 "$OUT/run/metrics.jsonl"
part 150 bench python3 -m grpo.tools.bench
