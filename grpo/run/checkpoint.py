"""Write files of weights atomically, and read them strictly.

Every file holds one dict. A model's dict has the keys `architecture` and `weights`. A checkpoint of
a run is a generator's dict with one more key, `training`, so you can name it wherever a generator
is asked for.
"""

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from data.files import write_whole
from data.user_mistake import Mistake
from grpo.distributed import is_first
from model.transformer import Generator, TransformerConfig, make_generator

LATEST = "checkpoint.pt"
SAVE_EVERY = 10  # steps; a save takes some 20 ms, a tenth of a step


def write(path: str | Path, content: bytes | dict) -> None:
    """Write bytes, or a dict that torch.save takes, so that the file is never half written.

    Only the first of several processes writes.
    """
    if not is_first():
        return
    if not isinstance(content, bytes):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        content = buffer.getvalue()
    write_whole(Path(path), content)


def read(path: str | Path) -> dict[str, Any]:
    """Read a dict that `write` wrote, with its tensors on the CPU. Runs no code of the file.

    If the path is a run's folder, this reads the checkpoint in it.

    Raises a Mistake if the file is damaged, or holds something else.
    """
    path = Path(path)
    path = path / LATEST if path.is_dir() else path
    file = io.BytesIO(path.read_bytes())
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        TransformerConfig(**content["architecture"])  # another version may have other fields
    except Exception:  # a file that isn't a checkpoint may raise anything
        raise Mistake(
            f"checkpoint {path} is damaged, or isn't one of this version; name another"
        ) from None
    return content


def model_file(model: Module, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Make the dict that a model's file holds, with the weights as `dtype` on the CPU."""
    return {
        "architecture": asdict(model.trunk.config),
        "weights": {name: w.detach().to("cpu", dtype) for name, w in model.state_dict().items()},
    }


def load_weights(model: Module, weights: dict[str, torch.Tensor], path: str | Path) -> None:
    """Copy weights into a model. If they don't fit, a Mistake says why, with both shapes."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        line = " ".join(str(error).split())
        raise Mistake(f"checkpoint {path} doesn't fit ({line}); name another") from None


def load_model(
    path: str | Path, kind: type[Module], block_size: int = 0, vocab_size: int = 0
) -> Module:
    """Load a `Generator` or a `Judge`, as `kind` says, in float32 and evaluation mode.

    Raises a Mistake if it can't read so long texts, or so many characters.
    """
    content = read(path)
    make = make_generator if kind is Generator else kind
    model = make(TransformerConfig(**content["architecture"]))
    load_weights(model, content["weights"], path)
    check_fit(path, model, block_size, vocab_size)
    return model.eval()


def check_fit(path: str, network: Module, block_size: int, vocab_size: int = 0) -> None:
    """Raise a Mistake if a network was made for shorter texts, or for fewer characters."""
    made_for = network.trunk.config
    if block_size > made_for.block_size:
        raise Mistake(
            f"block_size={block_size} is more than the {made_for.block_size} characters that {path}"
            " was made for; lower it, or name another file"
        )
    if vocab_size > made_for.vocab_size:
        raise Mistake(
            f"{path} knows only {made_for.vocab_size} different characters, and the generator"
            f" {vocab_size}; name another"
        )


def save_checkpoint(config, made_by, policy, reference, optimizer, iteration: int) -> None:
    """Write out_dir/checkpoint.pt after `iteration` steps.

    The inputs and draws of a step depend only on the seed and the step's number, so nothing else
    has to be saved for them.
    """
    content = model_file(policy.network)
    content["training"] = {
        "optimizer": optimizer.wrapped.state_dict(),
        "reference": reference.network.state_dict(),
        "iteration": iteration,
        "config": asdict(config),
        "made_by": made_by,
    }
    write(Path(config.out_dir) / LATEST, content)


def load_checkpoint(config, policy, reference, optimizer) -> tuple[int, dict[str, Any]]:
    """Restore what `save_checkpoint` wrote: -> how many steps were taken, and with what."""
    path = Path(config.out_dir) / LATEST
    content = read(path)
    state = content["training"]
    load_weights(policy.network, content["weights"], path)
    # A reference that was named anew keeps the weights of its own file.
    if config.reference_checkpoint == state["config"]["reference_checkpoint"]:
        load_weights(reference.network, state["reference"], path)
    wrapped = optimizer.wrapped
    wrapped.load_state_dict(wrapped.state_dict() | {"state": state["optimizer"]["state"]})
    return state["iteration"], state
