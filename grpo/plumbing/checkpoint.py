"""Files of weights: written atomically, read strictly.

Every file is one dict. A model file has `kind`, `architecture`, `vocabulary`, `weights`; a training
checkpoint is the generator's model file with `training` beside them, so wherever a generator may
be named, a checkpoint may be named too.
"""

import io
import os
import zipfile
from dataclasses import asdict
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such lock, and cannot sync a folder
    fcntl = None
import torch

from data.dataset import is_vocabulary
from grpo.plumbing.distributed import is_first
from model.transformer import Generator, Judge, TransformerConfig

LATEST = "checkpoint.pt"
PREVIOUS = "checkpoint_prev.pt"
KINDS = {"generator": Generator, "judge": Judge}


def lock(folder):
    """Keep other runs out of `folder` until the returned handle is closed, or this process ends.

    Raises ValueError if one is in there.
    """
    if not fcntl:
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(
            f"out_dir={folder} is in use by another run; wait for its end, or name another out_dir"
        ) from None
    return handle


def write(path, content):
    """Replace `path` by `content`: bytes, or anything that torch.save takes.

    A reader finds the old file or the new one, whole, also after a power cut.
    """
    if not is_first():  # of several processes one writes
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        content = buffer.getbuffer()
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # there is one only if something above failed
    if fcntl:  # the new name is on the disk when its folder is
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def read(path):
    """The dict that `write` wrote, on the CPU.

    Only tensors and plain data are unpickled: a file cannot run code. Raises ValueError for what
    is no such file, or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # checksums: torch.load would not notice a flipped bit
        if damaged is None:
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(
            f"checkpoint {path} cannot be read: {error.strerror}; name a file that exists"
        ) from None
    except Exception:  # whatever a foreign file makes of torch.load
        pass
    mend = "make it again or name another"
    previous = Path(path).with_name(PREVIOUS)
    if Path(path).name == LATEST and previous.exists():
        mend = f"{previous} is the one saved before it: rename it to {LATEST}"
    raise ValueError(f"checkpoint {path} is damaged or no checkpoint; {mend}")


def model_file(model, vocabulary, dtype=torch.float32):
    """What to write for a model; `dtype` is that of the weights in the file."""
    weights = {name: w.detach().to("cpu", dtype) for name, w in model.state_dict().items()}
    return {
        "kind": type(model).__name__.lower(),
        "architecture": asdict(model.trunk.config),
        "vocabulary": vocabulary,
        "weights": weights,
    }


def build(content, kind, vocabulary, path):
    """The model in `content`, in float32 and evaluation mode.

    Raises ValueError, with both values, where kind, vocabulary, shape or names of the weights are
    not the expected ones, before memory is taken for them.
    """
    parts = {"kind", "architecture", "vocabulary", "weights"}
    if not isinstance(content, dict) or not parts <= content.keys():
        raise ValueError(f"checkpoint {path} is no model file; python -m model.pretrain writes one")
    if content["kind"] != kind:
        raise ValueError(
            f"checkpoint {path} holds a {content['kind']!r:.60}, a {kind} is needed; "
            "are the two files swapped?"
        )
    if content["vocabulary"] != vocabulary:
        raise ValueError(
            f"checkpoint {path} has the vocabulary {content['vocabulary']!r:.200}, "
            f"{vocabulary!r} is needed; use a dataset and models made together"
        )
    try:
        weights = dict(content["weights"])
        shape = TransformerConfig(**content["architecture"])
        check_architecture(shape, vocabulary, weights)
    except (TypeError, ValueError):
        raise ValueError(
            f"checkpoint {path} has the architecture {content['architecture']!r:.200}, "
            "which this code does not know; make the file again"
        ) from None
    with torch.device("meta"):  # shapes without numbers
        wanted = KINDS[kind](shape).state_dict()
    check_weights(weights, wanted, path)
    model = KINDS[kind](shape)
    model.load_state_dict(weights)
    return model.eval()


def check_architecture(shape, vocabulary, weights):
    """Raises ValueError for numbers that no model of this code has, or not with these weights."""
    counts = asdict(shape).values()
    known = all(type(n) is int and 0 < n <= 1 << 16 for n in counts)
    if not known or shape.n_embd % (2 * shape.n_head) or shape.n_layer > len(weights):
        raise ValueError
    if not is_vocabulary(vocabulary) or shape.vocab_size != len(vocabulary):
        raise ValueError


def is_plain(w):
    """Is it a dense tensor of floating numbers on the CPU?"""
    return (
        isinstance(w, torch.Tensor)
        and w.is_floating_point()
        and w.device.type == "cpu"
        and w.layout is torch.strided
        and not w.is_nested
    )


def check_weights(weights, wanted, path):
    """Raises ValueError where `weights` are not, in name, shape and memory, the `wanted` ones."""
    want = {name: tuple(w.shape) for name, w in wanted.items()}
    have = {
        name: tuple(w.shape) if is_plain(w) else type(w).__name__ for name, w in weights.items()
    }
    for name in sorted(want.keys() | have.keys(), key=str):
        if want.get(name) != have.get(name):
            raise ValueError(
                f"checkpoint {path}: weight {name!r:.60} has shape {have.get(name, 'missing')}, "
                f"its architecture needs {want.get(name, 'none')}; make the file again"
            )
    storages = [w.untyped_storage() for w in weights.values()]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    needed = sum(w.nbytes for w in weights.values())
    if held < needed:  # a few numbers can be made to look like many
        raise ValueError(
            f"checkpoint {path} holds {held} bytes of weights, its architecture needs {needed}; "
            "make the file again"
        )


def load_model(path, kind, vocabulary):
    """Read and build in one go: see `read` and `build`."""
    return build(read(path), kind, vocabulary, path)


def save_training(config, generator, reference, optimizer, iteration, vocabulary):
    """Replace out_dir/checkpoint.pt, keep the one before it as checkpoint_prev.pt.

    Inputs and draws are functions of (seed, iteration): the data position is `iteration`.
    """
    if not is_first():
        return
    training = {
        "optimizer": optimizer.state_dict(),
        "iteration": iteration,
        "config": asdict(config),
        "rng": {  # nothing here draws from these; a reward may
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all(),
        },
    }
    if config.reference_mode != "static":
        training["reference"] = reference.state_dict()
    latest = Path(config.out_dir) / LATEST
    if latest.exists():
        write(latest.with_name(PREVIOUS), latest.read_bytes())
    write(latest, model_file(generator, vocabulary) | {"training": training})


def restore_training(state, optimizer):
    """Put `read_training`'s state back."""
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"]["cpu"])
    torch.cuda.set_rng_state_all(state["rng"]["cuda"][: torch.cuda.device_count()])


def read_training(path):
    """What `save_training` saved beside the generator's weights.

    Raises ValueError for a file that it did not write.
    """
    content = read(path)
    training = content.get("training") if isinstance(content, dict) else None
    kinds = {"optimizer": dict, "iteration": int, "config": dict, "rng": dict}
    if isinstance(training, dict):
        if all(isinstance(training.get(name), kind) for name, kind in kinds.items()):
            return training
    raise ValueError(
        f"checkpoint {path} was not written by train_grpo.py; name the out_dir of a run"
    )
