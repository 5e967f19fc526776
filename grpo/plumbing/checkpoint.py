"""Files of weights: written atomically, read strictly.

Every file is one dict. A model file has `kind`, `architecture`, `vocabulary`, `weights`; a training
checkpoint is the generator's model file with `training` beside them, so wherever a generator may
be named, a checkpoint may be named too.
"""

import io
import os
import secrets
import time
import zipfile
from dataclasses import asdict
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such lock
    fcntl = None
import torch

from data.char_diffusion.prepare import sync
from data.dataset import is_vocabulary
from grpo.plumbing.distributed import is_first, world
from model.transformer import Generator, Judge, TransformerConfig

LATEST = "checkpoint.pt"
PREVIOUS = "checkpoint_prev.pt"
KINDS = {"generator": Generator, "judge": Judge}


HELD = {}  # the folders that this process keeps others out of: {path: handle}


def lock(folder):
    """Keep other runs out of `folder` until `unlock`, or until this process ends.

    Raises ValueError if one is in there.
    """
    path = os.path.realpath(folder)
    if not fcntl or path in HELD:
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(
            f"out_dir={folder} is in use by another run; wait for its end, or name another out_dir"
        ) from None
    HELD[path] = handle


def unlock(folder):
    handle = HELD.pop(os.path.realpath(folder), None)
    if handle is not None:
        os.close(handle)


def make_folder(folder):
    folder = Path(folder)
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)


STALE = 600  # seconds after which a temporary file was left by a write that was cut short


def write(path, content):
    """Replace `path` by `content`: bytes, or anything that torch.save takes.

    A reader finds the old file or the new one, whole, also after a power cut.
    """
    if not is_first():  # of several processes one writes
        return
    path = Path(path)
    make_folder(path.parent)
    if not isinstance(content, bytes):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        content = buffer.getbuffer()
    for left in path.parent.glob(f"{path.name}.*.tmp"):
        if left.lstat().st_mtime < time.time() - STALE:
            left.unlink()
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as f:  # nobody else's file, and no link
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # there is one only if something above failed
    sync(path.parent)


def check_members(archive, size):
    """Raises ValueError for a zip file that unpacks to more than its size, or is damaged."""
    members = archive.infolist()
    total = sum(member.file_size for member in members)
    packed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if packed or total > size or archive.testzip():  # torch.load notices no flipped bit
        raise ValueError


DEPTH = 8  # of dicts and lists in dicts and lists
MOST = 100_000  # things in one level of them


def check_plain(content):
    """Raises ValueError for what `write` never wrote.

    That is an object, a nest deeper or wider than any of ours, a tensor that is not dense, and a
    few numbers in memory that were made to look like many.
    """
    level = [content]
    owned = set()
    for _ in range(DEPTH):
        inner = []
        for x in level:
            if isinstance(x, dict):
                inner += [*x.keys(), *x.values()]
            elif isinstance(x, (list, tuple)):
                inner += x
            elif isinstance(x, torch.Tensor):
                check_dense(x, owned)
            elif not is_scalar(x):
                raise ValueError
            if len(inner) > MOST:
                raise ValueError
        level = inner
    if level:
        raise ValueError


def is_scalar(x):
    """Text, a number of at most 64 bits, a truth value, or None?"""
    if isinstance(x, int):
        return x.bit_length() <= 64
    return x is None or isinstance(x, (str, float))


def check_dense(x, owned):
    """Raises ValueError unless the tensor's numbers lie side by side in memory of its own.

    `owned` is the set of the memory that has an owner already.
    """
    if x.is_nested or x.layout is not torch.strided or x.device.type != "cpu":
        raise ValueError
    memory = x.untyped_storage()
    if not x.is_contiguous() or memory.nbytes() != x.nbytes or memory.data_ptr() in owned:
        raise ValueError
    if x.nbytes:
        owned.add(memory.data_ptr())


def read(path):
    """The dict that `write` wrote, on the CPU.

    Only dense tensors and plain data are unpickled: a file cannot run code, nor claim more memory
    than it has bytes. Raises ValueError for what is no such file, or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            check_members(archive, os.path.getsize(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
        check_plain(content)
        return content
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


def shape_of(w):
    """What is no tensor of floating numbers has a type instead."""
    if isinstance(w, torch.Tensor) and w.is_floating_point():
        return tuple(w.shape)
    return type(w).__name__


def check_weights(weights, wanted, path):
    """Raises ValueError where `weights` are not, in name and shape, the `wanted` ones."""
    want = {name: tuple(w.shape) for name, w in wanted.items()}
    have = {name: shape_of(w) for name, w in weights.items()}
    for name in sorted(want.keys() | have.keys(), key=str):
        if want.get(name) != have.get(name):
            raise ValueError(
                f"checkpoint {path}: weight {name!r:.60} has shape {have.get(name, 'missing')}, "
                f"its architecture needs {want.get(name, 'none')}; make the file again"
            )


def load_model(path, kind, vocabulary):
    """Read and build in one go: see `read` and `build`."""
    return build(read(path), kind, vocabulary, path)


def save_training(config, generator, reference, optimizer, iteration, vocabulary, inputs):
    """Replace out_dir/checkpoint.pt, keep the one before it as checkpoint_prev.pt.

    Inputs and draws are functions of (seed, iteration): the data position is `iteration`. `inputs`
    are the digests of the files that the run reads. Raises FloatingPointError for weights that
    nobody could go on from.
    """
    if not is_first():
        return
    content = model_file(generator, vocabulary)
    if not all(w.isfinite().all() for w in content["weights"].values()):
        raise FloatingPointError(
            f"step {iteration - 1}: the weights are not finite, and not saved; "
            "begin anew with a lower learning_rate, or with grad_clip"
        )
    content["training"] = {
        "optimizer": optimizer.state_dict(),
        "iteration": iteration,
        "config": asdict(config),
        "inputs": inputs,
        "processes": world()[0],
        "rng": {  # nothing here draws from these; a reward may
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all(),
        },
    }
    if config.reference_mode != "static":
        content["training"]["reference"] = reference.state_dict()
    latest = Path(config.out_dir) / LATEST
    if latest.exists():
        write(latest.with_name(PREVIOUS), latest.read_bytes())
    write(latest, content)


def restore_training(state, optimizer, path):
    """Put back what `training_state` found: AdamW's moments, and the random generators.

    Raises ValueError where they are not those of the optimizer's parameters: its fused step would
    believe any shape.
    """
    wanted = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(parameters):
        wanted |= {(i, "step"): torch.zeros(()), (i, "exp_avg"): p, (i, "exp_avg_sq"): p}
    try:
        moments = state["optimizer"]["state"]
        saved = {(i, name): x for i, of_one in moments.items() for name, x in of_one.items()}
        check_weights(saved, wanted, path)
        optimizer.load_state_dict(optimizer.state_dict() | {"state": moments})
        torch.set_rng_state(state["rng"]["cpu"])
        torch.cuda.set_rng_state_all(state["rng"]["cuda"][: torch.cuda.device_count()])
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise ValueError(
            f"checkpoint {path} has no training state that fits ({type(error).__name__}); "
            "begin a new out_dir"
        ) from None


def training_state(content, path):
    """What `save_training` saved beside the generator's weights.

    Raises ValueError for a file that it did not write.
    """
    state = content.get("training") if isinstance(content, dict) else None
    kinds = {"optimizer": dict, "iteration": int, "config": dict, "rng": dict}
    if isinstance(state, dict):
        known = all(isinstance(state.get(name), kind) for name, kind in kinds.items())
        optional = all(isinstance(state.get(name, {}), dict) for name in ("inputs", "reference"))
        if known and optional and state["iteration"] >= 0:
            return state
    raise ValueError(
        f"checkpoint {path} was not written by train_grpo.py; name the out_dir of a run"
    )
