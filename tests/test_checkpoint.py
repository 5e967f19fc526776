import ast
import os
import pickle
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

import train_grpo
from grpo.evaluate import main as evaluate_main
from grpo.fill import main as fill_main
from grpo.plumbing import checkpoint
from grpo.plumbing.checkpoint import build, load_model, model_file, read, write
from model.transformer import Generator, Judge, TransformerConfig
from tests.conftest import command_line

SHAPE = TransformerConfig(vocab_size=4, block_size=8, n_layer=1, n_head=1, n_embd=8)


def test_a_model_comes_back_bit_for_bit(tmp_path):
    model = Generator(SHAPE)
    write(tmp_path / "m.pt", model_file(model, "abc_"))
    again = load_model(tmp_path / "m.pt", "generator", "abc_")
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values())
    )
    assert [p.name for p in tmp_path.iterdir()] == ["m.pt"]  # no temporary left


def test_half_precision_files_load_as_float32(tmp_path):
    write(tmp_path / "m.pt", model_file(Judge(SHAPE), "abc_", torch.float16))
    assert {p.dtype for p in load_model(tmp_path / "m.pt", "judge", "abc_").parameters()} == {
        torch.float32
    }


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.update(kind="judge"), "holds a .judge., a generator is needed"),
        (lambda c: c.update(vocabulary="xyz_"), "'xyz_'.*'abc_'"),
        (lambda c: c["weights"].pop("head.weight"), "head.weight. has shape missing"),
        (
            lambda c: c["weights"].update(extra=torch.zeros(2)),
            "extra. has shape .2,., its architecture needs none",
        ),
        (
            lambda c: c["weights"].update({"head.weight": torch.zeros(9, 9)}),
            r"\(9, 9\), its architecture needs \(3, 8\)",
        ),
        (lambda c: c.pop("weights"), "no model file"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(change, message):
    content = model_file(Generator(SHAPE), "abc_")
    change(content)
    with pytest.raises(ValueError, match=message):
        build(content, "generator", "abc_", "m.pt")


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"G", lambda b: b"a,b\n1,2\n"]
)
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


class Malicious:
    """Unpickled, it calls something."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "where",
    [
        "weights",
        "vocabulary",
        "training",
        "alone",
        "in the old format",
        "a bare pickle",
        "as if TorchScript",
    ],
)
@pytest.mark.parametrize("function", [os.mkdir, exec, subprocess.check_call, torch.load])
@pytest.mark.filterwarnings(
    "ignore:'torch.load' received a zip file that looks like a TorchScript archive"
)
def test_a_checkpoint_cannot_run_code(world, flags, tmp_path, capsys, where, function):
    """Whichever program reads it, under whatever name: refused in a line that names the file, and what it would have called is not called."""
    owned, path = tmp_path / "owned", tmp_path / "run" / "checkpoint.pt"
    code = f"__import__('os').mkdir({str(owned)!r})"
    bad = Malicious(
        function,
        *{
            os.mkdir: (str(owned),),
            subprocess.check_call: (["mkdir", str(owned)],),
            torch.load: (str(owned),),
        }.get(function, (code,)),
    )
    path.parent.mkdir()
    if where == "as if TorchScript":
        with zipfile.ZipFile(path, "w") as archive:
            for name in ("data.pkl", "constants.pkl", "version"):
                archive.writestr(
                    f"archive/{name}", b"3\n" if name == "version" else pickle.dumps(bad)
                )
    elif where == "a bare pickle":
        path.write_bytes(pickle.dumps(bad))
    else:
        content = read(world / "generator.pt") | {
            "training": {"optimizer": {}, "iteration": 1, "config": {}, "rng": {}}
        }
        torch.save(
            bad if where == "alone" else content | {where if where in content else "weights": bad},
            path,
            _use_new_zipfile_serialization=where != "in the old format",
        )
    programs = [
        (train_grpo.main, command_line(flags, generator_checkpoint=path)),
        (train_grpo.main, command_line(flags, judge_checkpoint=path)),
        (evaluate_main, [str(path.parent)]),
        (train_grpo.main, command_line(flags, out_dir=path.parent, init_from="resume")),
        (fill_main, ["c_t", f"--before={path}", f"--judge={path}"]),
    ]
    for main, arguments in programs:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        line = capsys.readouterr().err
        assert (
            stopped.value.code == 2
            and line.count("\n") == 1
            and f"{path} is damaged or no checkpoint" in line
        )
    assert not owned.exists() and sorted(p.name for p in tmp_path.rglob("*")) == [
        "checkpoint.pt",
        "run",
    ]


def test_nothing_but_weights_is_ever_loaded():
    """No call of the program unpickles, or falls back to it."""
    loads = 0
    for path in [
        *Path().glob("*.py"),
        *(path for folder in ("grpo", "model", "data") for path in Path(folder).rglob("*.py")),
    ]:
        for call in (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        ):
            name = ast.unparse(call.func)
            assert name not in (
                "eval",
                "exec",
                "compile",
                "np.load",
                "torch.jit.load",
                "np.loadtxt",
            ) and not name.startswith(("pickle.", "marshal.", "shelve.")), (path, call.lineno)
            if name == "torch.load":
                loads += 1
                assert {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}[
                    "weights_only"
                ] == "True", (path, call.lineno)
    assert loads == 1


def no_memory(monkeypatch):
    """Models may be built of shapes alone."""
    for name, cls in checkpoint.KINDS.items():
        monkeypatch.setitem(
            checkpoint.KINDS,
            name,
            lambda shape, cls=cls: (
                cls(shape)
                if torch.get_default_device().type == "meta"
                else pytest.fail("memory was taken")
            ),
        )


@pytest.mark.parametrize(
    "claim",
    [
        {"n_embd": 10**9},
        {"n_embd": 10**30},
        {"n_embd": 1 << 16},
        {"n_embd": "8"},
        {"n_embd": 8.0},
        {"n_embd": True},
        {"n_embd": None},
        {"n_embd": -8},
        {"n_embd": 9},
        {"n_layer": 10**6},
        {"n_layer": 9},
        {"n_layer": 0},
        {"n_layer": -1},
        {"n_head": 0},
        {"n_head": 8},
        {"n_head": 3},
        {"block_size": 10**9},
        {"block_size": 0},
        {"vocab_size": 10**9},
        {"vocab_size": 5},
        {"experts": 3},
        3,
        None,
        "n_embd",
        [8],
        [["n_embd", 10**9]],
    ],
)
def test_what_an_architecture_claims_is_checked_before_memory_is_taken(monkeypatch, claim):
    content = model_file(Generator(SHAPE), "abc_")
    content["architecture"] = content["architecture"] | claim if isinstance(claim, dict) else claim
    no_memory(monkeypatch)
    with pytest.raises(
        ValueError, match="checkpoint m.pt(: weight| has the architecture)"
    ) as error:
        build(content, "generator", "abc_", "m.pt")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def file_of(shape, weights):
    return {
        "kind": "generator",
        "architecture": vars(shape),
        "vocabulary": "abc_",
        "weights": weights,
    }


@pytest.mark.parametrize(
    "lie",
    [
        lambda w, numbers: numbers[:1].expand(w.shape),
        lambda w, numbers: numbers.as_strided(w.shape, [1] * w.dim()),
        lambda w, numbers: numbers[: w.numel()].view(w.shape),
    ],
)
def test_a_few_numbers_that_look_like_many(monkeypatch, tmp_path, lie):
    """One number repeated, overlapping rows, or all weights in the same memory: a file of a megabyte cannot ask for gigabytes."""
    shape, numbers = (
        TransformerConfig(vocab_size=4, block_size=8, n_layer=40, n_head=1, n_embd=256),
        torch.zeros(4 * 256 * 256),
    )
    with torch.device("meta"):
        weights = Generator(shape).state_dict()
    write(tmp_path / "m.pt", file_of(shape, {name: lie(w, numbers) for name, w in weights.items()}))
    no_memory(monkeypatch)
    with pytest.raises(
        ValueError,
        match=f"holds {numbers.nbytes} bytes of weights, its architecture needs {sum(w.nbytes for w in weights.values())}; make",
    ):
        load_model(tmp_path / "m.pt", "generator", "abc_")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "kind",
    [
        lambda w: w.to("meta"),
        lambda w: w.to_sparse(),
        lambda w: w.long(),
        lambda w: w.tolist(),
        lambda w: None,
        lambda w: torch.nested.nested_tensor([w]),
    ],
)
def test_what_is_no_tensor_of_numbers(monkeypatch, kind):
    weights = Generator(SHAPE).state_dict()
    no_memory(monkeypatch)
    with pytest.raises(
        ValueError,
        match=r"head.weight. has shape (Tensor|list|NoneType), its architecture needs \(3, 8\)",
    ):
        build(
            file_of(SHAPE, weights | {"head.weight": kind(weights["head.weight"])}),
            "generator",
            "abc_",
            "m.pt",
        )


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    write(tmp_path / "f", b"old")
    with pytest.raises(Exception):
        write(tmp_path / "f", {"cannot be pickled": lambda: 0})
    assert (tmp_path / "f").read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["f"]
