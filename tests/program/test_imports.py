"""Check that each part of the project, called a room, imports only the rooms below it.

So you can read a room without reading those above it. Commands import `train_grpo`, which imports
the evaluation. That imports grpo/run, which imports the method, which imports the data. The network
imports only the data.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Each key is a room, and its value lists the other rooms that it may import. A room holds the
# modules whose names begin with its own name. A module that fits several rooms belongs to the one
# with the longest name.
BELOW = {
    "data": [],
    "model": ["data"],  # only model/__init__.py
    "model.transformer": ["data"],
    "grpo": ["data"],
    "grpo.one_file": ["model.transformer"],  # and nothing else of the project
    "grpo.tokens": ["model.transformer"],
    "model.losses": ["data", "grpo"],
    "model.report": ["data", "grpo", "model.losses"],
    "grpo.run": ["data", "grpo", "model.transformer"],
    "grpo.evaluation": ["data", "grpo", "grpo.run"],
    "train_grpo": ["data", "grpo", "grpo.evaluation", "grpo.run"],
}
# These may import anything.
COMMANDS = ["grpo.evaluation.__main__", "grpo.experiments", "grpo.tools", "model.pretrain"]


def room(module):
    """Find the longest name in BELOW and COMMANDS that `module` begins with, or None."""
    prefixes = [name for name in (*BELOW, *COMMANDS) if f"{module}.".startswith(f"{name}.")]
    return max(prefixes, key=len, default=None)


def imported(source):
    """List what a file imports, also inside functions, as dotted names."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_every_import_points_down():
    arrows, upward = set(), []
    files = [path for folder in ("data", "grpo", "model") for path in (ROOT / folder).rglob("*.py")]
    for file in [ROOT / "train_grpo.py", *files]:
        here = room(".".join(file.relative_to(ROOT).with_suffix("").parts))
        assert here, f"{file} stands in no room; add one to BELOW"
        for name in imported(file.read_text(encoding="utf-8")):
            there = room(name)
            arrows.add((here, there))
            if here in BELOW and there not in (None, here, *BELOW[here]):
                upward.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not upward, "\n".join(upward)
    assert {("train_grpo", "grpo.run"), ("grpo.tools", "train_grpo")} <= arrows
