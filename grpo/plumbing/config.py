"""One flat dataclass has all settings of a run, and its defaults are the default experiment.

`load_config` reads the settings from config files and flags. `check` refuses settings that
contradict each other, and settings that name a missing file.
"""

import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from data.masking import parse_masking
from data.user_mistake import refuse
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
    # How a judge scores a word. log_odds: its estimate of log(p/q), where p is the probability of
    # the word in real text, and q under the base model. probability: P(the word is real).
    judge_score: Literal["log_odds", "probability"] = "log_odds"
    reference_checkpoint: str = ""  # the policy to stay close to; empty: generator_checkpoint
    # static: the reference never changes. ema: it moves towards the policy a little in every step.
    # periodic: every reference_update_freq steps it becomes a copy of the policy.
    reference_mode: Literal["static", "ema", "periodic"] = "static"
    ema_alpha: float = 0.01  # ema: reference = (1 - ema_alpha) reference + ema_alpha policy
    reference_update_freq: int = 10  # periodic: steps between two copies
    init_from: Literal["pretrained", "resume"] = "pretrained"  # resume: from out_dir/checkpoint.pt
    save_interval: int = 10  # steps between checkpoints; one is also written at the end
    eval_interval: int = 10  # steps between printing a few held-out fills
    eval_inputs: int = 256  # the final table is measured on this many held-out inputs
    replay: bool = True  # record replay.jsonl, which `python -m grpo.tools.replay` shows
    wandb_log: bool = False  # log to Weights & Biases too
    wandb_project: str = "fill-in-grpo"  # the project on wandb
    wandb_run_name: str = ""  # name of the run on wandb; empty: wandb invents one

    # The inputs.
    batch_size: int = 40  # masked inputs per micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches per step
    block_size: int = 64  # characters per input, T
    # Train on your own inputs, each at most block_size long: a JSON file that holds
    # {"prompts": ["th_ c_t", ...]}, with _ for a blank.
    prompts_file: str = ""
    masking: str = "short"  # random, span, word, short, sticky, or a mix: random:0.5,word:0.5
    mask_ratio: float = 0.15  # share of hidden characters, if masking is random, span or sticky
    hidden_words: int = 3  # hidden words per input, if masking is word or short

    # The draws.
    group_size: int = 16  # completions per input, G: each is compared with the others
    temperature: float = 1.0  # softmax temperature of the policy
    top_k: int = 0  # draw from the k likeliest characters; 0: from all
    top_p: float = 1.0  # draw from the fewest characters with this total probability; 1: from all
    min_p: float = 0.0  # drop characters with less than this share of the top probability; 0: none
    # XTC drops each character whose probability is at least xtc_threshold, except for the least
    # likely of these.
    xtc_threshold: float = 0.1
    xtc_probability: float = 0.0  # chance that XTC is used at a blank; 0: off
    # A penalty above 1 makes the characters of the visible text less likely. This changes little,
    # because the visible text has most of the alphabet.
    repetition_penalty: float = 1.0

    # GRPO.
    kl_beta: float = 0.65  # weight of KL(policy || reference)
    kl_estimator: Literal["exact", "k1", "k2", "k3"] = "exact"  # k1, k2, k3: estimates from draws
    entropy_coef: float = 0.0  # weight of the entropy bonus
    # Only the most uncertain blanks learn from rewards. This is their share of all blanks.
    top_entropy_quantile: float = 1.0
    loss_type: Literal["grpo", "dapo", "bnpo", "dr_grpo", "sum"] = "grpo"  # how blanks are weighted
    baseline: Literal["mean", "leave_one_out"] = "leave_one_out"  # what a reward is compared with
    # Advantages are divided by a standard deviation of rewards. group: that of their own group.
    # batch: that of all blanks of the step. none: they are not divided.
    scale_rewards: Literal["group", "batch", "none"] = "none"
    # run: each hidden word (a run of blanks) earns its own reward. input: each earns the sum of the
    # rewards of all words in its input.
    credit: Literal["input", "run"] = "run"
    # What we maximise for each letter. All but PPO's `clip` need importance_sampling_level=token.
    objective: Literal["clip", "cispo", "sapo", "gmpo", "dppo"] = "clip"
    sapo_tau: float = 1.0  # sapo: how sharply the ratio is bounded; larger is sharper
    sapo_tau_negative: float = 1.05  # sapo_tau where the advantage is negative
    # How many importance ratios: one for each letter, one for each completion (sequence), or none.
    importance_sampling_level: Literal["token", "sequence", "none"] = "token"
    clip_eps: float = 0.2  # the ratio is clipped below at 1 - clip_eps
    clip_eps_high: float = 0.2  # and above at 1 + clip_eps_high
    clip_delta: float = 0.0  # largest ratio where the advantage is negative; 0: no bound
    num_iterations: int = 2  # uses of each rollout; must be 1 if importance_sampling_level=none
    minibatch_size: int = 0  # inputs per update, shuffled; 0: all inputs of the step

    # The optimizer.
    max_iters: int = 30  # steps
    learning_rate: float = 1e-3  # peak learning rate of AdamW
    min_lr: float = 0.0  # learning rate at the end of its cosine decay
    warmup_iters: int = 5  # steps of linear warm-up; a shorter run only warms up
    lr_decay_iters: int = 0  # steps until min_lr; 0: max_iters
    weight_decay: float = 0.0  # AdamW's weight decay, only on matrices
    beta1: float = 0.9  # AdamW's decay of the mean gradient
    beta2: float = 0.99  # AdamW's decay of the mean squared gradient
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no limit

    # The machine.
    device: str = "auto"  # auto, cpu, cuda, cuda:1, ...; auto: cuda if there is a GPU
    reference_device: str = "auto"  # where the reference lives; auto: on `device`
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 if it is fast here
    compile: Literal["auto", "true", "false"] = "auto"  # torch.compile; auto: on a GPU, if it works
    gradient_checkpointing: bool = False  # less memory, more time, the same gradients
    kernel: Literal["auto", "cuda", "torch"] = "auto"  # auto: the fused cuda kernel if it can run
    seed: int = 1  # seed of the inputs and the draws


def load_config(arguments=()):
    """Read config files and --key=value flags, applied left to right: -> `Config`.

    A resumed run takes its settings from its checkpoint, except for those in `arguments`. For such
    a run we print which settings changed. Raises a Mistake if anything is wrong with the settings.
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
    """Load the settings of the run in `out`, and apply `given` {name: value}: -> `Config`.

    Raises a Mistake if the run has no steps left. Also raises a Mistake if the run's reward names a
    FILE.py and `given` has no reward, because a checkpoint may not choose a file that we execute.
    """
    path = Path(out) / LATEST
    state = training_state(read(path), path)
    old = from_saved(state["config"], str(path))
    here = {"init_from": "resume", "out_dir": out}  # go on in the folder that we read from
    new = replace(old, **given | here)
    refuse(
        ".py:" in old.reward and "reward" not in given,
        "resume: this run's reward executes a file, so the command must name the reward;"
        f" if you trust the file, add --reward={old.reward}",
    )
    refuse(
        state["iteration"] >= new.max_iters,
        f"resume: {out} is at step {state['iteration']} already, and max_iters allows no more; set"
        f" a larger max_iters, or print the table: python -m grpo.evaluation {out}",
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
    """Check the settings {name: value} that the checkpoint `path` holds: -> `Config`."""
    return Config(**{name: convert(Config, name, value, path) for name, value in saved.items()})


def check(config):
    """Raise a Mistake if settings contradict each other, or name a file that we cannot use."""
    refuse(not config.out_dir, "out_dir is empty; write for example --out_dir=out")
    several = config.minibatch_size and n_processes() > 1
    refuse(
        several,
        "minibatch_size above 0 allows only one process; set minibatch_size=0, or omit torchrun",
    )
    updates = config.minibatch_size or config.num_iterations > 1
    refuse(
        config.importance_sampling_level == "none" and updates,
        "with importance_sampling_level=none a rollout can be used for only one update; set"
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
        "objective=gmpo needs all letters of a word, so top_entropy_quantile must not be below 1;"
        " set top_entropy_quantile=1, or objective=clip",
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
            f"reward={text!r} has a part {part!r} that is not allowed; write NAME or NAME:WEIGHT,"
            " with each NAME only once, where NAME is judge, valid_words, FILE.py:FUNCTION or"
            " JUDGE.pt",
        )
        weights[match[1]] = weight
    return weights


def find_dataset(name):
    """Look for a dataset's folder, first as data/`name`, then as `name` itself: -> Path."""
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
        path, _, name = part.rpartition(":")  # a part is my.py:f, judge.pt, or a name like judge
        if "." in part:
            named.append(("reward", path or name))
    return named


def check_files(named, moved=""):
    """Raise a Mistake if a file is missing, or if it lies in the folder `moved`.

    `named` gives pairs (setting, path). `moved` is the out_dir of a new run. If an earlier run is
    in this folder, the new run renames the folder, and its files are no longer at their paths. A
    dataset may be missing here, because `load_data` checks that later.
    """
    for name, path in named:
        found = find(path)
        missing = path and name != "dataset" and not found.exists()
        refuse(missing, f"{name}: there is no file {path}; make it, or name another")
        refuse(
            path and moved and Path(moved).resolve() in found.resolve().parents,
            f"{name}: {path} lies in out_dir, and a new run renames that folder if it holds an"
            " earlier run; name another out_dir",
        )
