"""Check that files of weights are written whole or not at all, read strictly, and run no code."""

import os
import random

import pytest
import torch
from conftest import command_line, run, same

import train_grpo
from data.user_mistake import Mistake
from grpo.plumbing.checkpoint import (
    MODEL_KEYS,
    build,
    load_model,
    model_file,
    read,
    restore_training,
    write,
)
from model.transformer import Generator, Judge, TransformerConfig

SHAPE = TransformerConfig(vocab_size=4, block_size=8, n_layer=1, n_head=1, n_embd=8)


@pytest.fixture
def file(tmp_path):
    """Write the file of a generator: -> its path."""
    write(tmp_path / "m.pt", model_file(Generator(SHAPE), "abc_"))
    return tmp_path / "m.pt"


def test_a_model_comes_back_bit_for_bit(tmp_path):
    model = Generator(SHAPE)
    write(tmp_path / "m.pt", model_file(model, "abc_"))
    again = load_model(tmp_path / "m.pt", "generator", "abc_")
    assert same(dict(model.state_dict()), dict(again.state_dict()))
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]  # no temporary is left


def test_a_file_of_half_precision_loads_as_float32(tmp_path):
    write(tmp_path / "m.pt", model_file(Judge(SHAPE), "abc_", torch.float16))
    model = load_model(tmp_path / "m.pt", "judge", "abc_")
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_write_that_fails_leaves_the_old_file(file, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = file.read_bytes()
    with pytest.raises(OSError, match="No space"):
        write(file, b"new")
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.update(kind="judge"), "holds a judge, but a generator is needed"),
        (lambda c: c.update(vocabulary="xyz_"), "'xyz_', but 'abc_' is needed"),
        (lambda c: c["weights"].pop("head.weight"), 'Missing key.* "head.weight"'),
        (lambda c: c["weights"].update(extra=torch.zeros(2)), 'Unexpected key.* "extra"'),
        (
            lambda c: c["weights"].update({"head.weight": torch.zeros(9, 9)}),
            r"head.weight: .* \[9, 9\].*, the shape in current model is .* \[3, 8\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(change, message):
    content = model_file(Generator(SHAPE), "abc_")
    change(content)
    with pytest.raises(Mistake, match=message.replace(" \\[", r"\(\[")) as error:
        build(content, "generator", "abc_", "m.pt")
    assert "\n" not in str(error.value)


def test_moments_of_another_shape_are_refused_with_both_shapes():
    weight = torch.nn.Parameter(torch.ones(3, 4))
    adamw = torch.optim.AdamW([weight])
    weight.sum().backward()
    adamw.step()
    state = {"optimizer": adamw.state_dict()}
    state["optimizer"]["state"][0]["exp_avg"] = torch.zeros(4, 3)
    with pytest.raises(Mistake, match=r"exp_avg has the shape \(4, 3\), but its weight \(3, 4\)"):
        restore_training(state, adamw, "m.pt")


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"a,b\n"])
def test_a_damaged_file_is_named(file, damage):
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(Mistake, match="m.pt is damaged, or no checkpoint; make it again"):
        read(file)


@pytest.mark.parametrize("content", [[*MODEL_KEYS], {"kind": "judge"}])
def test_a_file_of_other_things_is_named(file, content):
    torch.save(content, file)
    with pytest.raises(Mistake, match="m.pt is damaged, or no checkpoint"):
        read(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(Mistake, match="m.pt is missing; make it again"):
        read(tmp_path / "m.pt")


def test_a_flipped_bit_is_noticed_wherever_it_matters(file):
    """torch.load alone does not notice a flipped bit in a weight."""
    whole = file.read_bytes()
    content = read(file)
    places = random.Random(1)
    noticed = 0
    for _ in range(200):
        flipped = bytearray(whole)
        flipped[places.randrange(len(whole))] ^= 1 << places.randrange(8)
        file.write_bytes(flipped)
        try:
            assert same(read(file), content)
        except Mistake as error:
            assert "m.pt is damaged" in str(error)
            noticed += 1
    assert noticed > 100


class Malicious:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_checkpoint_runs_no_code(world, flags, tmp_path, capsys):
    bad = tmp_path / "bad.pt"
    torch.save(read(world / "generator.pt") | {"weights": Malicious(tmp_path / "owned")}, bad)
    with pytest.raises(SystemExit) as end:
        train_grpo.main(command_line(flags, generator_checkpoint=bad))
    assert end.value.code == 2
    assert "bad.pt is damaged, or no checkpoint" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.pt"]


def test_the_checkpoint_before_is_kept_and_named(flags, tmp_path, capsys):
    run(flags, save_interval=3)
    last = tmp_path / "out" / "checkpoint.pt"
    last.write_bytes(last.read_bytes()[:-100])
    resume = ["--init_from=resume", f"--out_dir={tmp_path}/out", "--max_iters=5"]
    with pytest.raises(SystemExit):
        train_grpo.main(resume)
    line = "rename checkpoint_prev.pt, the checkpoint saved before it, to checkpoint.pt"
    assert line in capsys.readouterr().err
    os.replace(tmp_path / "out" / "checkpoint_prev.pt", last)
    assert read(last)["training"]["iteration"] == 3
    train_grpo.main(resume)
