"""Write files of weights atomically, and read them strictly.

Every file holds one dict. A model's dict has the keys `kind`, `architecture` and `weights`. A
checkpoint of a run is a generator's dict with one more key, `training`, so you can name it wherever
a generator is asked for.
"""

import io
from dataclasses import asdict
from pathlib import Path

import torch
from tqdm import tqdm

from data.files import find, write_whole
from data.user_mistake import Mistake, refuse
from grpo.distributed import is_first, n_processes
from model.transformer import TransformerConfig

LATEST = "checkpoint.pt"
SETTLED = ("device", "dtype", "compile", "kernel")  # settings that may be `auto`


def write(path, content):
    """Write `content`, which is bytes or anything that torch.save takes, to the file `path`.

    Only the first of several processes writes. Raises FloatingPointError for a tensor that is not
    finite.
    """
    if not is_first():
        return
    if not isinstance(content, bytes):
        check_tensors(content, Path(path).name)
        buffer = io.BytesIO()
        torch.save(content, buffer)
        content = buffer.getvalue()
    write_whole(Path(path), content)


def check_tensors(content, name):
    """Raise FloatingPointError if a tensor in nested dicts is not finite."""
    if isinstance(content, torch.Tensor) and not content.isfinite().all():
        raise FloatingPointError(f"not saved: {name} is not finite; lower learning_rate")
    if isinstance(content, dict):
        for key, value in content.items():
            check_tensors(value, f"{name}: {key}")


def read(path):
    """Read a dict that `write` wrote, with its tensors on the CPU. No code of the file is run.

    Raises a Mistake if the file is missing, is damaged, or holds something else.
    """
    path = find(path)
    refuse(not path.is_file(), f"checkpoint {path} is missing; make it, or name another")
    file = io.BytesIO(path.read_bytes())  # fails if we may not read it, which is not damage
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
        whole = {"kind", "architecture", "weights"} <= {*content}
    except Exception:  # reading a file that is no checkpoint may raise any error
        whole = False
    refuse(not whole, f"checkpoint {path} is damaged, or no checkpoint; name another")
    return content


def model_file(model, dtype=torch.float32):
    """Make the dict that a model's file holds, with the weights as `dtype` on the CPU."""
    return {
        "kind": type(model).__name__.lower(),
        "architecture": asdict(model.trunk.config),
        "weights": {name: w.detach().to("cpu", dtype) for name, w in model.state_dict().items()},
    }


def load_weights(model, weights, path):
    """Copy `weights` into the model. A Mistake says what does not fit, with both shapes."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        line = " ".join(str(error).split())
        raise Mistake(f"checkpoint {path} does not fit ({line}); name another") from None


def load_model(path, kind):
    """Load a `Generator` or a `Judge`, as `kind` says, in float32 and evaluation mode."""
    content = read(path)
    wanted = kind.__name__.lower()
    refuse(
        content["kind"] != wanted,
        f"checkpoint {path} holds a {content['kind']}, but a {wanted} is needed; name another file",
    )
    model = kind(TransformerConfig(**content["architecture"]))
    load_weights(model, content["weights"], path)
    return model.eval()


def training_state(path):
    """Read what a run needs to go on, from its checkpoint. Raises a Mistake for another file."""
    content = read(path)
    refuse(
        "training" not in content,
        f"checkpoint {path} was not written by train_grpo.py; name the out_dir of a run",
    )
    return content["training"]


def save_checkpoint(config, policy, reference, optimizer, iteration):
    """Write out_dir/checkpoint.pt after `iteration` steps.

    The inputs and draws of a step depend only on the seed and the step's number, so nothing else
    has to be saved for them. `config` holds the settings as the user gave them, and
    `policy.config` says what `auto` meant.
    """
    content = model_file(policy.network)
    content["training"] = {
        "optimizer": optimizer.wrapped.state_dict(),
        "reference": reference.network.state_dict(),
        "iteration": iteration,
        "config": asdict(config),
        "settled": {name: getattr(policy.config, name) for name in SETTLED},
        "processes": n_processes(),
    }
    write(Path(config.out_dir) / LATEST, content)


def load_checkpoint(config, policy, reference, optimizer):
    """Restore what `save_checkpoint` wrote: -> the number of steps that were made.

    It prints what `auto` means now, if that is not what it meant.
    """
    path = Path(config.out_dir) / LATEST
    state = training_state(path)
    load_weights(policy.network, read(path)["weights"], path)
    load_weights(reference.network, state["reference"], path)
    wrapped = optimizer.wrapped
    wrapped.load_state_dict(wrapped.state_dict() | {"state": state["optimizer"]["state"]})
    for name, then in state["settled"].items():
        now = getattr(policy.config, name)
        if now != then and is_first():
            tqdm.write(f"{name} is {now} now, and was {then}: the run does not go on bit for bit")
    return state["iteration"]
