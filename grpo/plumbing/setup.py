"""From settings to what a run works with: the device, the data, the three models."""

import hashlib
import os
from pathlib import Path

import torch

from data.char_diffusion.prepare import prepare
from data.dataset import Dataset, Prompts
from grpo.plumbing import distributed
from grpo.plumbing.checkpoint import (
    LATEST,
    PREVIOUS,
    build,
    check_weights,
    load_model,
    lock,
    read,
    training_state,
)
from grpo.plumbing.config import PATHS, Config, resumed

# Characters through the models from which on compiling them repays itself. On a CPU it takes 50
# seconds on 2 cores, and the default run has half of this; for CUDA it is an estimate.
COMPILE_FROM = {"cpu": 2e7, "cuda": 1e9}


def pick_device(name, setting="device"):
    """`auto`, or any torch device that is there -> torch.device. ValueError for one that is not.

    Under torchrun every process has its own GPU.
    """
    there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    own = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if name == "auto":
        name = own if len(there) > 1 else "cpu"
    elif name == "cuda":
        name = own
    if name not in there:
        raise ValueError(
            f"{setting}={name!r} is not on this machine;"
            f" {setting} takes auto or one of: {', '.join(there)}"
        )
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
        native = getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16")
    return "bfloat16" if native else "float32"


def load_data(dataset, block_size, prompts_file=""):
    """-> train, val of data/`dataset`; with a prompts_file train gives batches of those.

    The default one is made where it is missing. Raises ValueError for one that cannot serve.
    """
    folder = Path("data") / dataset
    missing = dataset == Config.dataset and not (folder / "meta.json").exists()
    if missing and distributed.is_first():
        print(f"making {folder} from your Python's documentation: a few seconds", flush=True)
        prepare(folder)
    distributed.agree(0)  # no process reads before it is written
    train = Dataset(folder, "train")
    val = Dataset(folder, "val")
    shortest = min(len(train.tokens), len(val.tokens))
    if not 5 <= block_size <= shortest:
        raise ValueError(
            f"block_size={block_size}: dataset {folder} has {shortest} characters;"
            f" block_size takes 5 to {shortest}"
        )
    if prompts_file:
        train = Prompts(folder, "train", prompts_file, block_size)
    return train, val


def resume(config):
    """-> the settings that a run goes on with, and its checkpoint. First locked, then read.

    Raises ValueError where there is none, or where it cannot be gone on from.
    """
    path = Path(config.out_dir) / LATEST
    if not path.is_file():
        raise ValueError(
            f"--init_from=resume goes on from {path}, and there is none;"
            " leave init_from out to begin"
        )
    if distributed.is_first():
        lock(config.out_dir)
    saved = read(path)
    state = training_state(saved, path)
    config = resumed(config, state["config"])
    step = state["iteration"]
    if step >= config.max_iters:
        raise ValueError(
            f"resume: {config.out_dir} is at step {step} already; give a larger max_iters,"
            f" or for its table: python -m grpo.evaluate {config.out_dir}"
        )
    size, _ = distributed.world()
    processes = state.get("processes", size)
    if processes != size:
        raise ValueError(
            f"resume: the run in {config.out_dir} is one of {processes} processes, not {size};"
            f" go on with torchrun --nproc_per_node={processes}, or begin a new out_dir"
        )
    return config, saved


def digests(config, judges=()):
    """What the run reads, by setting: sha256 of each file; `judges` are those that `reward` names.

    A reward's FILE.py is left out: it may have been mended.
    """
    folder = Path("data") / config.dataset
    files = {f"dataset/{name}": folder / name for name in ("meta.json", "train.bin", "val.bin")}
    files |= {name: getattr(config, name) for name in PATHS if getattr(config, name)}
    files |= {f"reward {file}": file for file in judges}
    found = {}
    for name, path in files.items():
        with open(path, "rb") as file:
            found[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def check_inputs(config, inputs, saved):
    """Raises ValueError where a run would go on with other files than it began with."""
    for name, digest in saved.items():
        if inputs.get(name) != digest:
            raise ValueError(
                f"resume: {name} is not the file that the run in {config.out_dir} began with;"
                " put that back, or begin a new out_dir"
            )


def load_models(config, vocabulary, saved=None):
    """-> generator, reference, judge, training state (None unless resuming), all on the CPU.

    `saved` is the checkpoint to go on from. Raises ValueError for a file that is missing, damaged,
    of another kind or vocabulary, for a model shorter than block_size, and for generators whose
    latents do not fit.
    """
    check_not_overwritten(config)
    untouched = config.reference_checkpoint or config.generator_checkpoint
    reference = load_model(untouched, "generator", vocabulary).requires_grad_(False)
    judge = load_model(config.judge_checkpoint, "judge", vocabulary).requires_grad_(False)
    if saved:
        path = Path(config.out_dir) / LATEST
        generator = build(saved, "generator", vocabulary, path)
        state = saved["training"]
        if config.reference_mode != "static":
            check_weights(state.get("reference", {}), reference.state_dict(), path)
    else:
        generator = load_model(config.generator_checkpoint, "generator", vocabulary)
        state = None
    check_latent(config, generator, reference)
    for model in (generator, reference, judge):
        longest = model.trunk.config.block_size
        if config.block_size > longest:
            raise ValueError(
                f"block_size={config.block_size} is more than the {longest} characters that the"
                f" {type(model).__name__.lower()} was made for; lower block_size"
            )
        model.trunk.padded = bool(config.prompts_file)
    generator.trunk.checkpointing = config.gradient_checkpointing
    return generator, reference, judge, state


def check_not_overwritten(config):
    """The reference must still be there, as it was, when the run has saved a checkpoint."""
    own = [os.path.realpath(Path(config.out_dir) / file) for file in (LATEST, PREVIOUS)]
    for name in ("generator_checkpoint", "reference_checkpoint"):
        file = getattr(config, name)
        if file and os.path.realpath(file) in own:
            raise ValueError(
                f"{name}={file} would be overwritten by this run, and is its reference;"
                " name another out_dir"
            )


def check_latent(config, generator, reference):
    """Each value of the latent has its share of a group, and its counterpart in the reference."""
    K = generator.n_latent
    if reference.n_latent != K:
        raise ValueError(
            f"the generator's latent has {K} values, the reference's {reference.n_latent};"
            " name a reference_checkpoint of the same kind"
        )
    if config.group_size % K:
        raise ValueError(
            f"group_size={config.group_size} is no multiple of the {K} values of the generator's"
            f" latent; group_size takes {K}, {2 * K}, {3 * K}, ..."
        )


def can_compile():
    """A CPU's compiler needs a C++ compiler and its headers: try it."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(64))
    except Exception:  # whatever is missing, or broken
        return False
    return True


def pick_compile(config, device, state):
    """The setting `compile`, `auto` decided: "true" in a long run where compiling works.

    A resumed run goes on as it began.
    """
    if config.compile == "true" and not can_compile():
        raise ValueError("compile=true needs a C++ compiler that works; set compile=false")
    if config.compile != "auto":
        return config.compile
    inputs = config.max_iters * config.batch_size * config.gradient_accumulation_steps
    passes = config.group_size + 1 + 3 * config.num_iterations  # a backward pass counts as two
    long = inputs * config.block_size * passes > COMPILE_FROM[device.type]
    wanted = state["config"].get("compile") == "true" if state else long
    return "true" if wanted and can_compile() else "false"


def forward(model, device, config):
    """The model as a function of tokens, under autocast and torch.compile as the settings say.

    It lives on `device`; tokens come from, and logits go back to, wherever the tokens are.
    """
    call = torch.compile(model, dynamic=False) if config.compile == "true" else model
    dtype = getattr(torch, config.dtype)
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)

    def run(tokens):
        with autocast:
            return call(tokens.to(device)).to(tokens.device)

    return run


def to_device(x, device):
    """A batch on its way: a GPU copies from pinned memory while the program goes on."""
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x
