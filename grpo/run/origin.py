"""Note what a run was made from: its files and code by content, and the machine.

config.json has it as `made_with`. Two runs with the same settings may still differ in this, and
then they aren't averaged (grpo/run/runs.py).
"""

import contextlib
import hashlib
import inspect
from pathlib import Path

import torch

from data.files import PROJECT, find
from grpo.distributed import n_processes
from grpo.run.checkpoint import LATEST
from grpo.run.network import pick_device, pick_dtype
from grpo.run.reward_setting import parse_reward

MODELS = ("generator_checkpoint", "reference_checkpoint", "judge_checkpoint")
# what a run executes; tools and tests don't change what it computes
CODE = """train_grpo.py grpo/*.py grpo/*.cu grpo/run/*.py grpo/evaluation/*.py model/transformer.py
data/*.py data/sums/*.py"""


def hashed(content: bytes) -> str:
    """Shorten content to eight hexadecimal digits, which differ if it does."""
    return hashlib.sha256(content).hexdigest()[:8]


def made_with(config) -> dict[str, str | int]:
    """List what shapes a run besides its settings: -> {name: value}.

    The file that a setting names is hashed as `SETTING file`.
    """
    files = {name: [getattr(config, name)] for name in (*MODELS, "prompts_file")}
    files["reward"] = [name.rpartition(":")[0] or name for name in parse_reward(config.reward)]
    files["dataset"] = [Path("data", config.dataset, f"{part}.txt") for part in ("train", "val")]
    found = {}
    for name, paths in files.items():
        paths = [find(path) for path in paths if path]  # a setting may be empty
        paths = [path / LATEST if path.is_dir() else path for path in paths]
        content = [path.read_bytes() for path in paths if path.is_file()]
        if content:
            found[f"{name} file"] = hashed(b"".join(content))
    if config.own_reward:
        with contextlib.suppress(OSError):  # no source, because it was typed into a console
            found["reward file"] = hashed(inspect.getsource(config.own_reward).encode())
    code = sorted(path for pattern in CODE.split() for path in PROJECT.glob(pattern))
    device = pick_device(config.device)
    return found | {
        "code": hashed(b"".join(path.read_bytes() for path in code)),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": pick_dtype(config.dtype, device),
        "processes": n_processes(),
        "torch": str(torch.__version__),
    }
