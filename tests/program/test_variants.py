"""Each published variant that has a setting trains for two steps, with and without a latent.

Each config file trains for two steps, too. The nets are tiny, and the runs start from Python, as in
a notebook.
"""

import math
from pathlib import Path

import pytest
from conftest import command_line, figures

import train_grpo

VARIANTS = [
    *({"loss_type": name} for name in ("grpo", "dapo", "bnpo", "dr_grpo", "sum")),
    {"clip_eps_high": 0.28, "clip_delta": 4},
    {"importance_sampling_level": "sequence"},
    *({"objective": name, "num_iterations": 2} for name in ("cispo", "sapo", "gmpo", "dppo")),
    {"importance_sampling_level": "none"},
    {"num_iterations": 3},
    {"minibatch_size": 2},
    {"baseline": "leave_one_out", "scale_rewards": "none"},
    {"scale_rewards": "batch", "credit": "run"},
    *({"kl_estimator": name} for name in ("k1", "k2", "k3")),
    {"entropy_coef": 0.1},
    {"top_entropy_quantile": 0.2},
    {"reference_mode": "ema", "ema_alpha": 0.1},
    {"reference_mode": "periodic", "reference_update_freq": 2},
    {"top_k": 3, "top_p": 0.9, "min_p": 0.05},
    {"xtc_probability": 0.5},
    {"reward": "judge:1,valid_words:0.5"},
    {"judge_score": "probability"},
    {"gradient_accumulation_steps": 2},
    {"dtype": "bfloat16"},
]
SHORT = {"max_iters": 2, "eval_inputs": 1, "replay": False}


def train(arguments, out_dir, monkeypatch):
    """Take two steps, without the final evaluation: -> the lines of metrics.jsonl."""
    monkeypatch.setattr(train_grpo, "table", lambda *_: ({}, []))
    monkeypatch.setattr(train_grpo.Log, "table", lambda *_: None)
    train_grpo.main(arguments)
    return figures(out_dir)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("generator", ["generator", "latent"])
def test_a_variant_trains(variant, generator, world, flags, monkeypatch):
    flags["generator_checkpoint"] = world / f"{generator}.pt"
    steps = train(command_line(flags, **SHORT, **variant), flags["out_dir"], monkeypatch)
    assert len(steps) == 2
    assert all(math.isfinite(value) for step in steps for value in step.values())
    assert steps[0]["grad_norm"] > 0


@pytest.mark.parametrize("file", sorted(map(str, Path("config").glob("*.py"))))
def test_a_config_file_trains(file, flags, monkeypatch):
    """We read config/grpo_config.py, then the file, then flags that make everything tiny."""
    small = ["dataset", "generator_checkpoint", "judge_checkpoint", "out_dir", "block_size"]
    small += ["batch_size", "group_size", "warmup_iters", "device", "dtype"]
    own = command_line({name: flags[name] for name in small}, **SHORT, minibatch_size=0)
    files = list(dict.fromkeys(["config/grpo_config.py", file]))
    assert len(train([*files, *own], flags["out_dir"], monkeypatch)) == 2
