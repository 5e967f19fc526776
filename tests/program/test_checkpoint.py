"""Check that files of weights are written whole or not at all, read strictly, and run no code."""

import os

import pytest
import torch
from conftest import run

from data.user_mistake import Mistake
from grpo.run.checkpoint import load_model, model_file, read, write
from model.transformer import Generator, TransformerConfig, make_generator

SHAPE = TransformerConfig(vocab_size=4, block_size=8, n_layer=1, n_head=1, n_embd=8, blank=3)


@pytest.fixture
def file(tmp_path):
    """Write the file of a generator: -> its path."""
    write(tmp_path / "m.pt", model_file(make_generator(SHAPE)))
    return tmp_path / "m.pt"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c["architecture"].update(dropout=0.1), "isn't one of this version"),
        (lambda c: c["weights"].pop("head.weight"), 'Missing key.* "head.weight"'),
        (
            lambda c: c["weights"].update({"head.weight": torch.zeros(9, 9)}),
            r"head.weight: .*\(\[9, 9\].*, the shape in current model is .*\(\[3, 8\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(file, change, message):
    content = read(file)
    change(content)
    write(file, content)
    with pytest.raises(Mistake, match=message) as error:
        load_model(file, Generator)
    assert "\n" not in str(error.value)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(file, monkeypatch):
    before = file.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        write(file, b"new")
    assert [*file.parent.iterdir()] == [file] and file.read_bytes() == before


class Malicious:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_checkpoint_runs_no_code(world, flags, tmp_path):
    bad = tmp_path / "bad.pt"
    torch.save(read(world / "generator.pt") | {"weights": Malicious(tmp_path / "owned")}, bad)
    with pytest.raises(Mistake, match="bad.pt is damaged, or isn't one of this version"):
        run(flags, generator_checkpoint=bad)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.pt"]
