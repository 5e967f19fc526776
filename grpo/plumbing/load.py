"""Turn settings into a device, data, models, policies and rewards."""

import os
from functools import partial
from pathlib import Path

import torch

from data.dataset import Dataset, Prompts, decode
from data.exceptions import Mistake, refuse
from data.text.prepare import prepare
from grpo.distributed import is_first, largest_of_processes
from grpo.latent_policy import Latent
from grpo.plumbing.checkpoint import LATEST, ROOT, build, find, load_model
from grpo.plumbing.command_line import run_file
from grpo.plumbing.config import Config, find_dataset, parse_reward
from grpo.product_policy import Product
from grpo.reward import Rewards, judge_reward, own_reward, valid_words
from grpo.sampling import Sampling, penalise_repetition


def pick_device(name):
    """Turn `auto`, or a device's name, into a torch.device.

    Under torchrun, `auto` and `cuda` give each process a GPU of its own. Raises a Mistake for a
    device that is not on this machine.
    """
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if name == "cuda" or (name == "auto" and gpus):
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    elif name == "auto":
        name = "cpu"
    there = ["cpu", *gpus]
    refuse(name not in there, f"device {name} is not on this machine; it has {', '.join(there)}")
    if name != "cpu":
        torch.cuda.set_device(name)
    return torch.device(name)


def pick_dtype(name, device):
    """Turn `auto` into bfloat16 if the device has instructions for it, else into float32.

    On a CPU with such instructions, bfloat16 about halves the time of a step.
    """
    if name != "auto":
        return name
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu.get_capabilities().get("avx512_bf16")
    return "bfloat16" if native else "float32"


def can_compile():
    """Try out whether torch.compile works. For a CPU it needs a C++ compiler with headers."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(64))
    except Exception:  # the error's type depends on what is missing or broken
        return False
    return True


def pick_compile(name, device):
    """Turn `auto` into "true" on CUDA if torch.compile works there, and otherwise into "false".

    On a CPU, compiling takes a minute, which is too long for a short run. Raises a Mistake if the
    user asks for "true" and torch.compile does not work.
    """
    wanted = name == "true" or (name == "auto" and device.type == "cuda")
    works = wanted and can_compile()
    refuse(name == "true" and not works, "compile=true needs a C++ compiler; set compile=false")
    return "true" if works else "false"


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


def on_device(model, device, config):
    """Move a model to `device`, and return a function that calls it.

    The function takes tokens on any device, and its result lies on `device`. It autocasts and is
    compiled if the settings say so.
    """
    model.to(device)
    if config.compile == "true":
        model.trunk.compile(dynamic=False)
    half = config.dtype == "bfloat16"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=half)
    padded = bool(config.prompts_file)

    def run(tokens, **options):
        with autocast:
            return model(tokens.to(device), padded=padded, **options)

    return run


def make_judge(model, device, config):
    """Wrap a judge as a function: tokens (N,T) -> log-odds (N,T), on the tokens' device."""
    run = on_device(model, device, config)

    def judge(tokens):
        return run(tokens).to(tokens.device)

    return judge


def make_policy(generator, device, config):
    """Wrap a generator as a policy, a function that maps a `Batch` to a distribution over fills.

    One call runs the network once on each masked input, batch_size inputs at a time.
    """
    network = on_device(generator, device, config)
    distribution = Latent if generator.n_latent > 1 else Product  # add a new kind of policy here
    options = {name: getattr(config, name) for name in vars(Sampling()) if hasattr(config, name)}
    sampling = Sampling(**options, fused=config.kernel == "cuda")
    penalty = config.repetition_penalty

    def policy(batch):
        recompute = config.gradient_checkpointing and torch.is_grad_enabled()
        parts = batch.masked.split(config.batch_size)
        outputs = [network(part, recompute=recompute) for part in parts]  # a tuple for each part
        tensors = [torch.cat(pieces).to(batch.masked.device) for pieces in zip(*outputs)]
        if penalty != 1:
            tensors[-1] = penalise_repetition(tensors[-1], batch.masked, batch.mask, penalty)
        return distribution(*tensors, batch, sampling)

    return policy


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
            other = make_judge(other, device, config)
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
