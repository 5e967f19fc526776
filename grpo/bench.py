"""
How long the two operations and the whole GRPO step take, on this machine.

    python -m grpo.bench [--only step --dtype bfloat16 --json bench.json]      # all of it takes about ten minutes on 2 CPU cores

Letters: B masked inputs, T characters, G group size, V vocabulary; rows = B·T.

Variants take turns in one process, after a round that does not count. [a b c] are the quartiles over the rounds; a ratio is taken within each round first.
The variant `again` is the first one timed twice: what its ratio differs from 1 is noise. Wall clock on a CPU, the time between two events on CUDA.

operations  `sample_completions`, `stats`, and `stats` with its gradient, every row a blank, temperature 0.8, top_p 0.95. GB/s counts each input read once
            and each output written once (for the gradient all inputs a second time), whatever an implementation really moves; `of_copy` is its share of
            the GB/s of a large copy, read and write counted. On CUDA the L2 cache is overwritten before each call, which takes so long that the call is
            launched meanwhile: Python's time is not in these figures. compiled_ad: the forward pass alone compiled, its gradient derived by PyTorch.
step        one turn of train_grpo.py's loop with the shipped models, B 16, T 64, one update per rollout, split into its phases; the learning rate is 0:
            all rounds do the same.
              shared       grpo_step: each input once through generator and reference
              two_updates  the same with num_iterations 2, as in the default experiment
              plain_judge  as shared, but all B·G completions are judged, in one batch, on a CPU too
              repeated     as shared, but by the usual way: each input G times through generator and reference
              bfloat16     as shared, every forward pass in bfloat16; both: that, and every pass compiled
              judge_alone  B·G rows in one batch through the judge, eager, in the dtype of `shared`, and nothing else
            over_shared, over_judge: the step's time divided by that of `shared`, of `judge_alone`. reward_off: by how much the judge's score of B·G
            inputs of the text, nothing hidden, is off its score in float32: the mean and the largest.
scaling     that step with one of B, G, T varied. over_linear, over_flops: time ÷ the first line's, divided by B, G or T² + T, by FLOPs needed, ÷ the
            first line's; kept_MiB: what the backward pass needs kept, weights included.
drift       train_grpo.py, B 4, G 4, for 100 and for 1,000 steps, in processes of their own: the most memory that the process ever held (Linux), and
            the step_ms that a tenth of the steps stayed below, in each tenth of the run, and the last ÷ the first (without its first three steps).
models      on CUDA, the step with untrained models of 1, 10 and 100 M parameters, the judge as large as the generator: bfloat16, B 64, T 256, G 16.
startup     seconds from the command to the first update of the default experiment, each line in a process of its own; compiled: with nothing in the
            compiler's cache.

distinct: different completions ÷ completions. kernels: what ran on the GPU in one step, copies included. idle: 1 − the sum of their times ÷ the step's.
MiB: peak memory above what was held before. mfu: FLOPs needed ÷ the step's time ÷ FLOP/s of a large matrix product of the same dtype, where
    FLOPs needed = T · (B · (3 updates · f(generator) + f(reference)) + distinct · B·G · f(judge)),    f = 2 · weights in matrices + 4 · layers · T · width
(a backward pass takes two forward passes; the embedding is a look-up; softmax, norms and the optimizer are not counted).
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import torch

from data.masking import parse_masking
from grpo import kernel, sampling, stats
from grpo.advantage import advantages
from grpo.plumbing.checkpoint import write
from grpo.plumbing.config import Parser, exit_on_mistake, load_config
from grpo.plumbing.log import Clock
from grpo.plumbing.setup import (
    can_compile,
    forward,
    load_data,
    load_models,
    make_optimizer,
    pick_device,
    pick_dtype,
)
from grpo.reward import Rewards, judge_scores
from grpo.step import differentiate, draw_uniforms, grpo_step, rollout, update
from grpo.words import lexicon
from model.transformer import Generator, Judge, TransformerConfig

WHOLE = {
    "dtype": ["float32", "bfloat16"],
    "V": [28, 96, 256, 1024],
    "rows": [4096, 65536],
    "G": [8, 16, 32],
}
SHORT = {
    "cpu": {"dtype": ["float32"], "V": [28, 96], "rows": [4096], "G": [16]},
    "cuda": WHOLE | {"rows": [65536], "G": [16]},
}
SCALES = {"batch_size": (8, 16, 32, 64), "group_size": (8, 16, 32, 64), "block_size": (16, 32, 64)}
SIZES = {"1 M": (6, 128), "10 M": (6, 384), "100 M": (14, 768)}  # layers, width


def quartiles(times, others=1):
    """Of the times, or of their ratio within each round."""
    return np.percentile(np.divide(times, others), (25, 50, 75)).tolist()


def interleave(measures, rounds):
    """{name: function} -> {name: what it returned in each round}."""
    each = [{name: measure() for name, measure in measures.items()} for _ in range(rounds + 1)][
        1:
    ]  # the first one warms up, compiles
    return {name: [results[name] for results in each] for name in measures}


def milliseconds(call, device):
    if device.type == "cuda":
        cache = torch.empty(1 << 28, dtype=torch.uint8, device=device)
        for _ in range(16):
            cache.zero_()
    clock = Clock(device)
    call()
    clock.mark("call")
    return clock.read()["step_ms"]


def peak_memory(call, device):
    if device.type == "cpu":
        return {}
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return {"MiB": (torch.cuda.max_memory_allocated(device) - before) / 2**20}


def limits(device):
    """-> bytes/s of a large copy, {dtype: FLOP/s of a large matrix product}."""
    size, n = (1 << 30, 8192) if device.type == "cuda" else (1 << 28, 1024)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    matrices = {
        dtype: torch.ones(n, n, dtype=getattr(torch, dtype), device=device)
        for dtype in WHOLE["dtype"]
    }
    calls = {"copy": partial(torch.empty_like(source).copy_, source)} | {
        dtype: partial(torch.matmul, each, each) for dtype, each in matrices.items()
    }
    per_second = {
        name: 1000 / np.median(t)
        for name, t in interleave(
            {name: partial(milliseconds, call, device) for name, call in calls.items()}, 9
        ).items()
    }
    return 2 * size * per_second.pop("copy"), {
        dtype: 2 * n**3 * each for dtype, each in per_second.items()
    }


def operation_calls(dtype, V, rows, G, device, T=64):
    """-> {operation: (bytes, {variant: call})}"""
    torch.compiler.reset()  # after eight shapes of one function torch.compile would leave the ninth eager
    torch.manual_seed(0)
    settings = temperature, *_ = 0.8, 0, 0.95, 0.0
    logits, ref_logits = torch.randn(2, rows // T, T, V, device=device).to(
        getattr(torch, dtype)
    )  # (B,T,V)
    mask = torch.ones(rows // T, T, dtype=torch.bool, device=device)  # (B,T)
    draw_from = logits, mask.long(), mask, torch.rand(rows // T, G, T, device=device)
    drawn = completions, kept = [
        x.contiguous() for x in sampling.sample_completions(*draw_from, *settings)
    ]  # (B,G,T), (B,T,V)
    inputs = logits, ref_logits, completions, kept, mask
    outputs = stats.stats_forward(*inputs, temperature)
    incoming = [
        torch.randn_like(outputs[i]) for i in (0, 2, 3)
    ]  # of logp (B,G,T), kl, entropy (B,T)

    def with_gradient(compute):
        z = logits.detach().requires_grad_()
        logp, _, kl, entropy = compute(z, *inputs[1:], temperature)
        return torch.autograd.grad((logp, kl, entropy), z, incoming)

    compiled = partial(torch.compile, dynamic=False)
    sample, compute = (
        {"eager": f, "again": f, "compiled": compiled(f)}
        for f in (sampling.sample_completions, stats.stats)
    )
    if device.type == "cuda":
        compute["compiled_ad"] = compiled(stats.stats_forward)
        if kernel.choose("auto", device, V, G) == "cuda":
            sample["fused"], compute["fused"] = kernel.sample_completions, kernel.stats
    size = [
        sum(x.nbytes for x in tensors)
        for tensors in ((*draw_from, *drawn), (*inputs, *outputs), (*incoming, *inputs, logits))
    ]
    return {
        "sample": (
            size[0],
            {name: partial(f, *draw_from, *settings) for name, f in sample.items()},
        ),
        "stats": (
            size[1],
            {
                name: torch.no_grad()(partial(f, *inputs, temperature))
                for name, f in compute.items()
            },
        ),
        "stats+grad": (
            size[1] + size[2],
            {name: partial(with_gradient, f) for name, f in compute.items()},
        ),
    }


def bench_operations(sweep, device, rounds, copy):
    for sizes in itertools.product(*(sweep[name] for name in WHOLE)):
        for operation, (size, calls) in operation_calls(*sizes, device).items():
            times = interleave(
                {name: partial(milliseconds, call, device) for name, call in calls.items()}, rounds
            )
            for name, t in times.items():
                speed = 1000 * size / np.median(t)
                yield {
                    "operation": operation,
                    **dict(zip(WHOLE, sizes)),
                    "variant": name,
                    "ms": quartiles(t),
                    "eager_over_this": quartiles(times["eager"], t),
                    "GB/s": speed / 1e9,
                    "of_copy": speed / copy,
                } | peak_memory(calls[name], device)


def repeated_step(
    generator, reference, rewards, optimizer, tokens, mask, mask_id, uniforms, config, clock
):
    """`grpo_step`'s update by the usual way: each completion is an input of its own, with a group of one."""
    (B, G, T), scaler = uniforms.shape, torch.amp.GradScaler(enabled=False)
    rows, blanks = (x.repeat_interleave(G, dim=0) for x in (tokens, mask))  # (B·G,T)
    r = rollout(
        generator,
        reference,
        rewards,
        rows.masked_fill(blanks, mask_id),
        blanks,
        uniforms.view(B * G, 1, T),
        config,
        clock,
        keep_graph=True,
    )
    grouped, counted = (
        r.credits.view(B, G, -1),
        mask[:, None] if config.credit == "run" else None,
    )  # (B,G,1) or (B,G,T)
    r.advantages = advantages(grouped, config.baseline, config.scale_rewards, counted).view_as(
        r.credits
    )
    figures = differentiate(
        generator,
        r,
        {"inputs": B * G, "blanks": blanks.sum(), "micro_batches": 1},
        config.kl_beta,
        config,
        scaler,
    )
    update(optimizer, scaler, config.grad_clip, figures["loss"])
    clock.mark("update")
    return r, {}


def judge_all(judge, completions):
    return judge(completions.flatten(0, 1)).float().sigmoid().view(completions.shape)


plain_judge_step = mock.patch("grpo.reward.judge_scores", torch.no_grad()(judge_all))(grpo_step)


def loop_turn(step, config, train, models, device):
    """-> a function: one turn of train_grpo.py's loop -> {phase_ms: ..., "step_ms": ..., "distinct": ...}."""
    (generate, refer, judge), optimizer = (
        (forward(model.to(device), device, config) for model in models),
        make_optimizer(models[0], config),
    )
    rewards = Rewards(judge, config.reward, train.vocabulary, lexicon(train.decode(train.tokens)))
    B, G, T = config.batch_size, config.group_size, config.block_size

    def turn():
        clock = Clock(device)
        batch = train.batch(
            B,
            T,
            parse_masking(config.masking),
            config.mask_ratio,
            config.hidden_words,
            (config.seed, 0, 0),
        )
        tokens, mask, uniforms = (
            x.to(device, non_blocking=True)
            for x in (*batch, draw_uniforms(B, G, T, (config.seed, 0, 1)))
        )
        clock.mark("data")
        r, _ = step(
            generate,
            refer,
            rewards,
            optimizer,
            tokens,
            mask,
            train.mask_id,
            uniforms,
            config,
            clock,
        )
        return clock.read() | {
            "distinct": len(r.completions.cpu().flatten(0, 1).unique(dim=0)) / (B * G)
        }

    return turn


def needed_flops(generator, reference, judge, config, distinct):
    def f(model):
        weights = (
            sum(p.numel() for p in model.parameters() if p.dim() == 2)
            - model.trunk.embedding.weight.numel()
        )
        return (
            2 * weights
            + 4 * model.trunk.config.n_layer * config.block_size * model.trunk.config.n_embd
        )

    return (
        config.block_size
        * config.batch_size
        * (
            3 * config.num_iterations * f(generator)
            + f(reference)
            + distinct * config.group_size * f(judge)
        )
    )


def gpu_work(turn, step_ms):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        turn()
        torch.cuda.synchronize()
    work = [
        e.time_range.elapsed_us() / 1000
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
    ]
    return {"kernels": len(work), "idle": 1 - sum(work) / step_ms}


VARIANTS = {
    "shared": (grpo_step, {}),
    "again": (grpo_step, {}),
    "two_updates": (grpo_step, {"num_iterations": 2}),
    "plain_judge": (plain_judge_step, {}),
    "repeated": (repeated_step, {}),
    "compiled": (grpo_step, {"compile": "true"}),
    "bfloat16": (grpo_step, {"dtype": "bfloat16"}),
    "both": (grpo_step, {"compile": "true", "dtype": "bfloat16"}),
}


def compare_steps(title, names, config, train, models, device, rounds, peak):
    torch.compiler.reset()
    configs = {name: replace(config, **VARIANTS[name][1]) for name in names}
    turns = {
        name: loop_turn(VARIANTS[name][0], configs[name], train, models, device) for name in names
    }
    rows = train.batch(
        config.batch_size * config.group_size,
        config.block_size,
        {"random": 1.0},
        0.0,
        0,
        (config.seed, 2),
    )[0].to(device)  # (B·G,T)
    judge = torch.no_grad()(partial(forward(models[2], device, config), rows))
    rewards = {
        dtype: judge_scores(
            forward(models[2], device, replace(config, dtype=dtype)), rows[None]
        ).mean(dim=-1)
        for dtype in WHOLE["dtype"]
    }  # (1,B·G) each
    results = interleave(
        turns | {"judge_alone": lambda: {"step_ms": milliseconds(judge, device)}}, rounds
    )
    times = {name: [result["step_ms"] for result in each] for name, each in results.items()}
    for name, each in results.items():
        row = {key: float(np.median([result[key] for result in each])) for key in each[0]}
        if name in turns:
            row["mfu"] = (
                needed_flops(*models, configs[name], row["distinct"])
                / (row["step_ms"] / 1000)
                / peak[configs[name].dtype]
            )
            row |= (
                gpu_work(turns[name], row["step_ms"]) if device.type == "cuda" else {}
            ) | peak_memory(turns[name], device)
        row |= {
            "step_ms": quartiles(times[name]),
            "over_shared": quartiles(times[name], times["shared"]),
            "over_judge": quartiles(times[name], times["judge_alone"]),
        }
        off = (rewards[configs.get(name, config).dtype] - rewards["float32"]).abs()
        row["reward_off"] = [off.mean().item(), off.max().item()]
        yield {
            "models": title,
            "dtype": configs.get(name, config).dtype,
            "G": config.group_size,
            "variant": name,
        } | row


def prepare(device, clock, **changes):
    """-> settings of `config/long_words.py` with `changes`, training text, its models: generator, reference, judge."""
    config = load_config(
        [
            "config/grpo_config.py",
            "config/long_words.py",
            "--learning_rate=0",
            "--num_iterations=1",
            "--compile=false",
            *(f"--{name}={value}" for name, value in changes.items()),
        ]
    )
    config.dtype = pick_dtype(config.dtype, device)
    train, _ = load_data(config.dataset, config.block_size)
    clock.mark("data")
    config.kernel = kernel.choose(config.kernel, device, len(train.vocabulary), config.group_size)
    models = load_models(config, train.vocabulary)[:3]
    clock.mark("models")
    return config, train, models


def bench_step(groups, dtypes, device, rounds, peak):
    names = (
        [
            "shared",
            "again",
            "two_updates",
            "plain_judge",
            "repeated",
            "bfloat16",
            *(["both"] if can_compile() else []),
        ]
        if device.type == "cpu"
        else list(VARIANTS)
    )
    for G, dtype in itertools.product(groups, dtypes):
        yield from compare_steps(
            "shipped",
            names,
            *prepare(device, Clock(device), batch_size=16, group_size=G, dtype=dtype),
            device,
            rounds,
            peak,
        )


def bench_models(device, rounds, peak):
    for title, (layers, width) in SIZES.items():
        config, train, _ = prepare(device, Clock(device), batch_size=64, dtype="bfloat16")
        shape = TransformerConfig(len(train.vocabulary), 256, layers, width // 64, width)
        models, names = (
            (Generator(shape), Generator(shape), Judge(shape)),
            ("shared", "again", "compiled"),
        )
        yield from compare_steps(
            title, names, replace(config, block_size=256), train, models, device, rounds, peak
        )


def bench_scaling(device, rounds):
    for setting, values in SCALES.items():
        base, train, models = prepare(device, Clock(device), batch_size=16, group_size=16)
        configs = {n: replace(base, **{setting: n}) for n in values}
        turns = {
            n: loop_turn(grpo_step, config, train, models, device) for n, config in configs.items()
        }
        sizes = {
            n: (n * n + n if setting == "block_size" else n, needed_flops(*models, config, 1))
            for n, config in configs.items()
        }
        times = {
            n: [result["step_ms"] for result in each]
            for n, each in interleave(turns, rounds).items()
        }
        for n in values:
            linear, flops = (
                quartiles(times[n], np.multiply(times[values[0]], size / first))
                for size, first in zip(sizes[n], sizes[values[0]])
            )
            kept = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda x: kept.append(x) or x, lambda x: x
            ):
                turns[n]()
            storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
            yield {
                "varied": setting,
                "value": n,
                "step_ms": quartiles(times[n]),
                "over_linear": linear,
                "over_flops": flops,
                "kept_MiB": sum(storages.values()) / 2**20,
            } | peak_memory(turns[n], device)


def bench_drift(device, lengths=(100, 1000)):
    code = "import sys, train_grpo; train_grpo.main(sys.argv[1:]); status = open('/proc/self/status').read(); print(status.split('VmHWM:')[1].split()[0])"
    for steps in lengths:
        with tempfile.TemporaryDirectory() as out:
            settings = {
                "batch_size": 4,
                "group_size": 4,
                "max_iters": steps,
                "warmup_iters": 0,
                "eval_inputs": 16,
                "device": device,
                "out_dir": out,
            }
            flags = [f"--{name}={value}" for name, value in settings.items()]
            said = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    code,
                    "config/grpo_config.py",
                    "config/long_words.py",
                    *flags,
                ],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
            with open(f"{out}/metrics.jsonl") as lines:
                tenths = [
                    np.percentile(part, 10)
                    for part in np.array_split(
                        [json.loads(line)["step_ms"] for line in lines][3:], 10
                    )
                ]
        yield {
            "steps": steps,
            "MiB": int(said.split()[-1]) / 1024,
            "last_over_first": float(tenths[-1] / tenths[0]),
            "ms_by_tenth": [float(each) for each in tenths],
        }


def first_update(begin, device, compiled):
    """What train_grpo.py does until its first update, in a process started at `begin`: prints the seconds of each part."""
    clock = Clock(torch.device("cpu"))
    clock.marks = [("start", begin)]
    clock.mark("imports")
    loop_turn(
        grpo_step, *prepare(pick_device(device), clock, compile=compiled), pick_device(device)
    )()
    clock.mark("update")
    print(
        json.dumps(
            {"compiled": compiled}
            | {
                name.removesuffix("_ms").replace("step", "all") + "_s": ms / 1000
                for name, ms in clock.read().items()
            }
        )
    )


def bench_startup(device):
    code = "import sys, train_grpo; from grpo.bench import first_update; first_update(float(sys.argv[1]), *sys.argv[2:])"
    for compiled in ("false", "false", "false", "true"):
        with tempfile.TemporaryDirectory() as cache:
            arguments, variables = (
                [str(time.perf_counter()), str(device), compiled],
                os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache},
            )
            yield json.loads(
                subprocess.check_output(
                    [sys.executable, "-c", code, *arguments], env=variables, text=True
                ).splitlines()[-1]
            )


def text(value):
    if isinstance(value, list):
        return f"[{' '.join(map(text, value))}]"
    return (
        (f"{value:.0f}" if value >= 100 else f"{value:.3g}")
        if isinstance(value, float)
        else str(value)
    )


def show(title, rows):
    """Print each row as soon as it is there, in columns named by the first one's keys -> the rows."""
    widths, shown = {}, []
    for row in rows:
        if not shown:
            widths = {
                key: max(
                    len(key), 18 if isinstance(value, list) else 11 if isinstance(value, str) else 6
                )
                for key, value in row.items()
            }
            print(f"\n{title}\n" + "  ".join(f"{key:>{width}}" for key, width in widths.items()))
        print(
            "  ".join(f"{text(row.get(key, '-')):>{width}}" for key, width in widths.items()),
            flush=True,
        )
        shown.append(row)
    return shown


def main(argv=None):
    parser = Parser(
        prog="python -m grpo.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("operations", "step", "scaling", "drift", "models", "startup"),
        help="these parts; by default all that the device can run",
    )
    for name, values in WHOLE.items():
        parser.add_argument(
            f"--{name}",
            nargs="+",
            choices=values,
            type=type(values[0]),
            help=f"operations{' and step' if name in ('dtype', 'G') else ''} at these",
        )
    parser.add_argument("--rounds", type=int, default=7, help="how often everything is timed")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    parser.add_argument("--json", help="write all figures to this file too")
    with exit_on_mistake("bench"):
        args = parser.parse_args(argv)
        if args.rounds < 1:
            raise ValueError(f"--rounds={args.rounds} measures nothing; take 1 or more")
        device = pick_device(args.device)
        if "models" in (args.only or ()) and device.type == "cpu":
            raise ValueError(
                f"--only models needs a CUDA device, --device={args.device} is a CPU; leave it out"
            )
        config, *_ = prepare(
            device, Clock(device)
        )  # finds what is missing before anything is timed
        result = {
            "device": torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"CPU {torch.backends.cpu.get_cpu_capability()}",
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "kernel": config.kernel,
            "rounds": args.rounds,
        }
        if args.json:
            write(args.json, json.dumps(result).encode())
    sweep = SHORT[device.type] | {name: values for name in WHOLE if (values := getattr(args, name))}
    copy, peak = limits(device)
    result |= {"copy_GB/s": copy / 1e9} | {
        f"{dtype}_TFLOP/s": each / 1e12 for dtype, each in peak.items()
    }
    print(", ".join(f"{name} {text(value)}" for name, value in result.items()))
    parts = {
        "operations": bench_operations(sweep, device, args.rounds, copy),
        "models": bench_models(device, args.rounds, peak),
        "step": bench_step(
            args.G or [16, 32], args.dtype or ["float32"], device, args.rounds, peak
        ),
        "scaling": bench_scaling(device, args.rounds),
        "drift": bench_drift(device),
        "startup": bench_startup(device),
    }
    for name in args.only or [name for name in parts if name != "models" or device.type == "cuda"]:
        result[name] = show(name, parts[name])
        if args.json:
            write(args.json, json.dumps(result, indent=1).encode())


if __name__ == "__main__":
    main()
