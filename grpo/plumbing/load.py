"""Read the files that settings name: the text, the models, and the functions of a reward."""

from functools import partial
from pathlib import Path

from data.dataset import Dataset, Prompts, decode
from data.text.prepare import prepare
from data.user_mistake import Mistake, refuse
from grpo.distributed import is_first, largest_of_processes
from grpo.plumbing.checkpoint import LATEST, ROOT, build, find, load_model
from grpo.plumbing.command_line import run_file
from grpo.plumbing.config import Config, find_dataset, parse_reward
from grpo.policy import make_judge
from grpo.reward import Rewards, judge_reward, own_reward, valid_words


def load_data(dataset, block_size, prompts_file=""):
    """Load both splits of a dataset: -> train, val. A prompts_file replaces the inputs of train.

    If the default text is missing, the first process makes it. Raises a Mistake for data that is
    missing, damaged or too short.
    """
    folder = find_dataset(dataset)
    missing = dataset == Config.dataset and not (folder / "meta.json").exists()
    if missing and is_first():
        folder = ROOT / "data" / dataset
        print(f"making {folder} from the documentation of numpy and torch", flush=True)
        prepare(folder)
    largest_of_processes(0)  # a barrier: no process reads before the first has written
    train = Dataset(folder, "train", block_size)
    val = Dataset(folder, "val", block_size)
    if prompts_file:
        train = Prompts(folder, "train", find(prompts_file), block_size)
    return train, val


def load_models(config, vocabulary, saved=None):
    """Load the generator, the reference (the base model) and the judge, all on the CPU.

    `saved` is the content of the checkpoint that a resumed run goes on from. Raises a Mistake for a
    file that is missing, damaged, of the wrong kind, or made for another vocabulary. It also raises
    one if a model was made for texts shorter than block_size, or if the generator and the reference
    differ in n_latent.
    """
    base = config.reference_checkpoint or config.generator_checkpoint
    reference = load_model(base, "generator", vocabulary).requires_grad_(False)
    judge = load_model(config.judge_checkpoint, "judge", vocabulary).requires_grad_(False)
    if saved:
        generator = build(saved, "generator", vocabulary, LATEST)
    else:
        generator = load_model(config.generator_checkpoint, "generator", vocabulary)
    refuse(
        reference.n_latent != generator.n_latent,
        f"the generator has n_latent={generator.n_latent}, but the reference has"
        f" n_latent={reference.n_latent}; name a generator_checkpoint and a reference_checkpoint"
        " with the same n_latent",
    )
    check_length(config.block_size, generator, reference, judge)
    return generator, reference, judge


def check_length(block_size, *models):
    """Raise a Mistake for a model that was made for texts shorter than block_size."""
    for model in models:
        longest = model.trunk.config.block_size
        refuse(
            block_size > longest,
            f"block_size={block_size} is more than the {longest} characters that the"
            f" {type(model).__name__.lower()} was made for; lower block_size, or name another file",
        )


def load_function(path, name):
    """Load a user's own function. Raises a Mistake if the file fails or has no such function."""
    values = run_file(path, "reward file")
    if not callable(values.get(name)):
        line = f"reward file {path} has no function {name}; write"
        line += f" def {name}(completions, masked, mask, decode) there"
        raise Mistake(line)
    return values[name]


def load_rewards(config, judge, vocabulary, lexicon, device):
    """Make the `Rewards` that the setting `reward` describes. `judge` maps tokens to logits."""
    parts = {}
    for name, weight in parse_reward(config.reward).items():
        path, _, short = name.rpartition(":")  # `short` is the name in the metrics: f for my.py:f
        if name == "judge":
            function = partial(judge_reward, judge, config.judge_score)
        elif name == "valid_words":
            function = partial(valid_words, lexicon, cut=not config.prompts_file)
        elif name.endswith(".pt"):
            short = Path(name).stem
            other = load_model(name, "judge", vocabulary).requires_grad_(False)
            other = make_judge(other, config, device)
            function = partial(judge_reward, other, config.judge_score)
        else:
            function = partial(own_reward, short, load_function(path, short))
        hides_the_judge = short == "judge" and name != "judge"
        refuse(
            short in parts or hides_the_judge,
            f"reward={config.reward}: the name {short} is taken; rename the function or the file",
        )
        parts[short] = (function, weight)
    return Rewards(parts, partial(decode, vocabulary=vocabulary))
