"""The settings of a run: one flat dataclass, whose defaults are the default experiment.

    python train_grpo.py config/long_words.py --group_size=8      # left to right, the last one wins

A config file is Python and is executed. Every mistake is a ValueError of one line: what, which
values are allowed, how to mend it.
"""

import argparse
import ast
import contextlib
import difflib
import math
import runpy
from dataclasses import dataclass, field, fields
from pathlib import Path

from data.masking import parse_masking
from grpo.plumbing.distributed import world
from grpo.plumbing.stop import exit_on_mistake as exit_on_mistake
from grpo.plumbing.stop import told

LARGEST = 2**31 - 1  # of whole numbers: no machine has more of anything that is counted here


def setting(default, about, low=-math.inf, high=math.inf, choices=None):
    """A field with its help text and its allowed values: a list, or, of numbers, a closed range."""
    if type(default) is int:
        high = min(high, LARGEST)
    rule = {"about": about, "low": low, "high": high, "choices": choices}
    return field(default=default, metadata=rule)


@dataclass
class Config:
    given = frozenset()  # what a flag set, or a file to other than its default

    # what is read and written
    out_dir: str = setting(
        "out", "folder for config.json, metrics.jsonl, checkpoint.pt, evaluation.json"
    )
    dataset: str = setting(
        "char_diffusion", "folder under data/ with train.bin, val.bin, meta.json"
    )
    generator_checkpoint: str = setting("model/pretrained/generator.pt", "the policy to start from")
    judge_checkpoint: str = setting("model/pretrained/judge.pt", "the reward model")
    reward: str = setting(
        "judge",
        "judge, valid_words, FILE.py:FUNCTION, or a weighted sum: "
        "judge:1.0,valid_words:0.5,my.py:f:0.1",
    )
    reference_checkpoint: str = setting(
        "", "the policy to stay close to; empty: the generator as it starts"
    )
    reference_mode: str = setting(
        "static",
        "does the reference follow the policy? ema: every step a little; "
        "periodic: now and then all the way",
        choices=("static", "ema", "periodic"),
    )
    ema_alpha: float = setting(
        0.01,
        "reference_mode=ema: each step reference = (1 - ema_alpha) reference + ema_alpha policy",
        1e-9,
        1.0,
    )
    reference_update_freq: int = setting(
        50, "reference_mode=periodic: steps between copies of the policy", 1
    )
    reference_device: str = setting(
        "", "where the reference lives, cpu to save GPU memory; empty: as device"
    )
    init_from: str = setting(
        "pretrained",
        "start anew, or go on from out_dir/checkpoint.pt",
        choices=("pretrained", "resume"),
    )
    save_interval: int = setting(50, "steps between checkpoints; one is also written at the end", 1)
    log_interval: int = setting(1, "steps between lines of metrics.jsonl", 1)
    eval_interval: int = setting(25, "steps between looks at a few held-out inputs", 1)
    eval_inputs: int = setting(512, "held-out inputs of the final table", 1)
    wandb_log: bool = setting(False, "log to Weights & Biases too")
    wandb_project: str = setting("fill-in-grpo", "its project")
    wandb_run_name: str = setting("", "its run name; empty: wandb invents one")

    # the inputs
    batch_size: int = setting(64, "masked inputs per micro-batch, B", 1)
    gradient_accumulation_steps: int = setting(1, "micro-batches per step", 1)
    block_size: int = setting(64, "characters per input, T; the 5-gram referee needs 5", 5)
    prompts_file: str = setting(
        "",
        'train on your own inputs: JSON {"prompts": ["th_ c_t", ...]}, _ for a blank, '
        "any lengths up to block_size",
    )
    masking: str = setting(
        "short", "random, span, word, short, sticky, or a weighted mix: random:0.5,word:0.5"
    )
    mask_ratio: float = setting(0.15, "share of hidden characters (random, span, sticky)", 0.0, 1.0)
    hidden_words: int = setting(3, "hidden words per input (word, short)", 1)

    # the draws
    group_size: int = setting(
        16, "completions per input, G: each is compared with the others", 2, 1024
    )
    temperature: float = setting(1.0, "softmax temperature of the policy", 1e-3, 100.0)
    top_k: int = setting(0, "draw from the k likeliest characters; 0: from all", 0)
    top_p: float = setting(
        1.0, "draw from the likeliest characters that hold this share; 1: from all", 1e-6, 1.0
    )
    min_p: float = setting(
        0.0,
        "draw from characters at least this likely, relative to the likeliest; 0: from all",
        0.0,
        1.0,
    )
    xtc_threshold: float = setting(
        0.1, "XTC: of the characters at least this likely, keep the least likely alone,", 1e-6, 1.0
    )
    xtc_probability: float = setting(0.0, "with this probability per blank; 0: off", 0.0, 1.0)
    repetition_penalty: float = setting(
        1.0,
        "visible characters are made less likely: positive logits divided by it, "
        "negative multiplied; 1: off",
        0.01,
        100.0,
    )

    # GRPO
    kl_beta: float = setting(
        0.09,
        "weight of KL(policy || reference); with kl_target, its weight there; 0: no KL",
        0.0,
    )
    kl_target: float = setting(
        0.65,
        "KL per blank, in nats, at which the weight is kl_beta: far less below, far more above, "
        "so that the KL ends near it; 0: kl_beta at any",
        0.0,
    )
    kl_estimator: str = setting(
        "exact", "how the KL is computed", choices=("exact", "k1", "k2", "k3")
    )
    kl_of: str = setting(
        "row",
        "KL of each value of the latent, or of their mixture, per blank",
        choices=("row", "marginal"),
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus", 0.0)
    top_entropy_quantile: float = setting(
        1.0, "share of blanks, the most uncertain, that carry policy gradient; 1: all", 1e-6, 1.0
    )
    loss_type: str = setting(
        "grpo", "how blanks are averaged", choices=("grpo", "dapo", "bnpo", "dr_grpo", "sum")
    )
    baseline: str = setting(
        "mean", "what a reward is compared with", choices=("mean", "leave_one_out")
    )
    scale_rewards: str = setting(
        "batch", "what advantages are divided by", choices=("group", "batch", "none")
    )
    credit: str = setting(
        "run",
        "credit a blank by the view of the whole input, or of its run of adjacent blanks",
        choices=("input", "run"),
    )
    importance_sampling_level: str = setting(
        "token", "what the ratio belongs to", choices=("token", "sequence", "none")
    )
    clip_eps: float = setting(0.2, "the ratio is clipped below at 1 - clip_eps", 0.0, 1.0)
    clip_eps_high: float = setting(0.2, "and above at 1 + clip_eps_high", 0.0)
    clip_delta: float = setting(
        0.0,
        "two-sided clip: where the advantage is negative, the ratio is bounded by this too; "
        "0: by nothing",
        0.0,
    )
    num_iterations: int = setting(2, "times that a rollout is used; without a ratio 1", 1)
    minibatch_size: int = setting(
        0,
        "inputs per update: the step's inputs are shuffled and split, an update each; 0: no split",
        0,
    )

    # the optimizer
    max_iters: int = setting(110, "steps", 1)
    learning_rate: float = setting(1e-3, "peak learning rate of AdamW", 0.0)
    min_lr: float = setting(0.0, "learning rate at the end of the cosine", 0.0)
    warmup_iters: int = setting(5, "steps of linear warm-up, in a shorter run all", 0)
    lr_decay_iters: int = setting(0, "steps until min_lr; 0: max_iters", 0)
    weight_decay: float = setting(0.0, "AdamW's, on matrices", 0.0)
    beta1: float = setting(0.9, "AdamW's", 0.0, 0.999999)
    beta2: float = setting(0.99, "AdamW's", 0.0, 0.999999)
    grad_clip: float = setting(1.0, "largest norm of the gradient; 0: any", 0.0)

    # the machine
    device: str = setting("auto", "auto, cpu, cuda, cuda:1, ...; auto: cuda where there is one")
    dtype: str = setting(
        "auto",
        "of the forward passes; auto: bfloat16 where the machine multiplies it",
        choices=("auto", "float32", "bfloat16"),
    )
    gradient_checkpointing: bool = setting(
        False,
        "forget each block's activations and compute them again in the backward pass: "
        "less memory, one more forward pass",
    )
    compile: str = setting(
        "auto",
        "torch.compile; auto: on cuda, and on a cpu in runs long enough to repay it",
        choices=("auto", "true", "false"),
    )
    kernel: str = setting(
        "auto",
        "sampling and stats: fused for CUDA, or their PyTorch definitions; "
        "auto: fused where it can run",
        choices=("auto", "cuda", "torch"),
    )
    seed: int = setting(1, "of inputs and draws", 0)


FIELDS = {f.name: f for f in fields(Config)}
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
PATHS = ("generator_checkpoint", "judge_checkpoint", "reference_checkpoint", "prompts_file")
MOST_CHARACTERS = 10**12  # in a step's completions, for which no memory is large enough
NEUTRAL = {"num_iterations": 1}  # what asks for nothing, where it is not the default
WORDS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Parser(argparse.ArgumentParser):
    """argparse, whose mistakes are the user's like all others."""

    def error(self, message):
        raise ValueError(f"{message}; --help lists what there is")


def check_name(name, source):
    if name in FIELDS:
        return
    mend = "python train_grpo.py --help lists them all"
    for near in difflib.get_close_matches(str(name), FIELDS, n=1):
        mend = f"did you mean {near!r}?"
    raise ValueError(f"{source}: there is no setting {name!r}; {mend}")


def allowed(name):
    """What a setting takes, in words."""
    rule = FIELDS[name].metadata
    if rule["choices"]:
        return f"one of {', '.join(rule['choices'])}"
    kind = KINDS[FIELDS[name].type]
    if rule["low"] == -math.inf:
        return kind
    if rule["high"] == LARGEST:
        return f"{kind} of {rule['low']} or more, below 2**31"
    if rule["high"] == math.inf:
        return f"{kind} of {rule['low']} or more"
    return f"{kind} from {rule['low']} to {rule['high']}"


def is_allowed(value, rule):
    """Is a value of the field's own type among those that its `setting` names?"""
    if rule["choices"]:
        return value in rule["choices"]
    if isinstance(value, str):
        return "\0" not in value  # no file has such a name
    return rule["low"] <= value <= rule["high"] and value != math.inf  # False for NaN


def as_kind(kind, value):
    """Text from a flag, or a value from a file, as the field's type, or as it is: then it is none.

    Raises ValueError, KeyError or OverflowError for text that is no number and no truth value.
    """
    if kind is float and type(value) is int:
        return float(value)
    if kind is str and isinstance(value, bool):  # compile = True in a file
        return str(value).lower()
    if kind is str or not isinstance(value, str):
        return value
    if kind is bool:
        return WORDS[value.lower()]
    return kind(value)


def convert(name, value, source):
    """A value as the field's own type: `value` is text from a flag, or a Python value from a file.

    Raises ValueError, which names `source`, for what the setting does not take.
    """
    check_name(name, source)
    kind = FIELDS[name].type
    rule = FIELDS[name].metadata
    with contextlib.suppress(ValueError, KeyError, OverflowError):  # else it stays what it is
        value = as_kind(kind, value)
    if type(value) is kind and is_allowed(value, rule):
        return value
    raise ValueError(
        f"{source}: {name}={value!r:.200} is not allowed; "
        f"{name} ({rule['about']}) takes {allowed(name)}"
    )


def read_file(path):
    """What a Python file assigns: {name: value}. Raises ValueError if it does not run.

    What is imported, defined, or read by the file itself is its own business, if it is no setting,
    and so are names that begin with _: a setting with a slip in it is none of these.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"config file {path} does not exist; write --key=value for a setting, "
            "or name a file such as config/grpo_config.py"
        )
    try:
        values = runpy.run_path(path)
        tree = ast.parse(Path(path).read_bytes())
    except (Exception, SystemExit) as error:  # whatever it raises is the user's mistake
        raise ValueError(f"config file {path} does not run: {told(error)}; mend it") from None
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    assigned = {node.id for node in names if node.id[0] != "_" and node.id not in read}
    return {name: value for name, value in values.items() if name in assigned or name in FIELDS}


def load_config(arguments):
    """Config files and --key=value flags, applied left to right -> Config.

    Raises ValueError, with one line, for any mistake.
    """
    config = Config()
    for argument in arguments:
        source = argument
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            check_name(name, argument)
            if not equals:
                raise ValueError(f"{argument}: no value; write --{name}=VALUE")
            source = "command line"
            assignments = {name: value}
        else:
            assignments = read_file(argument)
        for name, value in assignments.items():
            typed = convert(name, value, source)
            setattr(config, name, typed)
            if source == "command line" or typed != FIELDS[name].default:
                config.given |= {name}  # a file that repeats a default asks for nothing
    give_way(config)
    if config.init_from == "pretrained":
        check_together(config)
    return config


def give_way(config):
    """Defaults that do not suit what was set, and that nobody set, become what suits it."""
    if "warmup_iters" not in config.given:
        config.warmup_iters = min(config.warmup_iters, config.lr_decay_iters or config.max_iters)
    if "num_iterations" not in config.given and config.importance_sampling_level == "none":
        config.num_iterations = NEUTRAL["num_iterations"]


def without_use(config):
    """{name: what it needs} of the settings that the others make meaningless, or wrong."""
    needs = {}
    if config.reference_mode != "ema":
        needs["ema_alpha"] = "reference_mode=ema"
    if config.reference_mode != "periodic":
        needs["reference_update_freq"] = "reference_mode=periodic"
    if config.xtc_probability == 0:
        needs["xtc_threshold"] = "xtc_probability above 0"
    if config.kl_estimator != "exact":
        needs["kl_of"] = "kl_estimator=exact"
    if config.masking in ("word", "short"):
        needs["mask_ratio"] = "a masking other than word and short"
    if config.importance_sampling_level == "none":
        for name in ("num_iterations", "minibatch_size", "clip_eps", "clip_eps_high", "clip_delta"):
            needs[name] = "the ratio, importance_sampling_level=token or sequence"
    return needs


def check_together(config):
    """What no field can know alone: raises ValueError for settings that do not go together."""
    parse_masking(config.masking)
    if not config.out_dir:
        raise ValueError("out_dir='' names no folder; write for example out_dir=out")
    if config.min_lr > config.learning_rate:
        raise ValueError(
            f"min_lr={config.min_lr} is above learning_rate={config.learning_rate}; lower min_lr"
        )
    end = "lr_decay_iters" if config.lr_decay_iters else "max_iters"
    steps = getattr(config, end)
    if config.warmup_iters > steps:
        raise ValueError(
            f"warmup_iters={config.warmup_iters} is more than {end}={steps}; lower warmup_iters"
        )
    if 0 < config.clip_delta <= 1 + config.clip_eps_high:
        raise ValueError(
            f"clip_delta={config.clip_delta} is within clip_eps_high={config.clip_eps_high}; "
            "clip_delta takes more than 1 + clip_eps_high, or 0 for none"
        )
    inputs = config.batch_size * config.gradient_accumulation_steps
    characters = inputs * config.group_size * config.block_size
    if characters > MOST_CHARACTERS:
        raise ValueError(
            f"batch_size * gradient_accumulation_steps * group_size * block_size = {characters} "
            f"characters a step; at most {MOST_CHARACTERS} are allowed: lower one of them"
        )
    check_minibatches(config)
    for name, needed in without_use(config).items():
        value = getattr(config, name)
        neutral = NEUTRAL.get(name, FIELDS[name].default)
        if value != neutral:
            raise ValueError(
                f"{name}={value!r} needs {needed}; set that, or leave {name} at {neutral!r}"
            )
    for name in PATHS:
        path = getattr(config, name)
        if not Path(path or ".").exists():  # noticed before a dataset is made
            raise ValueError(f"{name}={path} does not exist; name a file that does")


def check_minibatches(config):
    """Raises ValueError where mini-batches are not whole micro-batches, or have several owners."""
    m = config.minibatch_size
    if m and world()[0] > 1:
        raise ValueError(
            f"minibatch_size={m} with {world()[0]} processes: mini-batches are shuffled "
            "within one process; set minibatch_size=0"
        )
    inputs = config.batch_size * config.gradient_accumulation_steps
    in_pieces = m > config.batch_size and m % config.batch_size
    if m and (inputs % m or in_pieces):
        raise ValueError(
            f"minibatch_size={m} does not divide the step's batch_size * "
            f"gradient_accumulation_steps = {inputs} inputs into whole micro-batches; "
            f"it takes a divisor of {inputs} that is below batch_size or a multiple of it"
        )


GROUPS = {  # the first setting of each -> its title in --help
    "out_dir": "what is read and written",
    "batch_size": "the inputs",
    "group_size": "the draws",
    "kl_beta": "GRPO",
    "max_iters": "the optimizer",
    "device": "the machine",
}


def help_text(config):
    """Every setting with its value in `config`, aligned, in groups."""
    lines = [
        "usage: python train_grpo.py [config.py ...] [--key=value ...] [--help]",
        "Files and flags are applied left to right; --help after them shows their values.",
    ]
    values = {name: f"--{name}={getattr(config, name)}" for name in FIELDS}
    width = max(map(len, values.values()))
    for name, value in values.items():
        if name in GROUPS:
            lines += ["", GROUPS[name]]
        rule = FIELDS[name].metadata
        line = f"  {value:{width}}  {rule['about']}"
        if rule["choices"]:
            line += f" [{' | '.join(rule['choices'])}]"
        lines.append(line)
    return "\n".join(lines)


# On --init_from=resume these may differ from the run that wrote the checkpoint; every other
# setting would change its mathematics or its record.
FREE_ON_RESUME = {
    "init_from",
    "out_dir",
    "max_iters",
    "save_interval",
    "eval_interval",
    "eval_inputs",
    "wandb_log",
    "wandb_project",
    "wandb_run_name",
    "device",
    "reference_device",
    "compile",
    "kernel",
    "gradient_checkpointing",
}


def from_saved(saved, path):
    """The settings that the checkpoint `path` holds -> Config. ValueError for what is none."""
    config = Config()  # a setting younger than the checkpoint had its default
    for name, value in saved.items():
        setattr(config, name, convert(name, value, path))
    return config


def resumed(config, saved):
    """The settings of a run that goes on: those it was `saved` with, and what may be given anew.

    Raises ValueError, naming all that differ, where `config` gives what would not continue it.
    """
    out = config.out_dir
    old = from_saved(saved, f"{out}/checkpoint.pt")
    schedule_end = old.lr_decay_iters or old.max_iters
    old.lr_decay_iters = schedule_end  # more steps do not stretch the schedule
    old.out_dir = out
    differ = []
    for name in sorted(config.given):
        value = getattr(config, name)
        was = getattr(old, name)
        unsaid = (name, value) in (("dtype", "auto"), ("lr_decay_iters", 0))
        if name in FREE_ON_RESUME:
            setattr(old, name, value)
        elif value != was and not unsaid:
            differ.append(f"{name}={value!r} (it was {was!r})")
    if differ:
        raise ValueError(
            f"resume: the run in {out} goes on only as it began, not with {', '.join(differ)}; "
            "leave that out, or begin a new out_dir"
        )
    if ".py:" in old.reward and "reward" not in config.given:
        raise ValueError(
            f"resume: reward={old.reward!r} runs a file, which a checkpoint may not ask for; "
            f"give it again: --reward={old.reward}"
        )
    if old.max_iters > schedule_end and old.min_lr == 0:
        start = old.reference_checkpoint or old.generator_checkpoint
        raise ValueError(
            f"resume: max_iters={old.max_iters}, but the learning rate is 0 from step "
            f"{schedule_end} on; begin a new out_dir from there: "
            f"--generator_checkpoint={out}/checkpoint.pt --reference_checkpoint={start}"
        )
    check_together(old)
    return old
