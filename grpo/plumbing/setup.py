"""The loaders: from settings to a device, data, models, rewards, and a run to go on with."""

import os
import re
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from data.dataset import Dataset, Prompts
from data.text.prepare import prepare
from data.words import decode
from grpo.plumbing.checkpoint import LATEST, build, load_model, read, training_state
from grpo.plumbing.config import Config, check, from_saved, refuse
from grpo.plumbing.distributed import agree, is_first, world
from grpo.reward import RewardFailed, Rewards, judge_reward, own_reward, valid_words


def pick_device(name):
    """`auto`, or any torch device that is there -> torch.device. ValueError for one that is not.

    Under torchrun every process has its own GPU.
    """
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    name = {"auto": own if there[1:] else "cpu", "cuda": own}.get(name, name)
    refuse(name not in there, f"device {name} is not on this machine; it has {', '.join(there)}")
    if name != "cpu":
        torch.cuda.set_device(name)
    return torch.device(name)


def pick_dtype(name, device):
    """`auto`: bfloat16 where the device multiplies it (on such a CPU in about half the time)."""
    if name != "auto":
        return name
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu.get_capabilities().get("avx512_bf16")
    return "bfloat16" if native else "float32"


def can_compile():
    """A CPU's compiler needs a C++ compiler and its headers: try it."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(64))
    except Exception:  # whatever is missing, or broken
        return False
    return True


def pick_compile(name, device):
    """`auto`: on CUDA. A CPU takes a minute for it, which a run of minutes does not repay."""
    wanted = {"auto": device.type == "cuda", "true": True, "false": False}[name]
    works = wanted and can_compile()
    refuse(name == "true" and not works, "compile=true needs a C++ compiler; set compile=false")
    return "true" if works else "false"


def resume(config):
    """-> the settings that a run goes on with, as saved or given again, and its checkpoint.

    Says what is new. Raises ValueError where it cannot go on.
    """
    out = config.out_dir
    path = Path(out) / LATEST
    content = read(path)
    state = training_state(content, path)
    old = replace(from_saved(state["config"], str(path)), init_from="resume")
    new = replace(old, **config.given)
    check(new)
    refuse(
        ".py:" in old.reward and "reward" not in config.given,
        "resume: the reward runs a file, which a checkpoint may not ask for;"
        f" give it again: --reward={old.reward}",
    )
    refuse(
        state["iteration"] >= new.max_iters,
        f"resume: {out} is at step {state['iteration']} already; give a larger max_iters,"
        f" or for its table: python -m grpo.evaluation {out}",
    )
    if is_first():
        print(
            f"{out} goes on from step {state['iteration']} with the settings it was saved with, and"
            f" {config.given}; processes: {state['processes']} then, {world()[0]} now"
        )
    return new, content


def load_data(dataset, block_size, prompts_file=""):
    """-> train, val of data/`dataset`; with a prompts_file train gives batches of those.

    The default one is made where it is missing. Raises ValueError for one that cannot serve.
    """
    folder = Path("data") / dataset
    missing = dataset == Config.dataset and not (folder / "meta.json").exists()
    if missing and is_first():
        print(f"making {folder} from the documentation of numpy and torch", flush=True)
        prepare(folder)
    agree(0)  # no process reads before it is written
    train = Dataset(folder, "train")
    val = Dataset(folder, "val")
    if prompts_file:
        train = Prompts(folder, "train", prompts_file, block_size)
    return train, val


def load_models(config, vocabulary, saved=None):
    """-> generator, reference (the base model), judge, all on the CPU.

    `saved` is the checkpoint to go on from. Raises ValueError for a file that is missing, damaged,
    of another kind or vocabulary, and for a model shorter than block_size.
    """
    base = config.reference_checkpoint or config.generator_checkpoint
    reference = load_model(base, "generator", vocabulary).requires_grad_(False)
    judge = load_model(config.judge_checkpoint, "judge", vocabulary).requires_grad_(False)
    if saved:
        generator = build(saved, "generator", vocabulary, LATEST)
    else:
        generator = load_model(config.generator_checkpoint, "generator", vocabulary)
    K = generator.trunk.config.n_latent
    refuse(
        reference.trunk.config.n_latent != K,
        f"the generator has {K} values of a latent, the reference another number; name one alike",
    )
    for model in (generator, reference, judge):
        longest = model.trunk.config.block_size
        refuse(
            config.block_size > longest,
            f"block_size={config.block_size} is more than the {longest} characters that the"
            f" {type(model).__name__.lower()} was made for; lower block_size",
        )
        model.trunk.padded = bool(config.prompts_file)
    return generator, reference, judge


PART = re.compile(r"(judge|valid_words|.+\.pt|.+\.py:[^\W\d]\w*)(?::(-?\d*\.?\d+))?")


def parse_reward(text):
    """ "judge:1,my.py:f:0.5" -> {"judge": 1.0, "my.py:f": 0.5}. ValueError for another form."""
    weights = {}
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        refuse(
            not match or match[1] in weights,
            f"reward={text!r} has a part {part!r}; allowed: NAME or NAME:WEIGHT, each NAME once:"
            " judge, valid_words, FILE.py:FUNCTION, or JUDGE.pt",
        )
        weights[match[1]] = float(match[2] or 1)
    return weights


def load_function(path, name):
    """The user's own. Raises RewardFailed, from the error, if there is none."""
    try:
        return runpy.run_path(path)[name]
    except Exception as error:  # whatever the user's code may raise
        line = f"reward: {path} has no {name} or does not run; write"
        line += f" def {name}(completions, masked, mask, decode) there"
        raise RewardFailed(line) from error


def load_rewards(config, judge, vocabulary, lexicon, device):
    """The setting `reward`, ready to score completions; `judge` maps tokens to logits."""
    parts = {}
    for name, weight in parse_reward(config.reward).items():
        path, _, short = name.rpartition(":")  # in metrics: my.py:f is f, model/judge_b.pt judge_b
        if name == "judge":
            function = partial(judge_reward, judge, config.judge_score)
        elif name == "valid_words":
            function = partial(valid_words, lexicon, cut=not config.prompts_file)
        elif name.endswith(".pt"):
            short = Path(name).stem
            other = load_model(name, "judge", vocabulary).requires_grad_(False)
            other = forward(other, device, config)
            function = partial(judge_reward, other, config.judge_score)
        else:
            function = partial(own_reward, short, load_function(path, short))
        taken = short in parts or short == "judge" != name
        refuse(taken, f"reward={config.reward}: two parts are called {short}; rename one")
        parts[short] = (function, weight)
    return Rewards(parts, partial(decode, vocabulary=vocabulary))


def forward(model, device, config):
    """The model as a function of tokens, under autocast and torch.compile as the settings say.

    It lives on `device`; tokens come from, and logits go back to, wherever the tokens are.
    """
    model.to(device)
    if config.compile == "true":
        model.trunk.compile(dynamic=False)
    half = config.dtype == "bfloat16"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=half)

    def run(tokens):
        with autocast:
            return model(tokens.to(device)).to(tokens.device)

    return run
