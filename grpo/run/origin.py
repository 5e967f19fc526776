"""Say what made a result: its files and code by content, and the machine.

With the settings, that's all that a result depends on. config.json has it as `made_with`. Whatever
reuses, averages, resumes or overwrites a result compares it first, with `differences`.
"""

import ast
import functools
import hashlib
from pathlib import Path

import torch

from data.dataset import files_of
from data.files import PROJECT, shipped_path
from grpo.distributed import n_processes
from grpo.run.checkpoint import LATEST
from grpo.run.network import pick_device, pick_dtype
from grpo.run.reward_setting import parse_reward

# what a run executes; tools and tests don't change what it computes
CODE = """train_grpo.py grpo/*.py grpo/*.cu grpo/run/*.py grpo/evaluation/*.py model/transformer.py
data/*.py data/sums/*.py"""


def hashed(content: bytes) -> str:
    """Shorten content to eight hexadecimal digits, which differ if it does."""
    return hashlib.sha256(content).hexdigest()[:8]


@functools.cache
def code_without_comments(content: bytes) -> bytes:
    """Reduce a Python file to what it does: no comments, docstrings or empty lines."""
    try:
        tree = ast.parse(content)
    except SyntaxError:
        return content
    for node in ast.walk(tree):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree).encode()


def with_imports(path: Path) -> list[Path]:
    """List a user's Python file, what it imports from its own folder, and what that imports."""
    found, left = [], [path]
    while left:
        file = left.pop()
        if file in found or not file.is_file():
            continue
        found.append(file)
        try:
            tree = ast.parse(file.read_bytes())
        except SyntaxError:  # whoever runs it says so
            continue
        for node in ast.walk(tree):
            names, folder = [], path.parent
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
                if node.level:  # from .name import ...
                    folder = file.parents[node.level - 1]
            for name in names:
                inside = folder.joinpath(*name.split("."))
                left += [inside.with_suffix(".py"), inside / "__init__.py"]
    return found


def name_of_file(path: str | Path) -> str:
    """Name a file of the project as seen from its folder, whichever folder we're in."""
    inside = Path(path).is_relative_to(PROJECT)
    return str(Path(path).relative_to(PROJECT) if inside else path)


def made_with(config, more_code: tuple[str, ...] = ()) -> dict:
    """List what shapes a run besides its settings: {name: value}, with {path: hash} as `files`.

    `more_code` are other files of the project that a result depends on.
    """
    paths = [config.generator_checkpoint, config.reference_checkpoint, config.judge_checkpoint]
    paths += [config.prompts_file]
    paths += files_of(config.dataset)
    parts = parse_reward(config.reward)
    paths += [part for part in parts if part.endswith(".pt")]
    code = [*CODE.split(), *more_code]
    code = sorted(path for pattern in code for path in PROJECT.glob(pattern))
    for file in ("one_file.py", "tokens.py"):  # they're to be read, and no run imports them
        code.remove(PROJECT / "grpo" / file)
    for part in parts:
        if ".py:" in part:
            code += with_imports(shipped_path(part.rpartition(":")[0]))
    files = {}
    for path in filter(None, paths):  # a setting may be empty
        file = shipped_path(path)
        file = file / LATEST if file.is_dir() else file
        if file.is_file():
            files[name_of_file(path)] = hashed(file.read_bytes())
    for path in code:
        content = path.read_bytes()
        files[name_of_file(path)] = hashed(
            code_without_comments(content) if path.suffix == ".py" else content
        )
    device = pick_device(config.device)
    return {
        "files": files,
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "precision": pick_dtype(config.dtype, device),
        "processes": n_processes(),
        "torch": str(torch.__version__),
    }


def differences(before: dict, now: dict) -> list[str]:
    """Say in words how two results of `made_with` differ: -> ["grpo/advantage.py changed", ...]."""
    old, new = before.get("files", {}), now.get("files", {})
    words = [f"{path} changed" for path in old if path in new and old[path] != new[path]]
    words += [f"{path} is new" for path in new if path not in old]
    words += [f"{path} is gone" for path in old if path not in new]
    for name in {**before, **now}:
        if name != "files" and before.get(name) != now.get(name):
            words.append(f"{name} {before.get(name)} -> {now.get(name)}")
    return words
