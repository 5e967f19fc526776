"""Read the files that settings name: the networks and the data."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch

from data.dataset import Dataset, make_if_missing, read_prompts, read_splits
from data.rules import TAKEN, Rule
from data.user_mistake import Mistake
from data.vocabulary import decode
from grpo.batch import Batch, make_batch
from grpo.distributed import is_first, wait_for_all
from grpo.policy import Policy
from grpo.reward import Rewards, chain, exact, judge_scores, rule_reward
from grpo.run.checkpoint import LATEST, load_model, load_weights, read, training_state
from grpo.run.config import Config, saved_settings
from grpo.run.network import make_judge, make_policy, pick_device, set_threads
from grpo.run.reward_setting import parse_reward
from grpo.run.user_file import load_function, user_reward
from model.transformer import Generator, Judge

EVALUATION_SEED = 2**31  # larger than any run's own seed
END = 2**31 - 1  # the number of the step in the table's seed, larger than any in training
SAMPLES = 16  # how many completions of each held-out input we draw


@dataclass
class HeldOut:
    """Inputs that no run trains on, and the rule by which we measure completions."""

    batch: Batch  # N inputs, with the uniforms for 16 completions of each
    rule: Rule | None  # says which completions are good (data/rules.py)

    @property
    def rule_name(self) -> str:
        return self.rule.name if self.rule else ""

    @cached_property
    def answers(self) -> list[list[str]] | None:
        """List all good completions of each input, if the rule can do that for all of them."""
        if self.rule is None:
            return None
        inputs = decode(self.batch.masked)
        answers = [self.rule.answers(masked) for masked in inputs]
        if None in answers:
            return None
        first = list(answers[0])  # one input shows most mistakes
        good = all(self.rule.is_good(text, inputs[0]) for text in first)
        if not good or len(set(first)) < len(first):
            raise Mistake(
                f"rule {self.rule.name}: answers({inputs[0]!r}) isn't a list of different"
                " completions that are good; change it"
            )
        return answers


class Models(NamedTuple):
    policy: Policy  # learns
    reference: Policy  # the KL is measured from it
    base: Policy  # the policy before GRPO, to compare with
    judge: object  # maps texts to log-odds, or None


def load_run(out_dir: str, given: dict[str, str]) -> tuple[Config, Models, Rewards, HeldOut]:
    """Load what a finished run ended with. `given` replaces some of its settings."""
    path = Path(out_dir) / LATEST
    saved = saved_settings(training_state(path), given, path)
    # the table needs no reference, and its file or device may be gone
    config = replace(saved, reference_checkpoint="", reference_device="", **given)
    return config, *load_generator(path, config)


def load_generator(path: str | Path, config) -> tuple[Models, Rewards, HeldOut]:
    """Load a generator as the policy of a run with these settings."""
    device = pick_device(config.device)
    models = load_models(config, device)
    load_weights(models.policy.network, read(path)["weights"], path)
    _, held_out = load_data(config, device)
    rewards = load_rewards(config, models.judge, models.base, held_out.rule, device)
    return models, rewards, held_out


def load_models(config, device: torch.device) -> Models:
    """Load the generator, the reference and the judge, and put them on their devices.

    Raises a Mistake if one was made for shorter texts, or the reference doesn't fit the generator.
    """
    generator, base = (load_model(config.generator_checkpoint, Generator) for _ in range(2))
    set_threads(generator)
    reference = load_model(config.reference_checkpoint or config.generator_checkpoint, Generator)
    check_length(config.block_size, generator, reference)
    ours, its = generator.trunk.config, reference.trunk.config
    same_outputs = (ours.vocab_size, ours.n_latent) == (its.vocab_size, its.n_latent)
    if not same_outputs or (config.reference_mode != "static" and ours != its):
        raise Mistake(
            f"the generator is a {ours}, and the reference another kind of network, a {its}; name"
            " another reference_checkpoint"
        )
    reference_device = pick_device(config.reference_device or config.device)
    return Models(
        policy=make_policy(generator, config, device),
        # the policy draws and scores, and takes only the logits of the reference
        reference=make_policy(reference, replace(config, kernel="torch"), reference_device),
        base=make_policy(base, config, device),
        judge=load_judge(config.judge_checkpoint, config, device),
    )


def load_judge(path: str, config, device: torch.device) -> Callable | None:
    """Load a judge: tokens (N,T) -> log-odds (N,T). An empty path is no judge."""
    if not path:
        return None
    network = load_model(path, Judge)
    check_length(config.block_size, network)
    generator = read(config.generator_checkpoint)["architecture"]
    if network.trunk.config.vocab_size < generator["vocab_size"]:
        raise Mistake(
            f"judge {path} knows fewer characters than {config.generator_checkpoint}; name another"
        )
    return make_judge(network, config, device)


def check_length(block_size: int, *networks: torch.nn.Module) -> None:
    """Raise a Mistake for a network that was made for texts shorter than block_size."""
    for network in networks:
        longest = network.trunk.config.block_size
        if block_size > longest:
            raise Mistake(
                f"block_size={block_size} is more than the {longest} characters that the"
                f" {type(network).__name__.lower()} was made for; lower block_size, or name another"
                " file"
            )


def load_splits(config) -> tuple[Dataset, Dataset]:
    """Load train and val of the dataset. A prompts_file replaces the inputs of train.

    If a dataset that ships is missing, the first process makes it. Raises a Mistake if the dataset
    has a character that the generator doesn't know.
    """
    if is_first():
        make_if_missing(config.dataset)
    wait_for_all()  # no process reads before the first one has written
    train, val = read_splits(config.dataset, config.block_size)
    path = config.generator_checkpoint
    known = path and read(path)["architecture"]["vocab_size"]
    if path and known < train.vocab_size and train.inputs.max() >= known:
        raise Mistake(
            f"dataset={config.dataset} has characters that {path} doesn't know; name another"
        )
    if config.prompts_file:
        train = read_prompts(config.prompts_file, train, config.block_size)
    return train, val


def load_data(config, device: torch.device):
    """Load the inputs to train on, and a `HeldOut`, whose rule checks the completions of both."""
    train, val = load_splits(config)
    # The inputs are the same for every seed, so that runs can be compared. The draws aren't, so
    # that the spread of their figures includes the luck of the draw.
    tokens, mask = val.batch(config.eval_inputs, config.masking, (EVALUATION_SEED, 0))  # each (N,T)
    batch = make_batch(tokens, mask, SAMPLES, (EVALUATION_SEED + config.seed, END))
    return train, HeldOut(batch.map(lambda x: x.to(device)), train.rule)


def load_rewards(
    config, judge: Callable | None, base: Policy, rule: Rule | None, device: torch.device
) -> Rewards:
    """Make the rewards that the setting `reward` names, with the run's own judge, base and rule.

    Raises a Mistake for a judge or a rule that it names and the run doesn't have.
    """
    parts = {}
    for name, weight in parse_reward(config.reward).items():
        if ".py:" in name:
            path, _, name = name.rpartition(":")  # in the metrics, my.py:f is called f
            if name in {*TAKEN, *parts}:
                raise Mistake(
                    f"reward={config.reward}: the name {name} is taken; rename the function"
                )
            part = partial(user_reward, name, load_function(path, name))
        elif name == "judge":
            if judge is None:
                raise Mistake(f"reward={config.reward} needs a judge; name one as judge_checkpoint")
            part = partial(judge_scores, judge)
        elif name == "chain":
            part = partial(chain, base)
        elif name == "exact":
            if config.prompts_file:
                raise Mistake("reward=exact needs to know what was there, and prompts don't say it")
            part = exact
        elif name.endswith(".pt"):
            part = partial(judge_scores, load_judge(name, config, device))
        elif rule and name == rule.name:
            part = partial(rule_reward, rule)
        else:
            allowed = ["judge", "chain", "exact", "JUDGE.pt", "FILE.py:FUNCTION"]
            allowed += [rule.name] if rule else []
            raise Mistake(f"reward={name}: this dataset has no such rule; use {', '.join(allowed)}")
        parts[name] = (part, weight)
    return Rewards(parts)
