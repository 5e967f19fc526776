import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import TEXT

from data.dataset import PAD, Dataset, Prompts, decode, encode
from data.lexicon import hidden_spans, highlight, is_valid, lexicon
from data.masking import MASKINGS, make_mask, parse_masking
from data.text import prepare as script
from data.text.prepare import VOCABULARY, is_prose, is_validation, normalise, prepare
from data.user_mistake import Mistake

LINE = "the old cat sat on the mat and ran"
TEXTS = np.array([[*LINE]] * 2000)  # (B,T)


def masks(name, ratio=0.25, words=2, seed=0):
    return make_mask(TEXTS, {name: 1.0}, ratio, words, np.random.default_rng(seed))


@pytest.mark.parametrize("name", ["random", "span", "word", "short", "sticky"])
def test_every_row_has_a_blank_and_the_seed_decides(name):
    mask = masks(name, ratio=0.01)
    assert mask.any(axis=1).all()
    assert not mask.all(axis=1).any()
    assert (masks(name) == masks(name)).all()
    assert (masks(name) != masks(name, seed=1)).any()


def test_sticky_blanks_cluster_and_random_ones_do_not():
    for name, want in (("random", 0.25), ("sticky", 0.75)):
        mask = masks(name)
        assert abs(mask.mean() - 0.25) < 0.02
        beside = (mask[:, 1:] & mask[:, :-1]).sum() / mask[:, :-1].sum()
        assert abs(beside - want) < 0.03  # P(hidden | the one before is hidden)


def test_a_span_is_one_run():
    mask = masks("span")
    assert (mask.sum(axis=1) == round(0.25 * len(LINE))).all()
    assert (np.diff(mask.astype(int), axis=1) == 1).sum(axis=1).max() == 1


def test_word_hides_whole_uncut_words_and_short_those_of_two_to_four_letters():
    text = "a cat purred on i the round mat by noon yes"
    inner = set(text.split()[1:-1])  # the window may have cut the others
    for name, want in (("word", inner), ("short", inner - {"purred", "i", "round"})):
        rng = np.random.default_rng(0)
        hidden = make_mask(np.array([[*text]] * 500), {name: 1.0}, 0.1, 2, rng)
        found = set()
        for row in hidden:
            words = "".join(c for c, blank in zip(text, row) if blank or c == " ").split()
            assert len(words) == 2
            found |= set(words)
        assert found == want
    nothing_to_hide = np.array([[*"a i purred round sat"], ["x"] * 20])
    mask = make_mask(nothing_to_hide, {"short": 1.0}, 0.1, 2, np.random.default_rng(0))
    assert (mask.sum(axis=1) == 1).all()


def test_a_masking_of_ones_own_is_a_function_of_the_characters(monkeypatch, world):
    monkeypatch.setitem(MASKINGS, "vowels", lambda text, *_: np.isin(text, [*"aeiou"]))
    data = Dataset(world / "text", "train", 16)
    tokens, mask = data.batch(50, 16, parse_masking("vowels"), 0.1, 2, (1,))
    for row, blanks in zip(tokens, mask):
        assert blanks.tolist() == [c in "aeiou" for c in data.decode(row)]


def test_a_mix_uses_every_part():
    weights = parse_masking("span:3, word")
    assert weights == {"span": 0.75, "word": 0.25}
    mask = make_mask(TEXTS, weights, 0.25, 1, np.random.default_rng(0))
    assert 0.2 < 1 - (mask & (TEXTS == " ")).any(axis=1).mean() < 0.6


@pytest.mark.parametrize("text", ["", "world", "word:0", "word:1e308", "word:nan", "span,word:x"])
def test_weights_that_are_no_shares(text):
    with pytest.raises(Mistake, match="masking=.* has a part .*; write NAME"):
        parse_masking(text)


def test_normalise():
    assert normalise("Café's  résumé: don't") == "cafe s resume don t"


def test_prose():
    assert is_prose("The quick brown fox jumps over the lazy dog, and then it sleeps.")
    assert not is_prose("x = f(y); z[3] = {1: 2}; return foo(bar) + baz[qux] * 3 != 4")


def test_prepared_text_comes_back(tmp_path):
    """The prepared text is what a loop over the paragraphs gives. Repeated ones are dropped."""
    (tmp_path / "in.txt").write_text(TEXT + "\n\n" + TEXT)
    sizes = prepare(tmp_path / "d", tmp_path / "in.txt")
    assert sorted(os.listdir(tmp_path / "d")) == ["meta.json", "train.bin", "val.bin"]
    for split in ("train", "val"):
        data = Dataset(tmp_path / "d", split, 16)
        wanted = [p for p in TEXT.split("\n\n") if is_validation(normalise(p)) == (split == "val")]
        assert data.decode(data.tokens) == " ".join(normalise(p) for p in wanted)
        assert len(data.tokens) == sizes[f"{split}.bin"]
    assert 0.04 < sizes["val.bin"] / len(TEXT) < 0.2


def test_the_default_text_is_the_one_that_the_shipped_models_learned(tmp_path):
    """The text is documentation of the pinned numpy and torch. No version of Python changes it."""
    prepare(tmp_path)
    found = {path.stem: hashlib.sha256(path.read_bytes()) for path in tmp_path.glob("*.bin")}
    begins = {name: digest.hexdigest()[:12] for name, digest in found.items()}
    assert begins == {"train": "b1fad3dd8d50", "val": "d88587dfedb5"}


@pytest.mark.parametrize("program", (["data/text/prepare.py"], ["-m", "data.text.prepare"]))
def test_prepare_is_a_command(program, tmp_path):
    (tmp_path / "in.txt").write_text(TEXT)
    flags = [f"--input={tmp_path / 'in.txt'}", f"--out_dir={tmp_path / 'd'}"]
    done = subprocess.run([sys.executable, *program, *flags], capture_output=True, check=True)
    assert done.stdout.startswith(b"{'train.bin': ")
    assert Dataset(tmp_path / "d", "val", 16).vocabulary == VOCABULARY


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--input=in.txt"], "name another folder, for example --out_dir=data/mine"),
        (
            ["--input=in.txt", "--out_dir=shipped"],
            "name another folder",
        ),
        (["--inputs", "in.txt"], "--inputs"),
        (["--input=none.txt", "--out_dir=d"], "No such file or directory: 'none.txt'"),
        (["--input=latin", "--out_dir=d"], "'utf-8' codec can't decode"),
        (["--input=short", "--out_dir=d"], "short has only 0 letters and spaces for train.bin"),
        (["--input=in.txt", "--out_dir=short"], "short cannot be written ([Errno 17] File exists"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    flags, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "__file__", tmp_path / "shipped" / "prepare.py")
    Path("in.txt").write_text(TEXT)
    Path("latin").write_bytes("é".encode("latin-1") * 9)
    Path("short").write_text("1 2 3")
    with pytest.raises(SystemExit, match="2"):
        script.main(flags)
    assert re.fullmatch(f".*: error: .*{re.escape(message)}.*\n", capsys.readouterr().err)
    assert sorted(os.listdir()) == ["in.txt", "latin", "short"]


def test_an_error_of_the_program_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text(TEXT)
    monkeypatch.setattr(script, "VOCABULARY", "abc")
    with pytest.raises(ValueError, match="substring not found"):
        script.main([f"--input={tmp_path}/in.txt", f"--out_dir={tmp_path}/d"])


@pytest.mark.parametrize(
    "name, content",
    [
        ("train.bin", b""),
        ("train.bin", b"\xff" * 100),
        ("meta.json", b"[]"),
        ("meta.json", b'{"vocabulary": ["a", "b", "_"]}'),
        ("meta.json", b"{"),
        ("val.bin", None),
    ],
)
def test_a_damaged_dataset_is_named(name, content, world, tmp_path):
    folder = shutil.copytree(world / "text", tmp_path / "d")
    (folder / name).write_bytes(content) if content is not None else (folder / name).unlink()
    with pytest.raises(Mistake, match=f"the dataset in {folder} is damaged; make it with: python"):
        for split in ("train", "val"):
            Dataset(folder, split, 16)


def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text(TEXT)
    prepare(tmp_path / "d", tmp_path / "in.txt")
    before = {path: path.read_bytes() for path in (tmp_path / "d").iterdir()}
    (tmp_path / "in.txt").write_text(TEXT.replace("cat", "cub"))
    write_bytes = Path.write_bytes

    def full(path, content):
        write_bytes(path, content[:100])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(Mistake, match="d cannot be written .no space left on device"):
        prepare(tmp_path / "d", tmp_path / "in.txt")
    assert all(path.read_bytes() == content for path, content in before.items())


def test_batches_are_a_function_of_the_seed(world):
    data = Dataset(world / "text", "train", 16)

    def batch(seed):
        return data.batch(4, 16, {"random": 1.0}, 0.3, 1, seed)

    tokens, mask = batch((1, 5))
    again, same_mask = batch((1, 5))
    others, _ = batch((1, 6))
    assert (tokens == again).all() and (mask == same_mask).all()
    assert (tokens != others).any()


def test_prompts_of_any_length(world, tmp_path):
    prompts = ["Th_ c_t!", "_", "sat — on the m_t"]
    (tmp_path / "p.json").write_text(json.dumps({"prompts": prompts}))
    data = Prompts(world / "text", "train", tmp_path / "p.json", 16)
    tokens, mask = data.batch(200, 16, None, None, None, (0, 1))
    assert tokens.shape == mask.shape == (200, 16)
    assert mask.any(dim=1).all()
    assert not (mask & (tokens == PAD)).any()
    masked = tokens.masked_fill(mask, data.mask_id)
    shown = {data.decode(row[row != PAD]) for row in masked}
    assert shown == {"th_ c_t", "_", "sat on the m_t"}


@pytest.mark.parametrize(
    "content, message",
    [
        ('{"prompts": ["a_", "abc"]}', r"prompt 1 'abc' has no blank; write _ for each"),
        (
            '{"prompts": ["a_aaaaaaaaaaaaaaaa"]}',
            "prompt 0 .* has 18 characters, more than 16; short",
        ),
        ('{"prompts": []}', "no list of texts"),
        ('{"prompts": "a_"}', "no list of texts"),
        ('{"prompts": [1]}', "no list of texts"),
        ('{"prompt": ["a_"]}', "KeyError: 'prompts'"),
        ('["a_"]', "write JSON: {"),
        ('{"prompts": ["a_"]', "line 1 column 19"),
    ],
)
def test_a_refused_prompt_says_why(content, message, world, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(Mistake, match=f"prompts_file={path}.*{message}"):
        Prompts(world / "text", "train", path, 16)


@pytest.mark.parametrize(
    "text, want", [("  Café _ _é, and _!", "cafe _ _e and _"), ("__", "__"), ("Don't _", "don t _")]
)
def test_a_text_with_blanks_is_normalised(text, want):
    tokens = encode(text, VOCABULARY, 20, "text")
    assert "".join(VOCABULARY[t] for t in tokens) == want


def blanks(text):
    return np.array([c == "_" for c in text])


def test_hidden_words_are_those_that_the_window_does_not_cut():
    mask = blanks("__ c_t sat _")
    assert hidden_spans("he cat sat o", mask) == [(3, 6)]
    assert hidden_spans("he cat sat o", mask, cut=False) == [(0, 2), (3, 6), (11, 12)]


def test_a_valid_word_is_one_of_the_lexicon_of_just_this_length():
    words = lexicon("the cat a dog we go i x")
    assert words == {"the", "cat", "a", "dog", "we", "go", "i"}
    for text, start, end, valid in (
        ("the cat sat", 4, 7, True),
        ("the catxsat", 4, 7, False),
        ("the c t sat", 4, 7, False),
        ("wwe go", 1, 3, False),
    ):
        assert is_valid(text, start, end, words) == valid


def test_decoding_is_that_of_each_row(world):
    data = Dataset(world / "text", "train", 16)
    tokens, _ = data.batch(6, 16, {"random": 1.0}, 0.3, 1, (0,))
    texts = [data.decode(row) for row in tokens]
    assert decode(tokens.view(2, 3, 16), data.vocabulary) == texts


@pytest.mark.parametrize("is_terminal", (False, True))
def test_blanks_are_seen(is_terminal, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    shown = highlight("x][the cat", [True] * 3 + [False] * 5 + [True] * 2)
    on, off = ("\033[1;32m", "\033[0m") if is_terminal else "[]"
    assert shown == f"{on}x][{off}the c{on}at{off}"
    monkeypatch.setenv("NO_COLOR", "1")
    assert highlight("the cat", blanks("th_ _at")) == "th[e] [c]at"
