"""The settings of a run: one flat dataclass, whose defaults are the default experiment.

`load_config` reads them (grpo/plumbing/command_line.py), and `check` finds those that do not go
together, or that name files which cannot serve.
"""

import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from data.exceptions import refuse
from data.masking import parse_masking
from grpo.distributed import is_first, n_processes
from grpo.plumbing.checkpoint import LATEST, find, read, training_state
from grpo.plumbing.command_line import convert, read_arguments


@dataclass
class Config:
    # What is read and written.
    out_dir: str = "out"  # folder for config.json, metrics.jsonl, checkpoint.pt, evaluation.json
    dataset: str = "text"  # folder under data/ with train.bin, val.bin, meta.json
    generator_checkpoint: str = "model/pretrained/generator.pt"  # the policy to start from
    judge_checkpoint: str = "model/pretrained/judge.pt"  # the reward model
    # judge, valid_words, JUDGE.pt, FILE.py:FUNCTION, or a weighted sum: judge:1.0,my.py:f:0.5
    reward: str = "judge"
    # What a judge says of a word: the log of text / base model, or how likely it is text.
    judge_score: Literal["log_odds", "probability"] = "log_odds"
    reference_checkpoint: str = ""  # the policy to stay close to; empty: the generator as it starts
    # Does the reference follow the policy? ema: a little in every step; periodic: a copy at times.
    reference_mode: Literal["static", "ema", "periodic"] = "static"
    ema_alpha: float = 0.01  # ema: reference = (1 - ema_alpha) reference + ema_alpha policy
    reference_update_freq: int = 10  # periodic: steps between copies of the policy
    init_from: Literal["pretrained", "resume"] = "pretrained"  # resume: from out_dir/checkpoint.pt
    save_interval: int = 10  # steps between checkpoints; one is also written at the end
    eval_interval: int = 10  # steps between looks at a few held-out inputs
    eval_inputs: int = 256  # held-out inputs of the final table
    replay: bool = True  # after each step a line of replay.jsonl, for `python -m grpo.tools.replay`
    wandb_log: bool = False  # log to Weights & Biases too
    wandb_project: str = "fill-in-grpo"  # its project
    wandb_run_name: str = ""  # its run name; empty: wandb invents one

    # The inputs.
    batch_size: int = 40  # masked inputs per micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches per step
    block_size: int = 64  # characters per input, T
    # Train on your own inputs: JSON {"prompts": ["th_ c_t", ...]}, _ for a blank, of any lengths.
    prompts_file: str = ""
    masking: str = "short"  # random, span, word, short, sticky, or a mix: random:0.5,word:0.5
    mask_ratio: float = 0.15  # share of hidden characters (random, span, sticky)
    hidden_words: int = 3  # hidden words per input (word, short)

    # The draws.
    group_size: int = 16  # completions per input, G: each is compared with the others
    temperature: float = 1.0  # softmax temperature of the policy
    top_k: int = 0  # draw from the k likeliest characters; 0: from all
    top_p: float = 1.0  # draw from the likeliest characters that hold this share; 1: from all
    min_p: float = 0.0  # draw from characters this likely, relative to the likeliest; 0: from all
    xtc_threshold: float = 0.1  # of those at least this likely, XTC keeps only the least likely
    xtc_probability: float = 0.0  # XTC does so at each blank with this probability; 0: off
    # Divides the logits of characters in the visible text, which are most of the alphabet; 1: off.
    repetition_penalty: float = 1.0

    # GRPO.
    kl_beta: float = 0.65  # weight of KL(policy || reference)
    kl_estimator: Literal["exact", "k1", "k2", "k3"] = "exact"
    entropy_coef: float = 0.0  # weight of the entropy bonus
    top_entropy_quantile: float = 1.0  # share of blanks, the most uncertain, that learn; 1: all
    loss_type: Literal["grpo", "dapo", "bnpo", "dr_grpo", "sum"] = "grpo"  # how blanks are averaged
    baseline: Literal["mean", "leave_one_out"] = "leave_one_out"  # what a reward is compared with
    scale_rewards: Literal["group", "batch", "none"] = "none"  # what advantages are divided by
    credit: Literal["input", "run"] = "run"  # a blank answers for all words, or for its own
    # What each letter wants to maximise; `clip` is PPO's. The others need a ratio for each letter.
    objective: Literal["clip", "cispo", "sapo", "gmpo", "dppo"] = "clip"
    sapo_tau: float = 1.0  # sapo: how sharply the ratio is bounded; larger is sharper
    sapo_tau_negative: float = 1.05  # the same where the advantage is negative
    importance_sampling_level: Literal["token", "sequence", "none"] = "token"  # of the ratio
    clip_eps: float = 0.2  # the ratio is clipped below at 1 - clip_eps
    clip_eps_high: float = 0.2  # and above at 1 + clip_eps_high
    clip_delta: float = 0.0  # bounds the ratio where the advantage is negative; 0: nothing does
    num_iterations: int = 2  # times that a rollout is used; without a ratio 1
    minibatch_size: int = 0  # inputs per update, shuffled; 0: all of the step's

    # The optimizer.
    max_iters: int = 30  # steps
    learning_rate: float = 1e-3  # peak learning rate of AdamW
    min_lr: float = 0.0  # learning rate at the end of the cosine
    warmup_iters: int = 5  # steps of linear warm-up; in a shorter run all
    lr_decay_iters: int = 0  # steps until min_lr; 0: max_iters
    weight_decay: float = 0.0  # AdamW's, on matrices
    beta1: float = 0.9  # AdamW's
    beta2: float = 0.99  # AdamW's
    grad_clip: float = 1.0  # largest norm of the gradient; 0: any

    # The machine.
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...; auto: cuda where there is one
    reference_device: str = "auto"  # where the frozen reference lives; auto: on device
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 if it is fast here
    compile: Literal["auto", "true", "false"] = "auto"  # auto: on cuda
    gradient_checkpointing: bool = False  # less memory, more time, the same gradients
    kernel: Literal["auto", "cuda", "torch"] = "auto"  # fused for CUDA; auto: where it can run
    seed: int = 1  # of inputs and draws


def load_config(arguments=()):
    """Read config files and --key=value flags, applied left to right: -> `Config`.

    A resumed run takes its settings from its checkpoint. Settings that are given again replace
    those, and the changes are printed. Raises a Mistake of one line for anything wrong.
    """
    usage = "python train_grpo.py [config.py ...] [--key=value ...] [--help]"
    given = read_arguments(Config, arguments, usage)
    config = Config(**given)
    if config.init_from == "resume":
        config = resume(config.out_dir, given)
    check(config)
    steps = config.lr_decay_iters or config.max_iters
    return replace(config, warmup_iters=min(config.warmup_iters, steps))


def resume(out, given):
    """Take the settings of the run in `out`, and what is given again: -> `Config`."""
    path = Path(out) / LATEST
    state = training_state(read(path), path)
    old = from_saved(state["config"], str(path))
    here = {"init_from": "resume", "out_dir": out}  # the folder that is read is the one to write
    new = replace(old, **given | here)
    refuse(
        ".py:" in old.reward and "reward" not in given,
        "resume: the reward runs a file, which a checkpoint may not ask for;"
        f" give it again: --reward={old.reward}",
    )
    refuse(
        state["iteration"] >= new.max_iters,
        f"resume: {out} is at step {state['iteration']} already; give a larger max_iters,"
        f" or for its table: python -m grpo.evaluation {out}",
    )
    before = asdict(replace(old, **here))
    changes = [f"{k} {before[k]} -> {x}" for k, x in asdict(new).items() if x != before[k]]
    if state["processes"] != n_processes():
        changes.append(f"processes {state['processes']} -> {n_processes()}")
    if is_first():
        said = ", ".join(changes) or "its own settings"
        print(f"{out} goes on from step {state['iteration']} with {said}")
    return new


def from_saved(saved, path):
    """Check the settings that the checkpoint `path` holds: -> `Config`."""
    return Config(**{name: convert(Config, name, value, path) for name, value in saved.items()})


def check(config):
    """Raise a Mistake for settings that do not go together, or files that cannot serve."""
    refuse(not config.out_dir, "out_dir is empty; write for example out_dir=out")
    several = config.minibatch_size and n_processes() > 1
    refuse(several, "minibatch_size shuffles the inputs of one process; set minibatch_size=0")
    updates = config.minibatch_size or config.num_iterations > 1
    refuse(
        config.importance_sampling_level == "none" and updates,
        "importance_sampling_level=none has no ratio, so a rollout serves one update; set"
        " num_iterations=1 and minibatch_size=0",
    )
    refuse(
        config.objective != "clip" and config.importance_sampling_level != "token",
        f"objective={config.objective} needs the ratio of each letter; set"
        " importance_sampling_level=token, or objective=clip",
    )
    refuse(
        config.objective != "clip" and config.clip_delta,
        f"objective={config.objective} has no clip_delta; set clip_delta=0, or objective=clip",
    )
    refuse(
        config.objective == "gmpo" and config.top_entropy_quantile < 1,
        "objective=gmpo averages over all letters of a word; set top_entropy_quantile=1",
    )
    parse_masking(config.masking)
    moved = config.out_dir if config.init_from != "resume" else ""
    check_files(named_files(config), moved)


PART = re.compile(
    r"(judge|valid_words|.+\.pt|.+\.py:[^\W\d]\w*)(?::(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?))?"
)


def parse_reward(text):
    """Turn "judge:1,my.py:f:0.5" into {"judge": 1.0, "my.py:f": 0.5}, or raise a Mistake."""
    weights = {}
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        weight = float(match[2] or 1) if match else math.nan
        refuse(
            not math.isfinite(weight) or match[1] in weights,
            f"reward={text!r} has a part {part!r}; allowed: NAME or NAME:WEIGHT, each NAME once:"
            " judge, valid_words, FILE.py:FUNCTION, or JUDGE.pt",
        )
        weights[match[1]] = weight
    return weights


def find_dataset(name):
    """Look for a folder under data/, or for one of this very name: -> Path."""
    for folder in (Path("data") / name, Path(name)):
        file = find(folder / "meta.json")
        if file.exists():
            return file.parent
    return find(Path("data") / name)


def named_files(config):
    """List the files and folders that settings name: -> [(setting, path)]."""
    named = [("dataset", find_dataset(config.dataset))]
    for name in (
        "generator_checkpoint",
        "reference_checkpoint",
        "judge_checkpoint",
        "prompts_file",
    ):
        named.append((name, getattr(config, name)))
    for part in parse_reward(config.reward):
        path, _, name = part.rpartition(":")  # my.py:f, judge.pt, or the name judge
        if "." in part:
            named.append(("reward", path or name))
    return named


def check_files(named, moved=""):
    """Raise a Mistake for a file that is missing, or that lies in a folder which is moved aside.

    Only the dataset may be missing, because the default text is made.
    """
    for name, path in named:
        found = find(path)
        missing = path and name != "dataset" and not found.exists()
        refuse(missing, f"{name}: there is no file {path}; make it, or name another")
        refuse(
            path and moved and Path(moved).resolve() in found.resolve().parents,
            f"{name}: {path} lies in out_dir, which is moved aside when another run begins there;"
            " name another out_dir",
        )
