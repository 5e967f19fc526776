"""All settings of a run, in one flat dataclass whose defaults are the default experiment.

    python train_grpo.py config/latent.py --group_size=8         # left to right, the last one wins

`load_config` reads config files and flags. A config file is Python, and we execute it. Each name
that it assigns has to be a setting, unless the name begins with _. Its assignments become flags,
so that argparse converts and refuses both.
"""

import argparse
import contextlib
import difflib
import inspect
import os
import re
import shlex
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

from data.masking import parse_masking
from data.user_mistake import Mistake, refuse
from grpo.advantage import BASELINES, SCALES
from grpo.distributed import is_first, n_processes
from grpo.loss import KL_ESTIMATORS, LOSS_TYPES, OBJECTIVES
from grpo.optimizer import learning_rate
from grpo.run.checkpoint import LATEST, training_state
from grpo.run.reward_setting import parse_reward
from grpo.run.user_file import run_file


@dataclass
class Config:
    # What is read and written.
    out_dir: str = "out"  # folder for config.json, metrics.jsonl, checkpoint.pt, evaluation.json
    # A folder under data/, or an absolute path, with train and val: .bin of a text, .txt of sums.
    dataset: str = "sums"
    generator_checkpoint: str = "model/pretrained/sums.pt"  # the policy to start from
    judge_checkpoint: str = "model/pretrained/sums_judge.pt"  # the reward model; empty: none
    # judge, valid_words, right (sums), JUDGE.pt, FILE.py:FUNCTION, or a weighted sum of these:
    # judge:1.0,my.py:f:0.5
    reward: str = "judge"
    reference_checkpoint: str = ""  # the policy to stay close to; empty: generator_checkpoint
    # static: the reference never changes. ema: it moves towards the policy a little in every step.
    # periodic: every reference_update_freq steps it becomes a copy of the policy.
    reference_mode: Literal["static", "ema", "periodic"] = "static"
    ema_alpha: float = 0.99  # ema: reference = ema_alpha reference + (1 - ema_alpha) policy
    reference_update_freq: int = 10  # periodic: steps between two copies
    init_from: Literal["pretrained", "resume"] = "pretrained"  # resume: from out_dir/checkpoint.pt
    eval_interval: int = 40  # steps between checkpoints, each with a look at a few held-out fills
    eval_inputs: int = 1500  # the final table is measured on this many held-out inputs
    wandb_project: str = ""  # log to this project of Weights & Biases; empty: don't
    wandb_run_name: str = ""  # the name of the run there; empty: wandb makes one up

    # The inputs.
    batch_size: int = 128  # masked inputs per micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches per step
    block_size: int = 11  # characters per input, T
    # Train on your own inputs, each at most block_size long: a JSON file that holds
    # {"prompts": ["th_ c_t", ...]}, with _ for a blank.
    prompts_file: str = ""
    # What to hide. Sums: columns, digits. Anything else: random, word, short, or short:0.8,word:0.2
    masking: str = "columns"

    # The draws.
    group_size: int = 16  # completions per input, G: each is compared with the others
    temperature: float = 1.0  # softmax temperature of the policy
    top_k: int = 0  # draw from the k likeliest characters; 0: from all
    top_p: float = 1.0  # draw from the fewest characters with this total probability; 1: from all
    min_p: float = 0.0  # drop characters with less than this share of the top probability; 0: none
    # XTC drops each character with a probability of at least .1, but for the least likely of these.
    xtc_probability: float = 0.0  # chance that XTC is used at a blank; 0: off
    # A penalty above 1 makes the characters of the visible text less likely. This changes little,
    # because the visible text has most of the alphabet.
    repetition_penalty: float = 1.0

    # GRPO.
    kl_beta: float = 0.28  # weight of KL(policy || reference)
    kl_estimator: Literal[*KL_ESTIMATORS] = "exact"  # k1, k2, k3: estimates from draws
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # Only the most uncertain blanks learn from rewards. This is their share of all blanks. With a
    # latent these are first letters, because the entropy there includes that of z.
    top_entropy_quantile: float = 1.0
    loss_type: Literal[*LOSS_TYPES] = "grpo"  # how blanks are weighted
    baseline: Literal[*BASELINES] = "leave_one_out"  # what a reward is compared with
    # Advantages are divided by a standard deviation of rewards. group: that of their own group.
    # batch: that of all blanks of the step. none: they are not divided.
    scale_rewards: Literal[*SCALES] = "none"
    objective: Literal[*OBJECTIVES] = "clip"  # what is maximised for each letter
    clip_eps: float = 0.2  # the ratio is clipped below at 1 - clip_eps
    clip_eps_high: float = 0.2  # and above at 1 + clip_eps_high
    num_iterations: int = 2  # uses of each rollout; 1 with objective=reinforce
    minibatch_size: int = 0  # inputs per update, shuffled; 0: all inputs of the step

    # The optimizer.
    max_iters: int = 200  # steps
    learning_rate: float = 1e-3  # peak learning rate of AdamW
    warmup_iters: int = 5  # steps of linear warm-up; a shorter run only warms up
    lr_decay_iters: int = 0  # steps until the rate is 0; 0: max_iters
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no limit

    # The machine.
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...; auto: cuda if there is a GPU
    reference_device: str = ""  # where the reference lives; empty: on `device`
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"  # auto: bfloat16 if it is fast here
    compile: Literal["auto", "true", "false"] = "auto"  # torch.compile; auto: on a GPU, if it works
    gradient_checkpointing: bool = False  # less memory, more time, the same gradients
    kernel: Literal["auto", "cuda", "torch"] = "auto"  # auto: the fused cuda kernel if it can run
    seed: int = 1  # seed of the inputs and the draws


LARGEST = 2**31 - 1
TINY = 1e-9  # stands for "more than 0", and 1 - TINY for "less than 1"
# The least and the largest value of a setting. Where a setting is not listed, a whole number is at
# least 1, and any other number at least 0.
RANGES = {
    "group_size": (2, LARGEST),
    "top_k": (0, LARGEST),
    "minibatch_size": (0, LARGEST),
    "warmup_iters": (0, LARGEST),
    "lr_decay_iters": (0, LARGEST),
    "seed": (0, LARGEST),
    "temperature": (1e-3, 100),
    "repetition_penalty": (1, 100),
    "min_p": (0, 1),
    "xtc_probability": (0, 1),
    "clip_eps": (0, 1),
    "ema_alpha": (0, 1 - TINY),
    "top_p": (TINY, 1),
    "top_entropy_quantile": (TINY, 1),
    # settings of model/pretrain.py
    "generator_steps": (0, LARGEST),
    "judge_steps": (0, LARGEST),
    "judge_layers": (0, LARGEST),
    "n_embd": (32, LARGEST),
}


class Parser(argparse.ArgumentParser):
    """argparse without abbreviated flags, and what it cannot read is a Mistake."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        raise Mistake(f"{message}; --help lists what is allowed")


def number(kind, low, high):
    """Make the function with which argparse reads an int or a float from `low` to `high`."""

    def read_number(text):
        with contextlib.suppress(ValueError):
            if low <= kind(text) <= high:
                return kind(text)
        what = "a whole number" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"{text!r} is not {what} from {low} to {high}")

    return read_number


def boolean(text):
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
    return text.lower() == "true"


def how_to_read(field):
    """Turn a field of a dataclass of settings into options for argparse."""
    if field.type is bool:
        return {"type": boolean, "nargs": "?", "const": True}
    if field.type is str:
        return {"type": os.path.expanduser}  # the shell does not expand --out_dir=~/runs
    if field.type in (int, float):
        low, high = RANGES.get(field.name, (int(field.type is int), LARGEST))
        return {"type": number(field.type, low, high)}
    return {"type": str.lower, "choices": get_args(field.type)}  # a Literal


def names_of(match):
    """Write the names of a table, such as those of OBJECTIVES, in the place of `*OBJECTIVES`."""
    return ", ".join(f'"{name}"' for name in globals()[match[1]])


def read_arguments(settings, arguments, usage=""):
    """Read config files and flags, left to right: -> {name: value} of the settings that they set.

    `settings` is a dataclass. With -h or --help this prints its source and ends the program.
    """
    parser = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    for field in fields(settings):
        parser.add_argument(f"--{field.name}", **how_to_read(field))
    names = [field.name for field in fields(settings)]
    flags = []
    for argument in arguments:
        if argument in ("-h", "--help"):
            source = "\n\n".join(map(inspect.getsource, settings.__mro__[:-1]))
            print(usage, re.sub(r"\*([A-Z_]+)", names_of, source), sep="\n\n")
            sys.exit()
        flags += [argument] if argument.startswith("-") else read_config_file(argument, names)
    return vars(parser.parse_args(flags))


def read_config_file(path, settings):
    """Turn what a config file assigns into flags: -> ["--group_size=8", ...].

    `settings` are the names that it may assign, and those that begin with _.
    """
    flags = []
    for name, value in run_file(path, "config file").items():
        if not name.startswith("_"):
            near = difflib.get_close_matches(name, settings, n=1)
            meant = f"; did you mean {near[0]}?" if near else "; --help lists all"
            refuse(name not in settings, f"config file {path}: {name} is no setting{meant}")
            refuse(
                not isinstance(value, (bool, int, float, str)),
                f"config file {path}: {name} is {value!r:.50}, but a setting is a number, text, or"
                " true or false; begin a name of your own with _",
            )
            flags.append(f"--{name}={value}")
    refuse(not flags, f"config file {path} assigns no setting; write for example group_size = 8")
    return flags


def load_config(arguments=()):
    """Read config files and flags: -> `Config`.

    A resumed run takes its settings from its checkpoint, except for those in `arguments`. For such
    a run we print which settings changed. Raises a Mistake if anything is wrong with the settings.
    """
    usage = "python train_grpo.py [config.py ...] [--key=value ...] [--help]"
    given = read_arguments(Config, arguments, usage)
    config = Config(**given)
    if config.init_from == "resume":
        config = resume(config.out_dir, given)
    check(config)
    return config


# Settings that are gone, with the value that turned each of them off, or that nearly all runs had.
GONE = {
    "direction": "reverse",
    "clip_delta": 0.0,
    "sapo_tau": 1.0,
    "sapo_tau_negative": 1.05,
    "min_lr": 0.0,
    "weight_decay": 0.0,
    "beta1": 0.9,
    "beta2": 0.99,
    "xtc_threshold": 0.1,
    "mask_ratio": 0.15,
    "hidden_words": 3,
    "credit": "word",
    "save_interval": 10,
    "wandb_log": False,
}


def flags_of(saved: dict, path) -> list[str]:
    """Turn a checkpoint's settings into flags, without those that are gone and were off.

    Raises a Mistake if a setting is gone that the run used, or has changed its meaning.
    """
    gone = sorted(saved.keys() & GONE)
    used = [f"{name}={saved[name]}" for name in gone if saved[name] != GONE[name]]
    if gone and saved["reference_mode"] == "ema":  # as old as these is an ema_alpha turned round
        used.append(f"ema_alpha={saved['ema_alpha']}")
    if used:
        raise Mistake(
            f"{path} was made by an older version, and used {', '.join(used)}, which is gone or"
            " means something else now; resume it with the version that made it"
        )
    if gone and is_first():
        print(f"{path} was made by an older version; dropped settings: {', '.join(gone)}")
    return [f"--{name}={value}" for name, value in saved.items() if name not in gone]


def saved_settings(state, given, path):
    """Take the settings from the training state in the checkpoint `path`: -> `Config`.

    A checkpoint may not choose a file that we execute. So if the run's reward names a FILE.py,
    `given` has to name a reward, or this raises a Mistake.
    """
    config = Config(**read_arguments(Config, flags_of(state["config"], path)))
    refuse(
        ".py:" in config.reward and "reward" not in given,
        f"{path}: this run's reward executes a file, so the command has to name it; if you trust"
        f" the file, add --reward={shlex.quote(config.reward)}",
    )
    return config


def resume(out, given):
    """Load the settings of the run in `out`, and apply `given` {name: value}: -> `Config`."""
    path = Path(out) / LATEST
    state = training_state(path)
    # Go on in the folder that we read from.
    old = replace(saved_settings(state, given, path), init_from="resume", out_dir=out)
    new = replace(old, **given)
    refuse(
        state["iteration"] >= new.max_iters,
        f"resume: {out} is at step {state['iteration']} already, and max_iters allows no more; set"
        f" a larger max_iters, or print the table: python -m grpo.evaluation {shlex.quote(out)}",
    )
    before = asdict(old)
    changes = [f"{k} {before[k]} -> {x}" for k, x in asdict(new).items() if x != before[k]]
    if state["processes"] != n_processes():
        changes.append(f"processes {state['processes']} -> {n_processes()}")
    rate, other = (learning_rate(state["iteration"], config) for config in (old, new))
    if rate != other:  # another max_iters makes another schedule
        changes.append(f"the learning rate of the next step {rate:.2g} -> {other:.2g}")
    if is_first():
        said = ", ".join(changes) or "its own settings"
        print(f"{out} goes on from step {state['iteration']} with {said}")
    return new


# Files that a run reads. A new run would move them aside if they were in its own folder.
READ = ("generator_checkpoint", "reference_checkpoint", "judge_checkpoint", "prompts_file")


def check(config):
    """Raise a Mistake if settings contradict each other."""
    refuse(not config.out_dir, "out_dir is empty; write for example --out_dir=out")
    refuse(
        config.minibatch_size and n_processes() > 1,
        "minibatch_size above 0 allows only one process; set minibatch_size=0, or omit torchrun",
    )
    refuse(
        config.objective == "reinforce" and (config.minibatch_size or config.num_iterations > 1),
        "with objective=reinforce a rollout can be used for only one update; set num_iterations=1"
        " and minibatch_size=0",
    )
    parse_masking(config.masking)
    named = [(name, getattr(config, name)) for name in READ]
    named += [("reward", name.rpartition(":")[0] or name) for name in parse_reward(config.reward)]
    for name, path in named:
        refuse(
            Path(config.out_dir).resolve() in Path(path).resolve().parents,
            f"{name}: {path} lies in out_dir, which a new run moves aside; name another out_dir",
        )
