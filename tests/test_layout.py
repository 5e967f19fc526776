"""The house as its README promises it: what lies where, who may import whom, how wide a line is."""

import ast
import subprocess
from pathlib import Path

import pytest

TOP = {
    "LICENSE",
    "README.md",
    "config",
    "data",
    "grpo",
    "model",
    "requirements.txt",
    "tests",
    "train_grpo.py",
}
PLUMBING = {
    "__init__.py",
    "checkpoint.py",
    "config.py",
    "distributed.py",
    "log.py",
    "setup.py",
    "stop.py",
}
# `python -m grpo.NAME`
COMMANDS = {"evaluate", "fill", "compare", "bench", "toy"}


def tracked():
    """Every file that git keeps."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git repository")
    return [Path(line) for line in listed.stdout.splitlines() if Path(line).exists()]


def imported(path):
    """The names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports_of_ours(path, allowed):
    """What a file imports of this repository, but for `allowed` packages and modules."""
    ours = {name for name in imported(path) if name.split(".")[0] in TOP | {"train_grpo"}}
    return {
        name
        for name in ours
        if not any(name == package or name.startswith(package + ".") for package in allowed)
    }


def test_the_top_level():
    visible = {path.parts[0] for path in tracked() if not path.parts[0].startswith(".")}
    assert visible == TOP


def test_the_plumbing():
    assert {path.name for path in Path("grpo/plumbing").glob("*.py")} == PLUMBING


@pytest.mark.parametrize("path", sorted(Path("grpo/plumbing").glob("*.py")), ids=str)
def test_the_plumbing_knows_nothing_of_the_equations(path):
    allowed = ["grpo.plumbing", "model", "data"]
    found = imports_of_ours(path, allowed)
    assert found <= {"grpo"}  # of `from grpo import plumbing`


@pytest.mark.parametrize("path", sorted(Path("data").rglob("*.py")), ids=str)
def test_data_knows_nothing_of_what_is_made_with_it(path):
    assert not imports_of_ours(path, ["data"])


def test_the_transformer_stands_alone():
    assert not imports_of_ours(Path("model/transformer.py"), [])


@pytest.mark.parametrize("path", sorted(Path("grpo").glob("*.py")), ids=str)
def test_the_equations_know_nothing_of_the_commands(path):
    """Who imports an equation does not get the table, the plots or the main file with it."""
    if path.stem in COMMANDS or path.stem == "run":
        return
    allowed = ["grpo.plumbing", "model", "data"]
    allowed += [f"grpo.{other.stem}" for other in Path("grpo").glob("*.py")]
    allowed = [name for name in allowed if name.removeprefix("grpo.") not in COMMANDS]
    assert imports_of_ours(path, allowed) <= {"grpo"}


WIDE = 100


@pytest.mark.parametrize("ending", [".py", ".cu", ".h"])
def test_no_line_is_wider_than_a_page(ending):
    wide = []
    for path in tracked():
        if path.suffix != ending:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > WIDE:
                wide.append(f"{path}:{number}: {len(line)} characters")
    assert not wide, "\n".join(wide)


def test_what_the_repository_holds_is_small():
    """Text, code and the shipped models: at most 4 MB each, and no folder of a run."""
    for path in tracked():
        assert path.stat().st_size <= 4 << 20, path
        assert path.name not in ("metrics.jsonl", "checkpoint.pt"), path
