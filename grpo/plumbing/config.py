"""The settings of a run: one flat dataclass, whose defaults are the default experiment.

    python train_grpo.py config/mixture.py --group_size=8         # left to right, the last one wins

A config file is Python and is executed: what it assigns are settings, and names that begin with _
are its own. Every mistake is a ValueError of one line: what, which values are allowed, the fix.
"""

import argparse
import contextlib
import difflib
import inspect
import re
import runpy
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from grpo.plumbing.distributed import world


@dataclass
class Config:
    # What is read and written.
    out_dir: str = "out"  # folder for config.json, metrics.jsonl, checkpoint.pt, evaluation.json
    dataset: str = "text"  # folder under data/ with train.bin, val.bin, meta.json
    generator_checkpoint: str = "model/pretrained/generator.pt"  # the policy to start from
    judge_checkpoint: str = "model/pretrained/judge.pt"  # the reward model
    # judge, valid_words, JUDGE.pt, FILE.py:FUNCTION, or a weighted sum: judge:1.0,my.py:f:0.5
    reward: str = "judge"
    # What a judge says of a run of blanks: the log of text / base model, or how likely it is text.
    judge_score: Literal["log_odds", "probability"] = "log_odds"
    reference_checkpoint: str = ""  # the policy to stay close to; empty: the generator as it starts
    # Does the reference follow the policy? ema: every step a little; periodic: now and then, whole.
    reference_mode: Literal["static", "ema", "periodic"] = "static"
    ema_alpha: float = 0.01  # ema: reference = (1 - ema_alpha) reference + ema_alpha policy
    reference_update_freq: int = 10  # periodic: steps between copies of the policy
    init_from: Literal["pretrained", "resume"] = "pretrained"  # resume: from out_dir/checkpoint.pt
    save_interval: int = 10  # steps between checkpoints; one is also written at the end
    eval_interval: int = 10  # steps between looks at a few held-out inputs
    eval_inputs: int = 512  # held-out inputs of the final table
    replay: bool = True  # after each step a line of replay.jsonl, for `python -m grpo.tools.replay`
    wandb_log: bool = False  # log to Weights & Biases too
    wandb_project: str = "fill-in-grpo"  # its project
    wandb_run_name: str = ""  # its run name; empty: wandb invents one

    # The inputs.
    batch_size: int = 64  # masked inputs per micro-batch, B
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
    xtc_threshold: float = 0.1  # XTC: of characters at least this likely keep the least likely
    xtc_probability: float = 0.0  # alone, with this probability per blank; 0: off

    # GRPO.
    kl_beta: float = 0.4  # weight of KL(policy || reference)
    kl_estimator: Literal["exact", "k1", "k2", "k3"] = "exact"
    entropy_coef: float = 0.0  # weight of the entropy bonus
    top_entropy_quantile: float = 1.0  # share of blanks, the most uncertain, that learn; 1: all
    loss_type: Literal["grpo", "dapo", "bnpo", "dr_grpo", "sum"] = "grpo"  # how blanks are averaged
    baseline: Literal["mean", "leave_one_out"] = "leave_one_out"  # what a reward is compared with
    scale_rewards: Literal["group", "batch", "none"] = "none"  # what advantages are divided by
    credit: Literal["input", "run"] = "run"  # a blank answers for all, or for its run of blanks
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
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: what the machine multiplies
    compile: Literal["auto", "true", "false"] = "auto"  # auto: on cuda
    kernel: Literal["auto", "cuda", "torch"] = "auto"  # fused for CUDA; auto: where it can run
    seed: int = 1  # of inputs and draws


FIELDS = Config.__annotations__  # {name: type}
LARGEST = 2**31 - 1
# From, to. Any other number is 0 or more, a whole one 1 or more, unless its default is 0.
RANGES = {
    "group_size": (2, LARGEST),
    "block_size": (5, LARGEST),  # the 5-gram model of the evaluation needs 5
    "temperature": (1e-3, 100),
}
for name in ("warmup_iters", "seed"):
    RANGES[name] = (0, LARGEST)
for name in ("mask_ratio", "min_p", "xtc_probability", "clip_eps"):
    RANGES[name] = (0, 1)
for name in ("ema_alpha", "top_p", "xtc_threshold", "top_entropy_quantile"):
    RANGES[name] = (1e-9, 1)


def refuse(wrong, line):
    """A user's mistake: what, which values are allowed, the fix."""
    if wrong:
        raise ValueError(line)


def convert(name, value, source):
    """Text from a flag, or a Python value from a file -> what the setting holds.

    Raises ValueError, which names `source`, for what the setting does not take.
    """
    fix = "--help lists them; a config file's own names begin with _"
    for near in difflib.get_close_matches(name, FIELDS, n=1):
        fix = f"did you mean {near!r}?"
    refuse(name not in FIELDS, f"{source}: there is no setting {name!r}; {fix}")
    kind = FIELDS[name]
    choices = get_args(kind)  # of a Literal
    least = int(kind is int and getattr(Config, name) > 0)
    low, high = RANGES.get(name, (least, LARGEST))
    text = str(value)
    with contextlib.suppress(ValueError):  # of text that is no number
        if kind is str and isinstance(value, str):
            return value
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if text.lower() in choices:  # compile = True in a file
            return text.lower()
        if kind in (int, float) and low <= kind(text) <= high:
            return kind(text)
    takes = " or ".join(choices) or kind.__name__
    if kind in (int, float):
        takes += f" from {low} to {high}"
    raise ValueError(f"{source}: {name}={value!r:.200} is not allowed; {name} takes {takes}")


def read_file(path):
    """What a Python file assigns: {name: value}. Raises ValueError for one that cannot serve."""
    try:
        values = runpy.run_path(path)
    except Exception as error:  # whatever it raises is the user's mistake
        raise ValueError(
            f"config file {path} does not run ({type(error).__name__}: {error}); fix it,"
            " or name another; a setting is written --key=value"
        ) from None
    settings = {name: value for name, value in values.items() if not name.startswith("_")}
    for name in values.get("__annotations__", {}):
        refuse(name not in values, f"config file {path}: {name} has no value; write {name} = VALUE")
    refuse(not settings, f"config file {path} sets nothing; write for example group_size = 8")
    return settings


def load_config(arguments):
    """Config files and --key=value flags, applied left to right -> Config; --help prints it.

    Raises ValueError, with one line, for any mistake.
    """
    given = {}
    flags = [argument for argument in arguments if argument != "--help"]
    for argument in flags:
        name, _, value = argument.removeprefix("--").partition("=")
        assigned = {name: value} if argument.startswith("--") else read_file(argument)
        for name, value in assigned.items():
            given[name] = convert(name, value, argument)
    config = Config(**given)
    config.warmup_iters = min(config.warmup_iters, config.lr_decay_iters or config.max_iters)
    config.given = given  # a run that goes on takes the others from its checkpoint
    if flags != arguments:
        print(help_text(config))
        sys.exit()
    if config.init_from == "pretrained":
        check(config)
    return config


def help_text(config):
    """The class above as it stands there, with the values in force."""
    usage = "python train_grpo.py [config.py ...] [--key=value ...] [--help]\n\n"
    setting = r"(?m)^(    (\w+): .*? = ).+?(?=  #|$)"
    source = inspect.getsource(Config)
    return usage + re.sub(setting, lambda it: it[1] + repr(getattr(config, it[2])), source)


def from_saved(saved, path):
    """The settings that the checkpoint `path` holds -> Config. ValueError for what is none."""
    return Config(**{name: convert(name, value, path) for name, value in saved.items()})


def check(config):
    """Raises ValueError for settings that do not go together, or files that cannot serve."""
    refuse(not config.out_dir, "out_dir is empty; write for example out_dir=out")
    several = config.minibatch_size and world()[0] > 1
    refuse(several, "minibatch_size shuffles the inputs of one process; set minibatch_size=0")
    updates = config.minibatch_size or config.num_iterations > 1
    refuse(
        config.importance_sampling_level == "none" and updates,
        "importance_sampling_level=none has no ratio, so a rollout serves one update; set"
        " num_iterations=1 and minibatch_size=0",
    )
    for file in (config.generator_checkpoint, config.reference_checkpoint):
        inside = Path(config.out_dir).resolve() in Path(file).resolve().parents
        refuse(inside, f"{file} lies in out_dir, which a new run moves aside; name another out_dir")


class Parser(argparse.ArgumentParser):
    """argparse, whose mistakes are the user's like all others."""

    def error(self, message):
        raise ValueError(f"{message}; --help lists what there is")


@contextlib.contextmanager
def exit_on_mistake(program):
    """A user's mistake becomes one line on stderr and exit code 2.

    An error in the user's own reward file shows its traceback before that.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if error.__cause__:
            traceback.print_exception(error.__cause__)
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)
