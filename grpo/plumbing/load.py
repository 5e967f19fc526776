"""Read the files that settings name: the text, the models, and the functions of a reward."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from data.dataset import Dataset, read_dataset, read_prompts
from data.text.prepare import prepare
from data.user_mistake import refuse
from grpo.distributed import is_first, pick_device, wait_for_all
from grpo.evaluation.evaluate import EVALUATION_SEED, HeldOut, hold_out
from grpo.plumbing.checkpoint import load_model
from grpo.plumbing.config import Config, parse_reward, run_file
from grpo.policy import Policy, make_judge
from grpo.reward import Rewards, judge_reward, own_reward, valid_share
from model.transformer import Generator, Judge


def load_models(config):
    """Load the generator, another copy of it, the reference and the judge, on the CPU.

    Raises a Mistake if one was made for texts shorter than block_size, or if the generator and the
    reference differ in n_latent.
    """
    generator, base = (load_model(config.generator_checkpoint, Generator) for _ in range(2))
    reference = load_model(config.reference_checkpoint or config.generator_checkpoint, Generator)
    judge = load_model(config.judge_checkpoint, Judge)
    refuse(
        reference.n_latent != generator.n_latent,
        f"the generator has n_latent={generator.n_latent}, but the reference has"
        f" n_latent={reference.n_latent}; name a generator_checkpoint and a reference_checkpoint"
        " with the same n_latent",
    )
    check_length(config.block_size, generator, reference, judge)
    return generator, base, reference, judge


def check_length(block_size, *models):
    """Raise a Mistake for a model that was made for texts shorter than block_size."""
    for model in models:
        longest = model.trunk.config.block_size
        refuse(
            block_size > longest,
            f"block_size={block_size} is more than the {longest} characters that the"
            f" {type(model).__name__.lower()} was made for; lower block_size, or name another file",
        )


def load_text(config):
    """Load both splits of the dataset: -> train, val. A prompts_file replaces the inputs of train.

    If the default text is missing, the first process makes it.
    """
    folder = Path("data") / config.dataset
    missing = config.dataset == Config.dataset and not (folder / "train.bin").exists()
    if missing and is_first():
        print(f"making {folder} from the documentation of numpy and torch", flush=True)
        prepare(folder)
    wait_for_all()  # no process reads before the first one has written
    train = read_dataset(folder, "train", config.block_size)
    val = read_dataset(folder, "val", config.block_size)
    if config.prompts_file:
        train = read_prompts(config.prompts_file, train, config.block_size)
    return train, val


def load_function(path, name):
    """Load a user's own function. Raises a Mistake if the file fails or has no such function."""
    function = run_file(path, "reward file").get(name)
    refuse(
        not callable(function),
        f"reward file {path} has no function {name}; write"
        f" def {name}(completions, masked, mask, decode) there",
    )
    return function


def make_rewards(config, judge, lexicon, device):
    """Make the `Rewards` that the setting `reward` describes. `judge` maps tokens to log-odds."""
    parts = {}
    for name, weight in parse_reward(config.reward).items():
        path, _, function = name.rpartition(":")  # my.py:f has the short name f in the metrics
        if name == "judge":
            part = partial(judge_reward, judge, config.judge_score)
        elif name == "valid_words":
            part = partial(valid_share, lexicon, cut=not config.prompts_file)
        elif name.endswith(".pt"):
            other = make_judge(load_model(name, Judge), config, device)
            part = partial(judge_reward, other, config.judge_score)
        else:
            name = function
            part = partial(own_reward, name, load_function(path, name))
        refuse(name in parts, f"reward={config.reward}: the name {name} is taken; rename one")
        parts[name] = (part, weight)
    return Rewards(parts)


class LoadedRun(NamedTuple):
    policy: Policy
    before: Policy  # the policy as it was before GRPO
    judge: Callable
    rewards: Rewards
    train: Dataset
    held_out: HeldOut


def load_run(config, generator_file, eval_seed=EVALUATION_SEED):
    """Load a run that is not to be trained, with the weights of `generator_file`."""
    device = pick_device(config.device)
    _, base, _, judge = load_models(config)
    train, val = load_text(config)
    policy = Policy(load_model(generator_file, Generator), config, device)
    judge = make_judge(judge, config, device)
    held_out = hold_out(config, train, val, device, eval_seed)
    rewards = make_rewards(config, judge, held_out.lexicon, device)
    before = Policy(base, config, device)
    return LoadedRun(policy, before, judge, rewards, train, held_out)
