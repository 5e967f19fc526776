"""From settings to what a run works with: the device, the data, the three models, the optimizer."""

import os
import timeit
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from data.char_diffusion.prepare import prepare
from data.dataset import Dataset, Prompts
from grpo.plumbing import distributed
from grpo.plumbing.checkpoint import LATEST, PREVIOUS, load_model, read_training
from grpo.plumbing.config import Config, check_resume
from grpo.sampling import penalise
from model.transformer import Generator

COMPILE_FROM = 2e7  # characters through the models, twice the default run: there compiling, 50 seconds on 2 CPU cores, repays itself


def pick_device(name, setting="device"):
    """`auto`, or any torch device that is there -> torch.device. Raises ValueError for one that is not. Under torchrun every process has its own GPU."""
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    name = {"auto": own if len(there) > 1 else "cpu", "cuda": own}.get(name, name)
    if name not in there:
        raise ValueError(
            f"{setting}={name!r} is not on this machine; {setting} takes auto or one of: {', '.join(there)}"
        )
    if name != "cpu":
        torch.cuda.set_device(name)
    return torch.device(name)


def pick_dtype(name, device):
    """`auto`: bfloat16 where the device multiplies it (on such a CPU the judge takes 0.55 of the time), else float32."""
    if name != "auto":
        return name
    native = (
        torch.cuda.is_bf16_supported(including_emulation=False)
        if device.type == "cuda"
        else getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16")
    )
    return "bfloat16" if native else "float32"


def load_data(dataset, block_size, prompts_file=""):
    """-> train, val of data/`dataset`; with a prompts_file train gives batches of those. The default one is made where it is missing. Raises ValueError for one that cannot serve."""
    folder = Path("data") / dataset
    if dataset == Config.dataset and not (folder / "meta.json").exists() and distributed.is_first():
        print(f"making {folder} from your Python's documentation: a few seconds", flush=True)
        prepare(folder)
    distributed.agree(0)  # no process reads before it is written
    splits = [Dataset(folder, split) for split in ("train", "val")]
    shortest = min(len(split.tokens) for split in splits)
    if not 5 <= block_size <= shortest:
        raise ValueError(
            f"block_size={block_size}: dataset {folder} has {shortest} characters; block_size takes 5 to {shortest}"
        )
    return (
        [Prompts(folder, "train", prompts_file, block_size), splits[1]] if prompts_file else splits
    )


def load_models(config, vocabulary):
    """-> generator, reference, judge, training state (None unless resuming), all on the CPU.
    Raises ValueError for a file that is missing, damaged, of another kind or vocabulary, or a model shorter than block_size."""
    state, generator_file = None, config.generator_checkpoint
    if config.init_from == "resume":
        generator_file = Path(config.out_dir) / "checkpoint.pt"
        if not generator_file.is_file():
            raise ValueError(
                f"--init_from=resume goes on from {generator_file}, and there is none; leave init_from out to begin"
            )
        state = read_training(generator_file)
        check_resume(config, state["config"])
    for name in ("generator_checkpoint", "reference_checkpoint"):
        if Path(getattr(config, name) or ".").resolve() in [
            (Path(config.out_dir) / file).resolve() for file in (LATEST, PREVIOUS)
        ]:
            raise ValueError(
                f"{name}={getattr(config, name)} would be overwritten by this run, and is its reference; name another out_dir"
            )
    models = [load_model(generator_file, "generator", vocabulary), *load_frozen(config, vocabulary)]
    for model in models:
        if config.block_size > model.trunk.config.block_size:
            raise ValueError(
                f"block_size={config.block_size} is more than the {model.trunk.config.block_size} characters that the {type(model).__name__.lower()} was made for; lower block_size"
            )
        model.trunk.padded = bool(config.prompts_file)
    models[0].trunk.checkpointing = config.gradient_checkpointing
    return *models, state


def load_frozen(config, vocabulary):
    """-> reference, judge: what does not change during a run."""
    return (
        load_model(
            config.reference_checkpoint or config.generator_checkpoint, "generator", vocabulary
        ).requires_grad_(False),
        load_model(config.judge_checkpoint, "judge", vocabulary).requires_grad_(False),
    )


def make_optimizer(model, config):
    """AdamW; weight decay on matrices only."""
    groups = [
        {
            "params": [p for p in model.parameters() if (p.dim() >= 2) == decays],
            "weight_decay": config.weight_decay * decays,
        }
        for decays in (True, False)
    ]
    return torch.optim.AdamW(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True
    )


def can_compile():
    """A CPU's compiler needs a C++ compiler and its headers: try it."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(64))
    except Exception:  # whatever is missing, or broken
        return False
    return True


def pick_compile(config, device, state):
    """The setting `compile`; `auto` on a CPU becomes true where compiling works and the run is long, or, resumed, began so: else false."""
    if config.compile != "auto" or device.type == "cuda":
        return config.compile
    inputs = (
        config.max_iters
        * config.batch_size
        * config.gradient_accumulation_steps
        // distributed.world()[0]
    )
    characters = inputs * config.block_size * (config.group_size + 1 + 3 * config.num_iterations)
    wanted = state["config"].get("compile") == "true" if state else characters > COMPILE_FROM
    return "true" if wanted and can_compile() else "false"


def is_compiled(device, config):
    return config.compile == "true" or config.compile == "auto" and device.type == "cuda"


def forward(model, device, config):
    """The model as a function of tokens, under autocast and torch.compile as the settings say, and wherever it lives; a generator as it
    is sampled. float16 logits come as float32, as the kernel takes them."""
    call = torch.compile(model, dynamic=False) if is_compiled(device, config) else model
    autocast = torch.autocast(
        device.type, dtype=getattr(torch, config.dtype), enabled=config.dtype != "float32"
    )

    def run(tokens):
        with autocast:
            logits = call(tokens.to(device)).to(tokens.device)
        logits = logits.float() if logits.dtype == torch.float16 else logits
        return (
            penalise(logits, tokens, config.repetition_penalty)
            if config.repetition_penalty != 1 and isinstance(model, Generator)
            else logits
        )

    return run


def to_device(x, device):
    """A batch on its way: a GPU copies from pinned memory while the program goes on."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


@torch.no_grad()
def estimate_minutes(generator, judge, config, steps):
    """How long `steps` steps and the final table will take, from one timed forward pass of each model, after an untimed one (eager, CPU only).
    Of the completions 0.65 are judged, as many as differ over the default run; a fifth on top for all that is no forward pass."""
    rows, eager = (
        torch.zeros(64, config.block_size, dtype=torch.long),
        replace(config, compile="false"),
    )
    row, judged = (
        timeit.repeat(
            partial(forward(model, torch.device("cpu"), eager), rows), repeat=2, number=1
        )[1]
        / 64
        for model in (generator, judge)
    )
    step = (
        config.batch_size
        * config.gradient_accumulation_steps
        * (0.65 * config.group_size * judged + (1 + 3 * config.num_iterations) * row)
    )
    return 1.2 * (steps * step + config.eval_inputs * (26 * judged + 30 * row)) / 60
