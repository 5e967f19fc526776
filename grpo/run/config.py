"""All settings of a run, in one flat dataclass whose defaults are the default experiment.

python train_grpo.py config/latent.py --group_size=8         # left to right, the last one wins
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from data.dataset import files_of
from data.user_mistake import Mistake
from data.weights import parse_weights
from grpo import distributed
from grpo.advantage import BASELINES, SCALES
from grpo.loss import KL_ESTIMATORS, LOSS_TYPES, OBJECTIVES
from grpo.run.arguments import TINY, read_flags, within
from grpo.run.checkpoint import LATEST, read

USAGE = "python train_grpo.py [config.py ...] [--key=value ...] [--help]"


@dataclass
class Config:
    # What is read and written.
    out_dir: str = "out"  # folder for config.json, metrics.jsonl, checkpoint.pt, evaluation.json
    # A folder under data/, or an absolute path, with train.txt and val.txt.
    dataset: str = "sums"
    held_out: Literal["val", "choose"] = "val"  # measure on val.txt, or on choose.txt
    generator_checkpoint: str = "model/pretrained/sums.pt"  # the policy to start from
    judge_checkpoint: str = "model/pretrained/sums_judge.pt"  # the reward model; empty: none
    chain_checkpoint: str = ""  # reads completions for *chain*; empty: generator_checkpoint
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
    eval_interval: int = 40  # steps between two looks at a few completions
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


def load_config(arguments: Sequence[str] = ()) -> Config:
    """Read config files and flags. Raises a Mistake if anything is wrong with the settings.

    A resumed run takes its settings from its checkpoint, and `arguments` change them.
    """
    given = read_flags(Config, arguments, USAGE)
    config = Config(**given)
    if config.init_from == "resume":
        saved = saved_settings(Path(config.out_dir) / LATEST, given)
        # The checkpoint may be a copy, so what counts is the folder we read from.
        config = replace(saved, **given | {"out_dir": config.out_dir})
    check(config)
    return config


def saved_settings(path: Path, given: dict) -> Config:
    """Read the settings of the run whose checkpoint is `path`.

    A checkpoint may not choose a file that we execute. So if the run's reward names a FILE.py,
    `given` has to name a reward, or this raises a Mistake.
    """
    config = Config(**read(path)["training"]["config"])
    if ".py:" in config.reward and "reward" not in given:
        raise Mistake(
            f"{path}: this run's reward executes a file, so the command has to name it; if you"
            f" trust the file, add --reward={shlex.quote(config.reward)}"
        )
    return config


def checkpoints(config: Config) -> list[str]:
    """List the settings that name a network. Some may be empty."""
    return [value for name, value in asdict(config).items() if name.endswith("_checkpoint")]


def named_files(config: Config) -> list[Path]:
    """List the files that the settings name. (Rewards without a file, like `judge`, do no harm.)"""
    names = [*checkpoints(config), config.prompts_file]
    names += [part.partition(":")[0] for part in parse_weights("reward", config.reward)]
    return [*files_of(config.dataset, config.held_out), *(Path(name) for name in names if name)]


def check(config: Config) -> None:
    """Raise a Mistake if settings contradict each other."""
    out = Path(config.out_dir).resolve()
    for file in named_files(config):
        if file.resolve().is_relative_to(out) and config.init_from != "resume":
            raise Mistake(f"out_dir={config.out_dir!r} is where {file} is; name another folder")
    if config.minibatch_size and distributed.PROCESSES > 1:
        raise Mistake(
            f"minibatch_size={config.minibatch_size} works with one process only; set it to 0"
        )
    reused = config.minibatch_size or config.num_iterations > 1
    if config.objective == "reinforce" and reused:
        raise Mistake(
            "with objective=reinforce a rollout can be used for only one update; set"
            " num_iterations=1 and minibatch_size=0"
        )
    if config.baseline == "none" and config.scale_rewards != "none":
        raise Mistake(
            f"with baseline=none, scale_rewards={config.scale_rewards} divides equal rewards by a"
            " deviation of 0; set scale_rewards=none"
        )
