"""Write files of weights atomically, and read them strictly.

Every file holds one dict. A model's dict has the keys `kind`, `architecture`, `vocabulary` and
`weights`. A training checkpoint is a generator's dict with one more key, `training`. So you can
name a checkpoint wherever a generator is asked for.
"""

import os
import zipfile
from dataclasses import asdict
from pathlib import Path

import torch

from data.user_mistake import Mistake, refuse
from grpo.distributed import is_first, n_processes
from model.transformer import Generator, Judge, TransformerConfig

ROOT = Path(__file__).parents[2]  # where the code, data/ and the shipped models are
LATEST = "checkpoint.pt"
PREVIOUS = "checkpoint_prev.pt"
MODEL_KEYS = ("kind", "architecture", "vocabulary", "weights")
TRAINING_KEYS = ("optimizer", "reference", "iteration", "config", "processes", "rng")
KINDS = {"generator": Generator, "judge": Judge}


def find(path):
    """Look for a file or folder in the working directory, then beside the code: -> Path."""
    here = Path(path)
    return here if here.exists() else ROOT / here


def write(path, content):
    """Write `content`, which is bytes or anything that torch.save takes, to the file `path`.

    A reader finds either the complete old file or the complete new one, even after a power cut.
    """
    if not is_first():  # only the first process writes
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read(path, keys=MODEL_KEYS):
    """Read a dict of tensors and plain data that `write` wrote, with its tensors on the CPU.

    This never runs code from a file. Raises a Mistake if the file is missing, is damaged, or does
    not hold a dict with these keys.
    """
    path = Path(path)
    fix = "make it again, or name another"
    if path.name == LATEST and path.with_name(PREVIOUS).exists():
        fix = f"rename {PREVIOUS}, the checkpoint saved before it, to {LATEST}"
    refuse(not path.is_file(), f"checkpoint {path} is missing; {fix}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load would not notice a flipped bit
        content = torch.load(path, map_location="cpu", weights_only=True)
        whole = not damaged and isinstance(content, dict) and {*keys} <= {*content}
    except Exception:  # reading a file that is no checkpoint may raise any error
        whole = False
    refuse(not whole, f"checkpoint {path} is damaged, or no checkpoint; {fix}")
    return content


def model_file(model, vocabulary, dtype=torch.float32):
    """Make the dict that a model's file holds, with the weights as `dtype` on the CPU."""
    weights = {name: w.detach().to("cpu", dtype) for name, w in model.state_dict().items()}
    return {
        "kind": type(model).__name__.lower(),
        "architecture": asdict(model.trunk.config),
        "vocabulary": vocabulary,
        "weights": weights,
    }


def build(content, kind, vocabulary, path):
    """Build a model from the `content` of its checkpoint, in float32 and evaluation mode.

    Raises a Mistake if the checkpoint has another `kind` or `vocabulary` than the caller gives, or
    if its weights do not fit the model.
    """
    if content.get("kind") != kind:
        raise Mistake(
            f"checkpoint {path} holds a {content.get('kind')}, but a {kind} is needed; "
            f"name a file that holds a {kind}"
        )
    if content["vocabulary"] != vocabulary:
        raise Mistake(
            f"checkpoint {path} has the vocabulary {content['vocabulary']!r}, "
            f"but {vocabulary!r} is needed; name a dataset and models with the same vocabulary"
        )
    try:
        model = KINDS[kind](TransformerConfig(**content["architecture"]))
        model.load_state_dict(content["weights"])
    except (RuntimeError, TypeError) as error:  # `error` says what does not fit
        line = " ".join(str(error).split())
        raise Mistake(
            f"checkpoint {path} does not fit the model ({line}); make the file again"
        ) from None
    return model.eval()


def load_model(path, kind, vocabulary):
    """Load a model from its file with `find`, `read` and `build`."""
    return build(read(find(path)), kind, vocabulary, path)


def save_training(config, generator, reference, adamw, iteration, vocabulary):
    """Write out_dir/checkpoint.pt, and keep the checkpoint before it as checkpoint_prev.pt.

    `iteration` is the number of finished steps. The inputs and draws of a step depend only on the
    seed and the step's number, so nothing else has to be saved for them.
    """
    content = model_file(generator, vocabulary)
    content["training"] = {
        "optimizer": adamw.state_dict(),
        "reference": reference.state_dict(),
        "iteration": iteration,
        "config": asdict(config),
        "processes": n_processes(),
        "rng": torch.get_rng_state(),  # a user's own reward may draw random numbers
    }
    latest = Path(config.out_dir) / LATEST
    if latest.exists():
        write(latest.with_name(PREVIOUS), latest.read_bytes())
    write(latest, content)


def training_state(content, path):
    """Return the part `training` of a checkpoint. Raises a Mistake if `content` has none."""
    state = content.get("training", {})
    refuse(
        not {*TRAINING_KEYS} <= {*state},
        f"checkpoint {path} was not written by train_grpo.py; name the out_dir of a run",
    )
    return state


def restore_training(state, adamw, path):
    """Restore AdamW's moments and the state of PyTorch's random generator.

    Raises a Mistake, which names both shapes, if a moment has another shape than its weight.
    """
    adamw.load_state_dict(adamw.state_dict() | {"state": state["optimizer"]["state"]})
    for weight, moments in adamw.state.items():
        for name, x in moments.items():
            if name != "step" and x.shape != weight.shape:
                shapes = f"the shape {tuple(x.shape)}, but its weight {tuple(weight.shape)}"
                line = f"checkpoint {path}: AdamW's {name} has {shapes}"
                raise Mistake(f"{line}; begin a new run in another out_dir")
    torch.set_rng_state(state["rng"])
