"""Damage data files. A reader must read each one correctly, or refuse it with a one-line error.

Each reader gets as many inputs as FUZZ says, by default 300:

    FUZZ=10000 python -m pytest -q tests/program/test_fuzz.py
"""

import json
import os
import random
import re
import unicodedata

import pytest
from conftest import TEXT

from data.dataset import PAD, Dataset, Prompts
from data.text.prepare import VOCABULARY, normalise, prepare
from data.user_mistake import Mistake

CASES = int(os.environ.get("FUZZ", 300))
BATCH = 50
STRINGS = [
    "",
    "_",
    "a_",
    "th_ c_t",
    "abc",
    "A_",
    "a_\n",
    "a_\0",
    "\ud800_",
    "\ufeffa_",
    "ａ_",
    "а_",
]
STRINGS += [
    "a＿",
    "é_",
    "e\u0301_",
    "_\u0301",
    "İ_",
    "\u202ea_",
    "_" * 16,
    "_" * 17,
    "🙂_",
    "x" * 999,
]
OTHERS = ["0", "-1", "1e999", "NaN", "9" * 5000, "true", "null", "01", "[]", "{}", '{"a": "_"}']
SPECIAL = [b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r\n", b'"', b"\\", b"\\ud800", b"{"]
SPECIAL += [b"}", b"[", b"]", b",", b":", b'{"prompts":', b"[" * 400, b" " * 3000, b"\n \n" * 1000]
SPECIAL += [b"_" * 3000, b"a" * 3000, "é".encode() * 3000, "\u0301".encode() * 3000]


def mutate(content, rng):
    """Make a few random edits, which cut, repeat, insert something special, or flip a bit."""
    content = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5, 20))):
        a, b = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        kind = rng.randrange(4)
        if kind == 0:
            del content[a : min(b, a + rng.choice((1, 4, 10**6)))]
        elif kind == 1:
            content[a:a] = content[a : min(b, a + 100)] * rng.choice((1, 2, 50))
        elif kind == 2 or a == len(content):
            content[a:a] = rng.choice(SPECIAL)
        else:
            content[a] ^= 1 << rng.randrange(8)
    return bytes(content)


def some_prompts(rng):
    """Make a file of prompts, which may have odd characters, wrong types or random edits."""
    prompts = []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 5))):
        good = "".join(rng.choices("ab _É.", k=rng.randrange(15))) + "_"
        text = good if rng.random() < 0.8 else rng.choice(STRINGS)
        prompts.append(json.dumps(text, ensure_ascii=rng.random() < 0.5))
    if rng.random() < 0.2:
        prompts.append(rng.choice(OTHERS))
    inner = f"[{', '.join(prompts)}]" if rng.random() < 0.9 else rng.choice(OTHERS)
    key = rng.choice(["prompts"] * 9 + ["Prompts"])
    content = f'{{"x": 1, "{key}": {inner}}}'.encode("utf-8", "surrogatepass")
    return mutate(content, rng) if rng.random() < 0.5 else content


def refused(call, path):
    """Return what `call` gives, or None if it refuses the file with one line that names `path`."""
    try:
        return call()
    except Mistake as error:
        line = str(error)
        assert str(path) in line and "; " in line
        assert len(line.encode()) < 1000 and "\n" not in line


def plain(text):
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def as_read(prompt):
    """Reduce a prompt to what the models read: the letters a to z, `_` and single spaces."""
    pieces = [plain(piece).lower() for piece in prompt.split("_")]
    kept = ["".join(c if "a" <= c <= "z" else " " for c in piece) for piece in pieces]
    return re.sub(" +", " ", "_".join(kept)).strip()


def readable(content):
    """Return the prompts of a file as the models read them, or None if the file breaks a rule."""
    try:
        prompts = json.loads(content.decode("utf-8-sig"))["prompts"]
    except (ValueError, KeyError, TypeError):
        return None
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        return None
    texts = [as_read(prompt) for prompt in prompts]
    return texts if texts and all("_" in text and len(text) <= 16 for text in texts) else None


@pytest.mark.parametrize("seed", range(0, CASES, BATCH))
def test_prompts(world, tmp_path, seed):
    path = tmp_path / "p.json"
    rng = random.Random(seed)
    accepted = 0
    for i in range(BATCH):
        content = some_prompts(rng)
        path.write_bytes(content)
        prompts = refused(lambda: Prompts(world / "text", "train", path, 16), path)
        found = prompts and [prompts.decode(row[row != PAD]) for row in prompts.prompts]
        assert found == readable(content), content
        if prompts:
            accepted += 1
            tokens, mask = prompts.batch(8, 16, None, None, None, (seed, i))
            assert mask.any(dim=1).all() and ((tokens == PAD) | (tokens < prompts.mask_id)).all()
    assert 0 < accepted < BATCH and list(tmp_path.iterdir()) == [path]


def some_text(rng):
    kind = rng.randrange(4)
    if kind == 0:
        letters = "".join(STRINGS) + "the cat sat  \n\n\n\t\x85\u2028\xa0"
        text = "".join(rng.choices(letters, k=rng.choice((0, 100, 40000))))
        return text.encode("utf-8", rng.choice(("ignore", "surrogatepass")))
    return mutate(rng.randbytes(5000) if kind == 1 else TEXT.encode(), rng)


@pytest.mark.parametrize("seed", range(0, CASES, BATCH))
def test_texts(tmp_path, seed):
    path = tmp_path / "in.txt"
    rng = random.Random(seed)
    accepted = 0
    for i in range(BATCH):
        out = tmp_path / str(i)
        content = some_text(rng)
        path.write_bytes(content)
        try:
            sizes = prepare(out, path)
        except Mistake as error:
            assert "\n" not in str(error) and not out.exists()
            continue
        accepted += 1
        words = set()
        for name in ("train", "val"):
            split = Dataset(out, name, 16)
            text = split.decode(split.tokens)
            assert len(text) == sizes[f"{name}.bin"] >= 1000
            assert set(text) <= set(VOCABULARY[:-1]) and "  " not in text
            words |= set(text.split())
        text = plain(content.decode()).lower()
        wanted = "".join(c if "a" <= c <= "z" else " " for c in text)
        assert words == set(wanted.split()) or re.search(r"\S{1000}", content.decode())
    assert 0 < accepted < BATCH


def test_a_long_stretch_of_spaces():
    """The time is linear in the number of spaces. Quadratic code would take an hour."""
    assert normalise("a" + " " * 10**6 + "b \n \n c") == "a b c"
