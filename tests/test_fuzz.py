"""Files of data are data: whatever they hold, the answer is one line of error or the right result.

Never a traceback, a hang or a partial file. As many inputs to each reader as FUZZ says, or 300:

    FUZZ=10000 python -m pytest -q tests/test_fuzz.py
"""

import io
import json
import os
import random
import re
import signal
import unicodedata
import zipfile
from functools import partial

import pytest
import torch

from data.char_diffusion.prepare import ALPHABETS, BLANK, normalise, prepare
from data.dataset import PAD, Dataset, Prompts
from grpo.plumbing.checkpoint import load_model, model_file
from model.transformer import Generator, TransformerConfig
from tests.conftest import TEXT

CASES, BATCH = int(os.environ.get("FUZZ", 300)), 50
STRINGS = [
    "",
    "_",
    "__",
    "a_",
    "th_ c_t",
    "abc",
    "A_",
    "a_\n",
    "a_\t",
    "a_\0",
    "\ud800_",
    "\ufeffa_",
    "ａ_",
    "а_",
    "a＿",
    "a‿",
    "é_",
    "e\u0301_",
    "\u202ea_",
    "a_\x1f",
    "_" * 16,
    "_" * 17,
    "a" * 100000 + "_",
    "prompts",
    "🙂_",
]
NUMBERS = [
    "0",
    "-1",
    "1e999",
    "-1e999",
    "NaN",
    "Infinity",
    "9" * 400,
    "9" * 5000,
    "0.1",
    "1e-999",
    "true",
    "null",
    "-0",
    "01",
    "0x10",
    "1_000",
]
SPECIAL = (
    [s.encode("utf-8", "surrogatepass") for s in STRINGS]
    + [n.encode() for n in NUMBERS]
    + [
        b"\0",
        b"\xff",
        b"\xfe\xff",
        b"\xef\xbb\xbf",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\r\n",
        b"\x1a",
        b'"',
        b"\\",
        b"\\u",
        b"\\ud800",
        b"\\u0000",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"//",
        b'{"prompts":',
        b'{"a":' * 500,
        b"[" * 990,
        b"[" * 100000,
        b"]" * 990,
        b" " * 3000,
        b"\n" * 3000,
        b"\n \n" * 1000,
        b"_" * 3000,
        b"a" * 3000,
        "é".encode() * 3000,
        "\u0301".encode() * 3000,
    ]
)


@pytest.fixture(autouse=True)
def no_hang():
    def stop(*_):
        raise TimeoutError("a single batch of inputs takes minutes")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(300)
    yield
    signal.alarm(0)


def mutate(content, rng):
    """A few random edits: cut, double, overwrite, insert something special, flip a bit."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        kind = rng.randrange(6)
        if kind == 0:
            del content[a : min(b, a + rng.choice((1, 4, 10**6)))]
        elif kind == 1:
            content[a:a] = content[a : min(b, a + 100)] * rng.choice((1, 2, 50))
        elif kind == 2:
            content[a:a] = rng.choice(SPECIAL)
        elif kind == 3:
            content[a : a + 1] = bytes([rng.randrange(256)])
        elif kind == 4 and a < len(content):
            content[a] ^= 1 << rng.randrange(8)
        else:
            content[a:a] = rng.randbytes(rng.choice((1, 3, 30)))
    return bytes(content)


def some_json(rng, depth=0):
    """Text that is mostly JSON, of any types, often with the key `prompts`, sometimes twice."""
    if depth == 0 and rng.random() < 0.4:
        good = [
            "".join(rng.choices("ab _", k=rng.randrange(15))) + "_"
            for _ in range(rng.randrange(1, 6))
        ]
        return json.dumps(
            {"x": rng.random(), "prompts": good} | rng.choice([{}, {"prompts ": 3}]),
            indent=rng.choice([None, 1, "\t"]),
        )
    kind = rng.randrange(8) if depth < 4 else 7
    if kind < 2 or depth == 0 and kind < 6:
        keys = [
            rng.choice(["prompts", "prompts", "prompt", "Prompts", "", "x"])
            for _ in range(rng.randrange(4))
        ]
        return (
            "{" + ",".join(json.dumps(key) + ": " + some_json(rng, depth + 1) for key in keys) + "}"
        )
    if kind < 5:

        def prompt():
            return json.dumps("".join(rng.choices("ab _", k=rng.randrange(1, 17))))

        return (
            "["
            + ", ".join(
                prompt() if rng.random() < 0.7 else some_json(rng, depth + 1)
                for _ in range(rng.randrange(6))
            )
            + "]"
        )
    return (
        json.dumps(rng.choice(STRINGS), ensure_ascii=rng.random() < 0.5)
        if rng.random() < 0.6
        else rng.choice(NUMBERS)
    )


def refused(call, path):
    """What `call` gives, or None where it says in one line, with the file's name, why not."""
    try:
        return call()
    except ValueError as error:
        assert (
            type(error) is ValueError
            and str(path) in str(error)
            and "\n" not in str(error)
            and "; " in str(error)
            and len(str(error)) < 1000
        ), error
        str(error).encode()  # printable


@pytest.mark.parametrize("seed", range(0, CASES, BATCH))
def test_prompts(world, tmp_path, seed):
    path, rng, accepted = tmp_path / "p.json", random.Random(seed), 0
    for i in range(BATCH):
        content = some_json(rng).encode("utf-8", "surrogatepass")
        if rng.random() < 0.5:
            content = mutate(
                rng.choice([content, b'{"prompts": ["th_ c_t", "the ___ cat sat", "_"]}', b""]), rng
            )
        if rng.random() < 0.02:
            depth = rng.randrange(1, 3000)
            content = b'{"prompts": ' + b"[" * depth + b'"_"' + b"]" * depth + b"}"
        path.write_bytes(content)
        prompts = refused(lambda: Prompts(world / "text", "train", path, 16), path)
        if prompts:
            accepted += 1
            want = json.loads(content.decode("utf-8-sig"))["prompts"]
            assert [
                "".join("" if t == PAD else prompts.vocabulary[t] for t in row)
                for row in prompts.prompts.tolist()
            ] == want
            assert all(BLANK in prompt and len(prompt) <= 16 for prompt in want)
            tokens, mask = prompts.batch(8, 16, None, None, None, (seed, i))
            assert mask.any(dim=1).all() and ((tokens == PAD) | (tokens < prompts.mask_id)).all()
    assert accepted > 0 and list(tmp_path.iterdir()) == [path]


def words_of(text, alphabet):
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return set(
        "".join(
            c if c in ALPHABETS[alphabet] else " "
            for c in (plain.lower() if alphabet == "text8" else plain)
        ).split()
    )


@pytest.mark.parametrize("seed", range(0, CASES, BATCH))
def test_texts(tmp_path, seed):
    path, out, rng = tmp_path / "in.txt", tmp_path / "d", random.Random(seed)
    letters = "".join(STRINGS[:-4]) + "the cat sat  \n\n\n\t\x85\u2028\xa0"
    for _ in range(BATCH):
        kind, alphabet = rng.randrange(4), rng.choice(sorted(ALPHABETS))
        if kind == 0:
            content = "".join(rng.choices(letters, k=rng.choice((0, 100, 40000)))).encode(
                "utf-8", rng.choice(("ignore", "surrogatepass"))
            )
        else:
            content = mutate(
                rng.randbytes(rng.randrange(5000)) if kind == 1 else TEXT.encode(), rng
            )
        path.write_bytes(content)
        meta = refused(partial(prepare, out, path, alphabet), path)
        if meta is None:
            assert not out.exists()
            continue
        assert sorted(p.name for p in out.iterdir()) == [
            "meta.json",
            "train.bin",
            "val.bin",
        ] and meta == json.loads((out / "meta.json").read_text())
        words = set()
        for name in ("train", "val"):
            split = Dataset(out, name)
            text = split.decode(split.tokens)
            assert (
                len(text) == meta[f"{name}_characters"] >= 1000
                and set(text) <= set(ALPHABETS[alphabet]) - {BLANK}
                and not re.search(r"\s{2}", text)
            )
            words |= set(text.split())
        text = content.decode()
        assert words == words_of(text, alphabet) or re.search(r"\S{1000}", text)
        for p in out.iterdir():
            p.unlink()
        out.rmdir()


def test_a_long_stretch_of_spaces():
    """In time that grows as its length: by its square this would take an hour."""
    assert normalise("a" + " " * 10**6 + "b \n \n c", "ascii") == "a b\nc"


@pytest.mark.parametrize("seed", range(0, CASES, BATCH))
def test_datasets(world, tmp_path, seed):
    rng, whole = (
        random.Random(seed),
        {name: (world / "text" / name).read_bytes() for name in ("meta.json", "train.bin")},
    )
    for i in range(BATCH):
        files = dict(whole)
        for name in rng.choice((["meta.json"], ["train.bin"], ["meta.json", "train.bin"])):
            other = some_json(rng).replace("prompts", "vocabulary").encode("utf-8", "surrogatepass")
            files[name] = (
                mutate(files[name], rng) if rng.random() < 0.8 else rng.choice([b"", other])
            )
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        data = refused(lambda: Dataset(tmp_path, "train"), tmp_path)
        if data:
            assert (
                len(set(data.vocabulary)) == len(data.vocabulary) == data.mask_id + 1
                and data.vocabulary[-1] == BLANK
                and data.tokens.max() < data.mask_id
            )
            size = min(16, len(data.tokens))
            tokens, mask = data.batch(4, size, {"word": 1.0}, 0.3, 1, (seed, i))
            assert (
                tokens.shape == mask.shape == (4, size)
                and mask.any(dim=1).all()
                and len(data.decode(tokens[0])) == size
            )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["meta.json", "train.bin"]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("seed", range(0, CASES, BATCH))
def test_checkpoints(tmp_path, seed):
    """Checksums right; the damage is in what is unpickled: names, shapes and places."""
    path, rng, archive = tmp_path / "m.pt", random.Random(seed), io.BytesIO()
    torch.save(
        model_file(
            Generator(TransformerConfig(vocab_size=4, block_size=8, n_layer=1, n_head=1, n_embd=8)),
            "abc_",
        ),
        archive,
    )
    with zipfile.ZipFile(archive) as whole:
        contents = {name: whole.read(name) for name in whole.namelist()}
    for _ in range(BATCH):
        with zipfile.ZipFile(path, "w") as damaged:
            for name, content in contents.items():
                content = bytearray(content)
                for _ in range(rng.choice((1, 2, 4)) if name.endswith("data.pkl") else 0):
                    content[rng.randrange(len(content))] = rng.randrange(256)
                damaged.writestr(name, bytes(content))
        model = refused(lambda: load_model(path, "generator", "abc_"), path)
        assert model is None or model(torch.zeros(1, 8, dtype=torch.long)).shape == (1, 8, 4)
    assert list(tmp_path.iterdir()) == [path]
