import os

import pytest
import torch

from grpo.checkpoint import build, load_model, model_file, read, write
from model.transformer import Generator, Judge, TransformerConfig

SHAPE = TransformerConfig(vocab_size=4, block_size=8, n_layer=1, n_head=1, n_embd=8)


def test_a_model_comes_back_bit_for_bit(tmp_path):
    model = Generator(SHAPE)
    write(tmp_path / "m.pt", model_file(model, "abc_"))
    again = load_model(tmp_path / "m.pt", "generator", "abc_")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt"]  # no temporary left


def test_half_precision_files_load_as_float32(tmp_path):
    write(tmp_path / "m.pt", model_file(Judge(SHAPE), "abc_", torch.float16))
    assert {p.dtype for p in load_model(tmp_path / "m.pt", "judge", "abc_").parameters()} == {torch.float32}


@pytest.mark.parametrize("change, message", [
    (lambda c: c.update(kind="judge"), "holds a judge, a generator is needed"), (lambda c: c.update(vocabulary="xyz_"), "'xyz_'.*'abc_'"),
    (lambda c: c["weights"].pop("head.weight"), "head.weight has shape missing"), (lambda c: c["weights"].update(extra=torch.zeros(2)), "extra has shape .2,., its architecture needs none"),
    (lambda c: c["weights"].update({"head.weight": torch.zeros(9, 9)}), r"\(9, 9\), its architecture needs \(3, 8\)"), (lambda c: c.pop("weights"), "no model file")])
def test_what_does_not_fit_is_refused_with_both_values(change, message):
    content = model_file(Generator(SHAPE), "abc_")
    change(content)
    with pytest.raises(ValueError, match=message):
        build(content, "generator", "abc_", "m.pt")


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"G", lambda b: b"a,b\n1,2\n"])
def test_damaged_files_are_named(tmp_path, damage):
    write(tmp_path / "m.pt", model_file(Generator(SHAPE), "abc_"))
    (tmp_path / "m.pt").write_bytes(damage((tmp_path / "m.pt").read_bytes()))
    with pytest.raises(ValueError, match="m.pt is damaged or no checkpoint"):
        read(tmp_path / "m.pt")


def test_a_flipped_bit_is_noticed(tmp_path):
    model = Generator(SHAPE)
    write(tmp_path / "m.pt", model_file(model, "abc_"))
    content = bytearray((tmp_path / "m.pt").read_bytes())
    content[content.index(model.head.weight.detach().numpy().tobytes())] ^= 1
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(ValueError, match="m.pt is damaged"):
        read(tmp_path / "m.pt")


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read(tmp_path / "m.pt")


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Malicious:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"kind": "generator", "weights": Malicious()}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="damaged or no checkpoint"):
        read(tmp_path / "m.pt")
    assert not (tmp_path / "owned").exists()


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    write(tmp_path / "f", b"old")
    with pytest.raises(Exception):
        write(tmp_path / "f", {"cannot be pickled": lambda: 0})
    assert (tmp_path / "f").read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["f"]
