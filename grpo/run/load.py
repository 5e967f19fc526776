"""Read the files that settings name: the networks and the data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from data.dataset import make_if_missing, read_prompts, read_splits
from data.rules import pick_rule
from data.user_mistake import refuse
from data.vocabulary import decode
from grpo.batch import Batch, make_batch
from grpo.distributed import is_first, wait_for_all
from grpo.policy import Policy
from grpo.reward import Rewards
from grpo.run.checkpoint import load_model
from grpo.run.network import make_judge, make_policy, pick_device, set_threads
from grpo.run.reward_setting import make_rewards
from model.transformer import Generator, Judge

EVALUATION_SEED = 2**31  # the same for all runs, and larger than any run's own seed
END = 2**31 - 1  # the step that a reward of the user's gets in the table, after any curriculum
SAMPLES = 16  # how many completions of each held-out input we draw


@dataclass
class HeldOut:
    """Inputs that no run trains on, and the rule by which we measure completions."""

    batch: Batch  # N inputs, with the random numbers for 16 completions of each
    rule: object  # says which fills are good (data/rules.py), or None
    text: str  # the whole training split
    number_words: Callable  # numbers the hidden words: tokens, mask (N,T) -> (N,T)


class Models(NamedTuple):
    policy: Policy  # learns
    reference: Policy  # the KL is measured from it
    base: Policy  # the policy before GRPO, to compare with
    judge: object  # maps texts to log-odds, or None


def load_models(config, device):
    """Load the generator, the reference, and the judge, and put them on their devices: -> `Models`.

    Raises a Mistake if one was made for texts shorter than block_size, or if the generator and the
    reference differ in n_latent.
    """
    generator, base = (load_model(config.generator_checkpoint, Generator) for _ in range(2))
    set_threads(generator)
    check_length(config.block_size, generator)
    judge = None
    if config.judge_checkpoint:
        network = load_model(config.judge_checkpoint, Judge)
        check_length(config.block_size, network)
        judge = make_judge(network, config, device)
    reference = load_model(config.reference_checkpoint or config.generator_checkpoint, Generator)
    check_length(config.block_size, reference)
    refuse(
        reference.n_latent != generator.n_latent,
        f"the generator has n_latent={generator.n_latent}, but the reference has"
        f" n_latent={reference.n_latent}; name a generator_checkpoint and a reference_checkpoint"
        " with the same n_latent",
    )
    there = pick_device(config.reference_device or config.device)
    return Models(
        policy=make_policy(generator, config, device),
        reference=make_policy(reference, config, there),
        base=make_policy(base, config, device),
        judge=judge,
    )


def check_length(block_size, *networks):
    """Raise a Mistake for a network that was made for texts shorter than block_size."""
    for network in networks:
        longest = network.trunk.config.block_size
        refuse(
            block_size > longest,
            f"block_size={block_size} is more than the {longest} characters that the"
            f" {type(network).__name__.lower()} was made for; lower block_size, or name another"
            " file",
        )


def load_splits(config):
    """Load both splits of the dataset: -> train, val. A prompts_file replaces the inputs of train.

    If a dataset that ships is missing, the first process makes it.
    """
    if is_first():
        make_if_missing(config.dataset)
    wait_for_all()  # no process reads before the first one has written
    train, val = read_splits(config.dataset, config.block_size)
    if config.prompts_file:
        say = print if is_first() else lambda _: None
        train = read_prompts(config.prompts_file, train, config.block_size, say)
    return train, val


def load_data(config, device, eval_seed=EVALUATION_SEED):
    """Load the inputs to train on, and hold out others to measure on: -> dataset, rule, `HeldOut`.

    The rule says which fills of the inputs to train on are good.
    """
    train, val = load_splits(config)
    val.check_masking(config.masking)
    (text,) = decode(train.text)
    rule = pick_rule(train)
    # The inputs are the same for every seed, so that runs can be compared. The draws aren't, so
    # that the spread of their figures includes the luck of the draw.
    drawn = val.batch(config.eval_inputs, config.masking, (eval_seed, 0))  # each (N,T)
    batch = make_batch(*drawn, SAMPLES, (eval_seed + config.seed, END)).map(lambda x: x.to(device))
    held_out = HeldOut(batch, rule, text, val.number_words)
    if config.prompts_file:
        rule = pick_rule(train, cut=False)  # a prompt begins and ends with whole words
    return train, rule, held_out


def load_rewards(config, judge, rule, device):
    """Make the `Rewards` of the setting `reward`."""

    def load_judge(file):
        return make_judge(load_model(file, Judge), config, device)

    return make_rewards(config.reward, judge, rule, load_judge)


class LoadedRun(NamedTuple):
    models: Models
    rewards: Rewards
    train: object
    held_out: HeldOut


def load_run(config, generator_file, eval_seed=EVALUATION_SEED):
    """Load a run that is not to be trained, with the weights of `generator_file`."""
    device = pick_device(config.device)
    models = load_models(config, device)
    models = models._replace(
        policy=make_policy(load_model(generator_file, Generator), config, device)
    )
    train, rule, held_out = load_data(config, device, eval_seed)
    rewards = load_rewards(config, models.judge, rule, device)
    return LoadedRun(models, rewards, train, held_out)
