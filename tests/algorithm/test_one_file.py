"""Check that grpo/one_file.py trains just as train_grpo.py does, and that it is short.

The two share the network and no other code, so each is an oracle for the other.
"""

import ast
import json
import sys
from itertools import islice, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TEXT, command_line

import train_grpo
from data.text.prepare import prepare
from grpo import one_file
from model.transformer import Generator, Judge

ROOT = Path(__file__).parents[2]
FILE = ROOT / "grpo" / "one_file.py"
STEPS = 3
LONG = "parameters gradients otherwise documentation implementation".split()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Make a text, a third of which has no word that is short enough to be hidden."""
    folder = tmp_path_factory.mktemp("one_file")
    (folder / "text.txt").write_text("\n\n".join([TEXT, *map(" ".join, permutations(LONG))]))
    prepare(folder / "text", folder / "text.txt")
    return folder / "text"


def real_run(dataset, judge, out, settings):
    """Train with train_grpo.py: -> the losses of its steps, and its weights."""
    files = {"dataset": dataset, "judge_checkpoint": judge, "out_dir": out}
    plain = {"device": "cpu", "dtype": "float32", "max_iters": STEPS, "eval_inputs": 1}
    train_grpo.main(command_line(files | plain | settings))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    weights = torch.load(out / "checkpoint.pt", weights_only=True)["weights"]
    return [json.loads(line)["loss"] for line in lines], weights


def flatten(weights):
    """Return a copy of all weights as one vector, in the order of their names."""
    return torch.cat([weights[name].flatten() for name in sorted(weights)])


@pytest.mark.parametrize("warmup, steps, surer, rate", [(5, 30, 1, 1e-3), (1, 3, 4, 3e-4)])
def test_its_losses_and_weights_are_those_of_train_grpo(
    warmup, steps, surer, rate, dataset, tmp_path, monkeypatch
):
    """Compare three steps with the defaults, and three that go where the defaults would go later.

    These follow the cosine soon, and their judge is four times as sure of everything, so that some
    rewards are cut off at ±8. With such rewards and the default learning rate, rounding was enough
    to change a letter in the third step on one of two machines, so they take a lower one. To be
    fast, both sides take 8 inputs and 4 completions of each, which fit into one batch of the judge.

    The weights agree less closely than the losses do. AdamW divides the gradient of each weight by
    its own size. So where a gradient is 0 but for rounding, it makes a whole step of the rounding.
    We therefore compare all weights together. Their distance must be less than a thousandth of the
    way that they have come. Here it was a twenty-thousandth.
    """
    monkeypatch.chdir(ROOT)  # one_file finds the shipped models from here
    content = torch.load("model/pretrained/judge.pt", weights_only=True)
    for name in ("head.weight", "head.bias"):
        content["weights"][name] *= surer
    torch.save(content, tmp_path / "judge.pt")
    schedule = {"warmup_iters": warmup, "lr_decay_iters": steps, "learning_rate": rate}
    settings = {"batch_size": 8, "group_size": 4} | schedule
    expected, there = real_run(dataset, tmp_path / "judge.pt", tmp_path / "out", settings)

    same = {"B": 8, "G": 4, "WARMUP": warmup, "STEPS": steps, "LEARNING_RATE": rate}
    for name, value in same.items():
        monkeypatch.setattr(one_file, name, value)
    generator = one_file.load(Generator, "generator")
    reference = one_file.load(Generator, "generator")
    judge = one_file.load(Judge, "judge")
    judge.load_state_dict(content["weights"])
    text = np.fromfile(dataset / "train.bin", dtype=np.uint8)
    losses = list(islice(one_file.train(generator, reference, judge, text), STEPS))

    assert losses == pytest.approx(expected, abs=1e-5)
    start, here = flatten(reference.state_dict()), flatten(generator.state_dict())
    assert (here - flatten(there)).norm() < 1e-3 * (here - start).norm()


def test_it_runs_to_the_end(dataset, tmp_path, monkeypatch, capsys):
    """Run the file with fewer inputs and steps, and read the texts that it prints at the end."""
    source = FILE.read_text()
    smaller = {"= 40, 16, 64": "= 2, 2, 64", "= 30, 5, 2": "= 5, 1, 1", "val, 256,": "val, 8,"}
    for old, new in smaller.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text").symlink_to(dataset)
    (tmp_path / "model").symlink_to(ROOT / "model")
    monkeypatch.chdir(tmp_path)
    exec(compile(source, FILE, "exec"), {"__name__": "__main__"})

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 0: valid words") and lines[1].startswith("step 5: loss")
    rows = [line[8:] for line in lines[2:]]
    assert len(rows) == 3 * 4  # the text, the input, and its fills before and now
    for i in range(0, len(rows), 4):
        masked = rows[i + 1]
        assert "_" in masked and len(masked) == 64
        for row in rows[i : i + 4]:
            assert masked == "".join("_" if b == "_" else c for c, b in zip(row, masked))


def test_without_the_text_it_says_how_to_make_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="make it: python -m data.text.prepare"):
        exec(compile(FILE.read_text(), FILE, "exec"), {"__name__": "__main__"})


def test_it_is_short_and_imports_only_the_network():
    source = FILE.read_text()
    assert len(source.splitlines()) <= 150
    imported = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            imported.append(node.module)
    others = {name for name in imported if name not in sys.stdlib_module_names}
    assert others == {"numpy", "torch", "model.transformer"}
