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
from grpo.plumbing import checkpoint, setup
from grpo.plumbing.checkpoint import build, load_model, model_file, read, write
from grpo.plumbing.config import Config
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
    """Whichever program reads it: refused in a line that names it, and nothing is called."""
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
    """One number repeated, overlapping rows, all weights in the same memory: no megabyte asks
    for gigabytes."""
    shape, numbers = (
        TransformerConfig(vocab_size=4, block_size=8, n_layer=40, n_head=1, n_embd=256),
        torch.zeros(4 * 256 * 256),
    )
    with torch.device("meta"):
        weights = Generator(shape).state_dict()
    write(tmp_path / "m.pt", file_of(shape, {name: lie(w, numbers) for name, w in weights.items()}))
    no_memory(monkeypatch)
    with pytest.raises(ValueError, match="m.pt is damaged or no checkpoint"):
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
def test_what_is_no_tensor_of_numbers(monkeypatch, tmp_path, kind):
    weights = Generator(SHAPE).state_dict()
    spoilt = weights | {"head.weight": kind(weights["head.weight"])}
    write(tmp_path / "m.pt", file_of(SHAPE, spoilt))
    no_memory(monkeypatch)
    told = r"shape (Tensor|list|NoneType), its architecture needs \(3, 8\)|is damaged or no check"
    with pytest.raises(ValueError, match=told):
        load_model(tmp_path / "m.pt", "generator", "abc_")


def nest(levels, width):
    """A list in a list in a list: small in a file, and, where shared, endless when it is shown."""
    inner = []
    for _ in range(levels):
        inner = [inner] * width
    return inner


@pytest.mark.parametrize("place", ["kind", "vocabulary", "architecture", "surplus"])
@pytest.mark.parametrize(
    "content",
    [nest(9, 10), nest(200, 1), 1 << 99999, {"a": nest(7, 20)}],
    ids=["wide", "deep", "a long number", "in a dict"],
)
def test_nests_are_refused_before_they_are_shown(tmp_path, place, content):
    file = model_file(Generator(SHAPE), "abc_") | {place: content}
    write(tmp_path / "m.pt", file)
    with pytest.raises(ValueError, match="m.pt is damaged or no checkpoint"):
        load_model(tmp_path / "m.pt", "generator", "abc_")


@pytest.mark.parametrize("compression", [zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_file_unpacks_to_no_more_than_its_size(tmp_path, monkeypatch, compression):
    write(tmp_path / "whole.pt", model_file(Generator(SHAPE), "abc_"))
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole:
        with zipfile.ZipFile(tmp_path / "m.pt", "w", compression) as packed:
            for name in whole.namelist():
                packed.writestr(name, whole.read(name))
            packed.writestr("archive/data/zeros", bytes(10**6))
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda _: pytest.fail("it was unpacked"))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ValueError, match="m.pt is damaged or no checkpoint"):
        read(tmp_path / "m.pt")


def test_members_that_overlap_are_refused(tmp_path, monkeypatch):
    """Two names for the same bytes: the total is more than the file."""
    write(tmp_path / "m.pt", model_file(Generator(SHAPE), "abc_"))
    members = zipfile.ZipFile.infolist
    monkeypatch.setattr(zipfile.ZipFile, "infolist", lambda archive: 99 * members(archive))
    with pytest.raises(ValueError, match="m.pt is damaged or no checkpoint"):
        read(tmp_path / "m.pt")


def test_a_temporary_that_a_kill_left_is_cleaned_by_the_next_write(tmp_path):
    old = tmp_path / "f.0123abcd.tmp"
    young = tmp_path / "f.4567abcd.tmp"
    others = tmp_path / "g.89ababcd.tmp"
    for path in (old, young, others):
        path.write_bytes(b"half")
    hours_ago = young.stat().st_mtime - 9999
    for path in (old, others):
        os.utime(path, (hours_ago, hours_ago))
    write(tmp_path / "f", b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f", young.name, others.name]


def test_a_temporary_follows_no_link(tmp_path, monkeypatch):
    """Whoever can guess its name cannot have it written elsewhere."""
    monkeypatch.setattr(checkpoint.secrets, "token_hex", lambda _: "guessed")
    (tmp_path / "f.guessed.tmp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        write(tmp_path / "f", b"new")
    assert not (tmp_path / "elsewhere").exists()


def test_the_parent_of_a_new_folder_is_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(checkpoint, "sync", synced.append)
    write(tmp_path / "new" / "f", b"content")
    assert synced == [tmp_path, tmp_path / "new"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    model = Generator(SHAPE)
    with torch.no_grad():
        model.head.weight[0, 0] = float("inf")
    config = Config(out_dir=str(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(FloatingPointError, match="step 4: the weights are not finite, and not sav"):
        checkpoint.save_training(config, model, model, optimizer, 5, "abc_", {})
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_is_locked_before_it_is_read(flags, monkeypatch):
    """Else it would go on from what another run was about to replace."""
    train_grpo.main(command_line(flags, max_iters=2, lr_decay_iters=4))
    calls = []
    for name in ("lock", "read"):
        real = getattr(setup, name)

        def record(path, name=name, real=real):
            calls.append(name)
            return real(path)

        monkeypatch.setattr(setup, name, record)
    train_grpo.main(["--init_from=resume", f"--out_dir={flags['out_dir']}", "--max_iters=3"])
    assert calls[:2] == ["lock", "read"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    write(tmp_path / "f", b"old")
    with pytest.raises(AttributeError, match="local object"):
        write(tmp_path / "f", {"cannot be pickled": lambda: 0})
    assert (tmp_path / "f").read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["f"]
