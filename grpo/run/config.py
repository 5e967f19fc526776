"""All settings of a run, in one flat dataclass whose defaults are the default experiment.

    python train_grpo.py config/latent.py --group_size=8         # left to right, the last one wins

A config file is Python, and we execute it. What it assigns has to be a setting, unless the name
begins with _. `read_settings` reads assignments and flags alike.
"""

import argparse
import contextlib
import difflib
import inspect
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, get_args

from data.dataset import files_of
from data.files import shipped_path
from data.masking import MASKINGS, parse_masking
from data.user_mistake import Mistake
from grpo.advantage import BASELINES, SCALES
from grpo.distributed import is_first, n_processes
from grpo.loss import KL_ESTIMATORS, LOSS_TYPES, OBJECTIVES
from grpo.run.checkpoint import LATEST, training_state
from grpo.run.origin import differences, made_with
from grpo.run.reward_setting import parse_reward
from grpo.run.user_file import run_file

LARGEST = 2**31 - 1
TINY = 1e-9  # stands for "more than 0", and 1 - TINY for "less than 1"


def within(default: float, least: float, largest: float = LARGEST) -> Field:
    """Declare a number with its range. By default it is 1 or more for an int, 0 for a float."""
    return field(default=default, metadata={"range": (least, largest)})


@dataclass
class Config:
    # What is read and written.
    out_dir: str = "out"  # folder for config.json, metrics.jsonl, checkpoint.pt, evaluation.json
    # A folder under data/, or an absolute path, with train.txt and val.txt.
    dataset: str = "sums"
    generator_checkpoint: str = "model/pretrained/sums.pt"  # the policy to start from
    judge_checkpoint: str = "model/pretrained/sums_judge.pt"  # the reward model; empty: none
    # judge, chain, exact, correct (sums), valid (text), JUDGE.pt, FILE.py:FUNCTION, or a weighted
    # sum of these: judge:1.0,my.py:f:0.5
    reward: str = "judge"
    reference_checkpoint: str = ""  # the policy to stay close to; empty: generator_checkpoint
    # static: the reference never changes. ema: it moves towards the policy a little in every step.
    # periodic: every reference_update_freq steps it becomes a copy of the policy.
    reference_mode: Literal["static", "ema", "periodic"] = "static"
    # ema: reference = ema_alpha reference + (1 - ema_alpha) policy
    ema_alpha: float = within(0.99, 0, 1 - TINY)
    reference_update_freq: int = 10  # periodic: steps between two copies
    init_from: Literal["pretrained", "resume"] = "pretrained"  # resume: from out_dir/checkpoint.pt
    eval_interval: int = 40  # steps between checkpoints, each with a look at a few completions
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
    # What to hide. Sums: columns, digits. Anything else: random, word, short, words, shorts, or a
    # mix of these such as short:0.8,word:0.2
    masking: str = "columns"

    # The draws.
    # Completions per input, G: each is compared with the others. (TRL: num_generations)
    group_size: int = within(16, 2)
    temperature: float = within(1.0, 1e-3, 100)  # softmax temperature of the policy
    top_k: int = within(0, 0)  # draw from the k likeliest characters; 0: from all
    # Draw from the fewest characters with this total probability; 1: from all
    top_p: float = within(1.0, TINY, 1)
    # Drop characters with less than this share of the top probability; 0: none
    min_p: float = within(0.0, 0, 1)
    # XTC drops every character with a probability of at least .1, except the least likely of them.
    xtc_probability: float = within(0.0, 0, 1)  # chance that XTC is used at a blank; 0: off
    # A penalty above 1 makes the characters of the visible text less likely. This changes little,
    # because the visible text has most of the alphabet.
    repetition_penalty: float = within(1.0, 1, 100)

    # GRPO.
    kl_beta: float = 0.25  # weight of KL(policy || reference) (TRL: beta)
    kl_estimator: Literal[*KL_ESTIMATORS] = "exact"  # k1, k2, k3: estimates from draws (TRL: k3)
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # Only the most uncertain blanks learn from rewards. This is their share of all blanks. With a
    # latent these are first blanks, because the entropy there includes that of z.
    top_entropy_quantile: float = within(1.0, TINY, 1)
    loss_type: Literal[*LOSS_TYPES] = "grpo"  # how much each blank weighs
    # What a reward is compared with: mean (of its group), leave_one_out (of the others), none.
    baseline: Literal[*BASELINES] = "leave_one_out"
    # Advantages are divided by a standard deviation of rewards. group: that of their own group.
    # batch: that of all completions of the step. none: they are not divided.
    scale_rewards: Literal[*SCALES] = "none"
    # What an update maximizes. (gspo is TRL's importance_sampling_level="sequence".)
    objective: Literal[*OBJECTIVES] = "clip"
    clip_eps: float = within(0.2, 0, 1)  # the ratio is at least 1 - clip_eps (TRL: epsilon)
    clip_eps_high: float = 0.2  # and at most 1 + clip_eps_high (TRL: epsilon_high)
    num_iterations: int = 2  # uses of each rollout; 1 with objective=reinforce
    minibatch_size: int = within(0, 0)  # inputs per update, shuffled; 0: all inputs of the step

    # The optimizer.
    max_iters: int = 200  # steps
    learning_rate: float = 1e-3  # peak learning rate of AdamW
    warmup_iters: int = within(5, 0)  # steps of linear warm-up; a shorter run only warms up
    lr_decay_iters: int = within(0, 0)  # steps until the rate is 0; 0: max_iters
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no limit

    # The machine.
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...; auto: cuda if there is a GPU
    reference_device: str = ""  # where the reference lives; empty: on `device`
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"  # auto: bfloat16 if it is fast here
    compile: bool = False  # torch.compile; on a GPU it pays off after some thousand steps
    gradient_checkpointing: bool = False  # less memory, more time, the same gradients
    kernel: Literal["auto", "cuda", "torch"] = "auto"  # auto: the fused cuda kernel if it can run
    seed: int = within(1, 0)  # seed of the inputs and the draws

    # These aren't settings, but go with them:
    changes = ()  # made by whoever resumed the run: [[step, ["max_iters 100 -> 200", ...]], ...]
    made_with = {}  # the content of its files and code, and the machine (grpo/run/origin.py)


class Parser(argparse.ArgumentParser):
    """argparse, but what it can't read is a Mistake."""

    def error(self, message: str):
        raise Mistake(f"{message}; --help lists what is allowed")


def convert(setting: Field, value: object) -> object:
    """Convert a value to the type of its setting. Raises a ValueError that says what's allowed."""
    kind = setting.type
    if kind in (int, float):
        low, high = setting.metadata.get("range", (int(kind is int), LARGEST))
        with contextlib.suppress(ValueError):
            if low <= kind(str(value)) <= high:  # as a text, so that 1.5 is no whole number
                return kind(str(value))
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{str(value)!r} is not {what} from {low} to {high}")
    if kind is str and isinstance(value, str):
        # No shell expands the ~ of --out_dir=~/runs. A checkpoint can't hold a subclass of str.
        return os.path.expanduser(str.__str__(value))
    choices = ("true", "false") if kind is bool else get_args(kind)
    text = str(value).lower()
    if text not in choices:
        raise ValueError(f"{value!r} is not {' or '.join(choices) or 'a text'}")
    return text == "true" if kind is bool else text


def read_settings(settings: type, given: dict[str, object], source: str = "") -> dict[str, object]:
    """Convert {name: value} to the types of the settings.

    Raises a Mistake that begins with its `source`, for example the name of a config file.
    """
    known = {setting.name: setting for setting in fields(settings)}
    values = {}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            near = ["init_from=resume"] if name == "resume" else near
            hint = f"did you mean --{near[0]}?" if near else "--help lists them all"
            raise Mistake(f"{source}there is no setting {name}; {hint}")
        try:
            values[name] = convert(known[name], value)
        except ValueError as error:
            raise Mistake(f"{source}{name}: {error}") from None
    return values


def read_arguments(settings: type, arguments: Sequence[str], usage: str = "") -> dict[str, object]:
    """Read config files and flags, left to right, and return what they set.

    `settings` is a dataclass. With -h or --help this prints its source and what a setting
    may be, and ends the program.
    """
    if {"-h", "--help"} & {*arguments}:
        print(usage, inspect.getsource(settings), sep="\n\n")
        values = {setting.name: get_args(setting.type) for setting in fields(settings)}
        for name, choices in (values | {"masking": MASKINGS}).items():
            if choices:
                print(f"{name}: {', '.join(choices)}")
        sys.exit()
    types = {setting.name: setting.type for setting in fields(settings)}
    values = {}
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, text = argument.removeprefix("--").partition("=")
            if not equals and types.get(name, bool) is not bool:
                raise Mistake(f"--{name} has no value; write --{name}=VALUE")
            values |= read_settings(settings, {name: text if equals else True})
        else:
            values |= read_settings(settings, read_config_file(argument, settings), f"{argument}: ")
    return values


def read_config_file(path: str, settings: type) -> dict[str, object]:
    """Return what a config file assigns: settings, and whatever else could be a misspelled one."""
    known = {setting.name for setting in fields(settings)}
    given = {}
    for name, value in run_file(path, "config file").items():
        is_code = callable(value) or inspect.ismodule(value)
        if name in known or not (is_code or name.startswith("_")):
            given[name] = value
    if not given:
        raise Mistake(f"config file {path} assigns no setting; write for example group_size = 8")
    return given


def load_config(arguments: Sequence[str] = ()) -> Config:
    """Read config files and flags. Raises a Mistake if anything is wrong with the settings.

    A resumed run takes its settings from its checkpoint, and `arguments` change them.
    """
    usage = "python train_grpo.py [config.py ...] [--key=value ...] [--help]"
    given = read_arguments(Config, arguments, usage)
    config = Config(**given)
    if config.init_from == "resume":
        config = resume(config.out_dir, given)
    check(config)
    return config


def saved_settings(state: dict, given: dict, path: Path) -> Config:
    """Take the settings from the training state in the checkpoint `path`.

    A checkpoint may not choose a file that we execute. So if the run's reward names a FILE.py,
    `given` has to name a reward, or this raises a Mistake.
    """
    saved = state["config"]
    config = Config(**read_settings(Config, saved, f"{path}: "))
    if ".py:" in config.reward and "reward" not in given:
        raise Mistake(
            f"{path}: this run's reward executes a file, so the command has to name it; if you"
            f" trust the file, add --reward={shlex.quote(config.reward)}"
        )
    return config


# These say where a run goes. They don't change what it computes.
PLACES = ("out_dir", "init_from", "wandb_project", "wandb_run_name")


def resume(out_dir: str, given: dict) -> Config:
    """Load the settings of the run in `out_dir`, apply `given`, and print what that changes."""
    path = Path(out_dir) / LATEST
    state = training_state(path)
    step = state["iteration"]
    # The checkpoint may be a copy, so what counts is the folder we read from.
    old = replace(saved_settings(state, given, path), init_from="resume", out_dir=out_dir)
    new = replace(old, **given)
    if step > new.max_iters:
        raise Mistake(
            f"resume: {out_dir} is at step {step} already, and max_iters={new.max_iters}; set a"
            " larger max_iters"
        )
    pairs = {name: (getattr(old, name), value) for name, value in asdict(new).items()}
    changed = {name: f"{name} {a} -> {b}" for name, (a, b) in pairs.items() if a != b}
    others = differences(state["made_with"], made_with(new))
    line = ", ".join([*changed.values(), *others]) or "its own settings"
    if "generator_checkpoint" in changed:
        line += "; so what the table calls *before* is another model now"
    if is_first():
        print(f"{out_dir} resumes at step {step} with {line}")
    noted = [text for name, text in changed.items() if name not in PLACES] + others
    new.changes = state["changes"] + ([[step, noted]] if noted else [])
    return new


def check(config: Config) -> None:
    """Raise a Mistake if settings contradict each other."""
    if not config.out_dir:
        raise Mistake("out_dir is empty; write for example --out_dir=out")
    names = "generator_checkpoint", "judge_checkpoint", "reference_checkpoint", "prompts_file"
    files = {getattr(config, name): name for name in names}
    files |= {part: "reward" for part in parse_reward(config.reward) if "." in part}
    files[str(files_of(config.dataset)[0].parent)] = "dataset"
    for file, name in files.items():
        inside = file and shipped_path(file).resolve().is_relative_to(
            Path(config.out_dir).resolve()
        )
        if inside and config.init_from != "resume":
            raise Mistake(
                f"{name}={file} is in out_dir, which a new run moves aside; name another out_dir"
            )
    if config.minibatch_size and n_processes() > 1:
        raise Mistake(
            "minibatch_size above 0 works with one process only; set minibatch_size=0, or run"
            " without torchrun"
        )
    inputs = config.batch_size * config.gradient_accumulation_steps
    if config.minibatch_size and inputs % config.minibatch_size:
        raise Mistake(
            f"minibatch_size={config.minibatch_size} doesn't divide the {inputs} inputs of a step,"
            " so one update would have fewer; name a divisor"
        )
    reused = config.minibatch_size or config.num_iterations > 1
    if config.objective == "reinforce" and reused:
        raise Mistake(
            "with objective=reinforce a rollout can be used for only one update; set"
            " num_iterations=1 and minibatch_size=0"
        )
    parse_masking(config.masking)
