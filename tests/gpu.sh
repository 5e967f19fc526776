#!/usr/bin/env bash
# What the tests cannot say without a GPU, in about ten minutes, from the repository's root:
#
#     bash tests/gpu.sh              # what was said goes to out-gpu/, a file for each part
#
# Each part has its own limit in seconds, and none stops the next. compute-sanitizer and ncu come
# with the CUDA toolkit; without them their parts fail, and the rest goes on.
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
"""The kernel against its definitions on the same GPU. Letters: B inputs, T characters, G, V."""
import sys
import time

import torch
import torch.nn.functional as F

from grpo import kernel, sampling, stats
from grpo.optimizer import Optimizer
from grpo.plumbing.config import Config
from grpo.reward import Rewards
from grpo.rollout import Inputs, draw_orders
from model.transformer import Generator, Judge, TransformerConfig
from train_grpo import grpo_step

DEVICE = torch.device("cuda", 0)


def make(B, T, G, V, dtype):
    torch.manual_seed(V)
    logits = (3 * torch.randn(B, T, V, device=DEVICE)).to(dtype)  # (B,T,V)
    ref_logits = (3 * torch.randn(B, T, V, device=DEVICE)).to(dtype)  # (B,T,V)
    mask = torch.rand(B, T, device=DEVICE) < 0.6  # (B,T)
    masked = torch.zeros(B, T, dtype=torch.long, device=DEVICE)  # (B,T)
    return logits, ref_logits, mask, masked, torch.rand(B, G, T, device=DEVICE)


def both(fused, given, *setting):
    """Draws, their statistics and a gradient, by the kernel or by its definitions."""
    logits, ref_logits, mask, masked, uniforms = given
    sample = kernel.sample_completions if fused else sampling.sample_completions
    compute_stats = kernel.stats if fused else stats.stats
    completions, kept = sample(logits, masked, mask, uniforms, 0.8, *setting)
    leaf = logits.detach().clone().requires_grad_()
    found = compute_stats(leaf, ref_logits, completions.contiguous(), kept, mask, 0.8)
    (found.logp.sum() + found.kl.sum() - found.entropy.sum()).backward()
    return [x.detach() for x in (completions, kept, *found, leaf.grad)]


def agree(have, want):
    assert all(map(torch.equal, have[:2], want[:2])), "draws differ from the definition's"
    for x, y in zip(have[2:], want[2:]):
        rtol = 2e-2 if y.dtype == torch.bfloat16 else 2e-4
        torch.testing.assert_close(x.float(), y.float(), rtol=rtol, atol=2e-3)


def shapes():
    """Every instantiation, with tails of rows and of columns."""
    for dtype in torch.float32, torch.bfloat16:
        for V in 1, 27, 28, 32, 33, 96, 97, 255, 256, 257, 1000, 1024:
            for G, *setting in (5, 0, 1.0, 0.0), (33, 5, 0.9, 0.01):
                given = make(3, 7, G, V, dtype)
                agree(both(True, given, *setting), both(False, given, *setting))
    print("all shapes agree")


def large():
    """Offsets beyond 2^31 elements: the first and the last input of so many."""
    T, V, G = 64, 1024, 2
    B = 2**31 // (T * V) + 2
    logits, ref_logits = torch.empty(2, B, T, V, device=DEVICE, dtype=torch.bfloat16)
    logits.normal_()
    ref_logits.normal_()
    mask = torch.rand(B, T, device=DEVICE) < 0.6
    masked = torch.zeros(B, T, dtype=torch.long, device=DEVICE)
    given = logits, ref_logits, mask, masked, torch.rand(B, G, T, device=DEVICE)
    everything = both(True, given, 0, 0.9, 0.0)
    for b in 0, B - 1:
        one = [x[b : b + 1] for x in given]
        agree([x[b : b + 1] for x in everything], both(False, one, 0, 0.9, 0.0))
    print("rows beyond 2^31 elements agree")


def graph():
    """Captured in a CUDA graph, and played again on other logits."""
    logits, ref_logits, mask, masked, uniforms = make(8, 64, 16, 28, torch.float32)

    def step():
        completions, kept = kernel.sample_op(logits, masked, mask, uniforms, 0.8, 0, 0.9, 0.0)
        outputs = kernel.stats_op(logits, ref_logits, completions, kept, mask, 0.8)
        return [completions, kept, *outputs]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        outputs = step()
    logits.copy_(torch.randn_like(logits))
    captured.replay()
    assert all(map(torch.equal, outputs, step()))
    print("a graph's replay agrees")


def small_step(device):
    """-> a step of GRPO, always on the same inputs, and all the weights that it moves."""
    torch.manual_seed(0)
    config = Config(batch_size=16, group_size=16, minibatch_size=8, kl_target=0.0)
    shape = TransformerConfig(vocab_size=28, block_size=64, n_layer=4, n_head=4, n_embd=128)
    with device:
        generator, reference, judge = Generator(shape), Generator(shape), Judge(shape)
        for model in generator, reference, judge:
            torch.nn.init.normal_(model.head.weight, std=0.1)
        tokens = torch.randint(27, (16, 64))  # (B,T)
        mask = torch.rand(16, 64) < 0.2  # (B,T)
        uniforms = torch.rand(16, 16, 64)  # (B,G,T)
    orders = draw_orders(2, 16, (0, 0)).to(device)  # (E,B)
    inputs = Inputs(tokens, mask, tokens.masked_fill(mask, 27), uniforms, orders)
    rewards = Rewards(judge, config, "".join(map(chr, range(65, 93))), set(), device)
    optimizer = Optimizer(generator, config)
    for group in optimizer.adamw.param_groups:  # a graph reads the learning rate from memory
        group.update(lr=torch.tensor(1e-4, device=device), capturable=True)

    class NoClock:
        def mark(self, phase):
            pass

    models = generator, reference, rewards, optimizer
    config.kernel = kernel.choose("auto", device)

    def weights():
        return torch.cat([p.detach().flatten() for p in generator.parameters()])

    return lambda: grpo_step(*models, inputs, config, NoClock())[1], weights


def step():
    """Six steps of GRPO, against three and as many replays of one CUDA graph of a whole step."""
    eager, want = small_step(DEVICE)
    start = want()
    for _ in range(6):
        wanted = eager()
    captured_step, have = small_step(DEVICE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            captured_step()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = captured_step()
    for _ in range(3):
        captured.replay()
    for name in wanted:  # attention's gradient has no fixed order of its sums
        torch.testing.assert_close(found[name], wanted[name], rtol=5e-2, atol=2e-2, msg=name)
    assert (have() - want()).norm() < 0.1 * (want() - start).norm()
    print("a step's replay agrees")
    print(f"eager    {microseconds(eager, 50):8.1f} us a step")
    print(f"captured {microseconds(captured.replay, 50):8.1f} us a step")


def microseconds(f, calls=300):
    for _ in range(20):
        f()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        f()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / calls * 1e6


def host():
    """What a step of a small model sees: 4096 rows, host and device together."""
    logits, ref_logits, mask, masked, uniforms = make(64, 64, 16, 28, torch.bfloat16)
    completions, kept = kernel.sample_completions(logits, masked, mask, uniforms)
    samplers = {
        "fused": kernel.sample_completions,
        "eager": sampling.sample_completions,
        "compiled": torch.compile(sampling.sample_completions, dynamic=False),
    }
    scorers = {
        "fused": kernel.stats,
        "eager": stats.stats,
        "compiled": torch.compile(stats.stats, dynamic=False),
    }
    for name in samplers:

        def sample(sampler=samplers[name]):
            sampler(logits, masked, mask, uniforms, 0.8, 0, 0.9, 0.0)

        def gradient(scorer=scorers[name]):
            leaf = logits.detach().requires_grad_()
            found = scorer(leaf, ref_logits, completions, kept, mask, 0.8)
            torch.autograd.grad(found.logp.sum() + found.kl.sum() - found.entropy.sum(), leaf)

        print(f"{name:9s} sample      {microseconds(sample):8.1f} us a call")
        print(f"{name:9s} stats, grad {microseconds(gradient):8.1f} us a call")


def flash():
    """Does attention take as many rows as a large step has completions?"""
    q = torch.randn(65536, 4, 16, 32, device=DEVICE, dtype=torch.bfloat16)
    try:
        F.scaled_dot_product_attention(q, q, q)
        torch.cuda.synchronize()
        print("attention takes 65,536 rows")
    except RuntimeError as error:
        print("attention refuses 65,536 rows:", str(error).splitlines()[0])


def once():
    """For ncu."""
    for dtype in torch.float32, torch.bfloat16:
        for V in 28, 256, 1024:
            both(True, make(1024, 64, 16, V, dtype), 0, 0.95, 0.0)


for name in sys.argv[1:]:
    globals()[name]()
END

cat >"$OUT/where.py" <<'END'
import cuda.bindings
import torch

from grpo import kernel

print("torch", torch.__version__, "on", torch.cuda.get_device_name())
print("cuda.bindings", cuda.bindings.__version__, "kernel:", kernel.choose("cuda", "cuda:0"))
END

cat >"$OUT/summary.py" <<'END'
import json
import os
from pathlib import Path

out = Path(os.environ["OUT"], "run")
lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
milliseconds = sorted(line["step_ms"] for line in lines)[len(lines) // 2]
print("gap closed", json.loads((out / "evaluation.json").read_text())["gap_closed"])
print("ms a step, median", milliseconds)
print({name: round(x, 2) for name, x in lines[-1].items() if name.endswith("_ms")})
END

metrics=gpu__time_duration.sum
metrics+=,dram__throughput.avg.pct_of_peak_sustained_elapsed
metrics+=,sm__inst_executed.avg.per_cycle_active
metrics+=,sm__warps_active.avg.pct_of_peak_sustained_active
check="python3 $OUT/check.py"

part 40 where python3 "$OUT/where.py"
part 70 check $check shapes graph large
part 40 capture $check step
part 80 tests python3 -m pytest -q -p no:cacheprovider --tb=short \
    tests/test_kernel.py tests/test_device.py -k "cuda and not bindings"
PYTORCH_NO_CUDA_MEMORY_CACHING=1 part 80 memcheck \
    compute-sanitizer --tool memcheck --error-exitcode 9 $check shapes
part 60 racecheck compute-sanitizer --tool racecheck --error-exitcode 9 $check shapes
part 60 host $check host
part 40 ncu ncu --clock-control none -k 'regex:stats_|sample_' --metrics "$metrics" $check once
part 40 run python3 train_grpo.py config/grpo_config.py --out_dir="$OUT/run" --compile=false
part 100 operations python3 -m grpo.bench --only operations --V 28 1024 --dtype float32 \
    --rounds 5 --json "$OUT/operations.json"
part 70 step python3 -m grpo.bench --only step --G 16 --dtype bfloat16 \
    --rounds 5 --json "$OUT/step.json"
part 20 flash $check flash
part 10 summary python3 "$OUT/summary.py"
