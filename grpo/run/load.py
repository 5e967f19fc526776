"""Read the files that settings name: the networks, the data and the rewards.

This is also where the settings device, dtype, compile and kernel act.

Shapes: B masked inputs, T characters, G completions of each, N held-out inputs or rows of tokens.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch

from data.dataset import Dataset, make_if_missing, read_prompts, read_splits
from data.rules import Rule
from data.user_mistake import Mistake
from data.vocabulary import decode
from data.weights import parse_weights
from grpo import kernel
from grpo.batch import Batch, make_batch
from grpo.latent import Latent
from grpo.policy import Policy, Product
from grpo.reward import Rewards, chain, exact, judge_scores, rule_reward, user_reward
from grpo.run.arguments import run_file
from grpo.run.checkpoint import LATEST, load_model, load_weights, read
from grpo.run.config import Config, saved_settings
from grpo.truncation import truncates
from model.transformer import Generator, Judge

EVALUATION_SEED = 2**31  # larger than any run's own seed
END = 2**31 - 1  # the number of the step in the table's seed, larger than any in training
SAMPLES = 16  # how many completions of each held-out input we draw
SINGLE_THREAD_BELOW = (
    500_000  # parameters; with fewer, threads wait for each other more than they compute
)
THREADS = torch.get_num_threads()  # what PyTorch uses by default


@dataclass
class HeldOut:
    """Inputs that no run trains on, and the rule by which we measure completions."""

    batch: Batch  # N inputs, with the random numbers for 16 completions of each
    rule: Rule | None  # says which completions are good (data/rules.py)

    @cached_property
    def answers(self) -> list[list[str]] | None:
        """List all good completions of each input, if the rule can do that for all of them."""
        if self.rule is None:
            return None
        answers = [self.rule.answers(masked) for masked in decode(self.batch.masked)]
        return None if None in answers else answers


class Models(NamedTuple):
    policy: Policy  # learns
    reference: Policy  # the KL is measured from it
    base: Policy  # the policy before GRPO, to compare with
    reader: Policy  # reads blank by blank for *chain*, at temperature 1
    judge: Callable | None  # maps texts to log-odds


def load_run(out_dir: str, given: dict) -> tuple[Config, Models, Rewards, HeldOut]:
    """Load what a finished run ended with. `given` replaces some of its settings."""
    path = Path(out_dir) / LATEST
    saved = saved_settings(path, given)
    # the table needs no reference, and its file or device may be gone
    config = replace(saved, **{"reference_checkpoint": "", "reference_device": ""} | given)
    return config, *load_generator(path, config)


def load_generator(path: str | Path, config: Config) -> tuple[Models, Rewards, HeldOut]:
    """Load a generator as the policy of a run with these settings."""
    device = pick_device(config.device)
    models = load_models(config, device)
    load_weights(models.policy.network, read(path)["weights"], path)
    _, held_out = load_data(config, models.base.network.vocab_size, device)
    return models, load_rewards(config, models, held_out.rule, device), held_out


def load_models(config: Config, device: torch.device) -> Models:
    """Load the generator, the reference and the judge, and put them on their devices.

    Raises a Mistake if one of them doesn't fit the others, or was made for shorter texts.
    """
    generator = load_model(config.generator_checkpoint, Generator, config.block_size)
    vocab_size = generator.vocab_size
    set_threads(generator)
    reference = deepcopy(generator)
    if config.reference_checkpoint:
        reference = load_model(config.reference_checkpoint, Generator)
    if reference.trunk.config != generator.trunk.config:
        raise Mistake(
            f"reference_checkpoint={config.reference_checkpoint} is another kind of network than"
            f" {config.generator_checkpoint}; name another"
        )
    reference_device = pick_device(config.reference_device or config.device)
    reader = deepcopy(generator)
    if config.chain_checkpoint:
        reader = load_model(config.chain_checkpoint, Generator, config.block_size, vocab_size)
    plain = replace(config, kernel="torch")  # the policy scores, and takes only logits from these
    as_pretrained = replace(plain, temperature=1.0, repetition_penalty=1.0)
    return Models(
        reference=make_policy(reference, plain, reference_device),
        base=make_policy(deepcopy(generator), plain, device),
        reader=make_policy(reader, as_pretrained, device),
        policy=make_policy(generator, config, device),
        judge=load_judge(config.judge_checkpoint, config, device, vocab_size),
    )


def load_judge(path: str, config: Config, device: torch.device, vocab_size: int):
    """Load a judge: tokens (N,T) -> log-odds (N,T). An empty path is no judge."""
    if not path:
        return None
    network = load_model(path, Judge, config.block_size, vocab_size)
    return place(network, config, device)(network)  # torch.autocast is a decorator, too


def load_splits(config: Config, vocab_size: int | None = None) -> tuple[Dataset, Dataset]:
    """Load what to train on, and what's held out. A prompts_file replaces the inputs of train.

    A dataset that ships is made if it's missing. Raises a Mistake if the dataset has more than the
    `vocab_size` characters that the generator knows.
    """
    make_if_missing(config.dataset)
    train, held_out = read_splits(config.dataset, config.held_out, config.block_size)
    if vocab_size and vocab_size < train.vocab_size and train.inputs.max() >= vocab_size:
        raise Mistake(
            f"dataset={config.dataset} has characters that {config.generator_checkpoint} doesn't"
            " know; name another"
        )
    if config.prompts_file:
        train = read_prompts(config.prompts_file, train, config.block_size)
    return train, held_out


def load_data(config: Config, vocab_size: int, device: torch.device) -> tuple[Dataset, HeldOut]:
    """Load the inputs to train on, and a `HeldOut`, whose rule checks the completions of both."""
    train, held_out = load_splits(config, vocab_size)
    # The inputs are the same for every seed, so that runs can be compared. The draws aren't, so
    # that the spread of their figures includes the luck of the draw.
    seed = (EVALUATION_SEED, 0)
    tokens, mask = held_out.batch(config.eval_inputs, config.masking, seed)  # each (N,T)
    batch = make_batch(tokens, mask, SAMPLES, (EVALUATION_SEED + config.seed, END))
    return train, HeldOut(batch.map(lambda x: x.to(device)), train.rule)


def warnings(config: Config, train: Dataset, held_out: HeldOut) -> list[str]:
    """Say what's allowed and may surprise: a seed that repeats, prompts that aren't held out."""
    lines = []
    before = read(config.generator_checkpoint).get("training")
    if before and before["config"]["seed"] == config.seed and config.init_from != "resume":
        lines.append(
            f"{config.generator_checkpoint} was trained with seed={config.seed}, too, so this run"
            " meets the same inputs and draws again; another --seed makes new ones"
        )
    if config.prompts_file:
        prompts = {*decode(train.inputs)}
        common = prompts & {*decode(held_out.batch.masked)}
        if common:
            lines.append(f"{len(common)} of {len(prompts)} prompts are inputs of the table, too")
    return lines


def load_rewards(
    config: Config, models: Models, rule: Rule | None, device: torch.device
) -> Rewards:
    """Make the rewards that the setting `reward` names.

    Raises a Mistake for a judge or a rule that it names and the run doesn't have.
    """
    parts = {}
    own = {"chain": partial(chain, models.reader), "exact": exact}
    if models.judge:
        own["judge"] = partial(judge_scores, models.judge)
    if rule:
        own[rule.name] = partial(rule_reward, rule)
    if config.prompts_file:  # nobody knows what was there
        del own["exact"]
    for name, weight in parse_weights("reward", config.reward).items():
        if name in own:
            part = own[name]
        elif name.endswith(".pt"):
            vocab_size = models.base.network.vocab_size
            part = partial(judge_scores, load_judge(name, config, device, vocab_size))
        elif ".py:" in name:
            path, _, function = name.rpartition(":")
            part = partial(user_reward, path, load_function(path, function))
        else:
            allowed = ", ".join([*own, "JUDGE.pt", "FILE.py:FUNCTION"])
            raise Mistake(f"reward={name} isn't one that this run has; use {allowed}")
        parts[name] = (part, weight)
    return Rewards(parts)


def load_function(path: str, name: str) -> Callable:
    """Load a user's own function. Raises a Mistake if the file fails or has no such function."""
    function = run_file(path).get(name)
    if not callable(function):
        raise Mistake(f"{path} has no function {name}; write def {name}(completions, batch) there")
    return function


def set_threads(network: torch.nn.Module) -> None:
    """Compute on one CPU thread if the network is small. That also fixes the order of sums."""
    small = sum(weights.numel() for weights in network.parameters()) < SINGLE_THREAD_BELOW
    torch.set_num_threads(1 if small else THREADS)


def make_policy(network: Generator, config, device: torch.device) -> Policy:
    """Put a generator on its device, and wrap it as a `Policy`."""
    autocast = place(network, config, device)
    network.trunk.recompute = config.gradient_checkpointing
    distribution = partial(Latent if network.n_latent > 1 else Product, truncates=truncates(config))
    if kernel.usable(config, device, network):
        distribution = partial(Product, compute_log_probs=kernel.FusedLogProbs.apply)
    return Policy(network, distribution, config, autocast)


def place(network: torch.nn.Module, config, device: torch.device) -> torch.autocast:
    """Move a network to a device, and compile it if asked.

    Returns a context in which it computes in the dtype of the settings. With `auto` that's bfloat16
    if the device has instructions for it.
    """
    network.to(device)
    if config.compile:
        network.trunk.compile(dynamic=False)
    if config.dtype != "auto":
        half = config.dtype == "bfloat16"
    elif device.type == "cuda":
        half = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        half = bool(torch.cpu.get_capabilities().get("avx512_bf16"))
    return torch.autocast(device.type, torch.bfloat16, enabled=half)


def pick_device(name: str) -> torch.device:
    """Turn `auto` or a device's name into a device. Raises a Mistake for one that isn't here.

    Under torchrun, `auto` and `cuda` mean this process's own GPU.
    """
    here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if name == "auto":
        name = "cuda" if len(here) > 1 else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if name not in here:  # mps has no float64, which we draw with
        raise Mistake(f"device={name} isn't one we can use here; use {' or '.join(here)}")
    return torch.device(name)


@contextlib.contextmanager
def uncompiled():
    """Run compiled networks as they are: some shapes are too rare to be worth compiling for.

    If nothing is compiled, this doesn't even import the compiler, which takes seconds.
    """
    stance = contextlib.nullcontext()
    if "torch._dynamo" in sys.modules:
        stance = torch.compiler.set_stance("force_eager")
    with stance:
        yield
