"""Check the text, what is hidden of it, prompts, and which fills are words."""

import hashlib
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from conftest import TEXT, early

from data.dataset import read_dataset, read_prompts
from data.masking import MASKINGS, make_mask
from data.text import prepare as prepare_module
from data.text.prepare import is_validation, normalise, prepare
from data.user_mistake import Mistake
from data.vocabulary import MASK_ID, PAD, decode

LINE = "the old cat sat on the mat and ran"
TEXTS = np.array([[*LINE]] * 500)  # (B,T)
SUMS = np.array([[*"417+471=888"]] * 500)  # (B,T)


def masks(name, ratio=0.25, words=2, seed=0):
    texts = SUMS if name in ("columns", "digits") else TEXTS
    return make_mask(texts, name, ratio, words, np.random.default_rng(seed))


@pytest.mark.parametrize("name", MASKINGS)
def test_every_row_has_a_blank_and_the_seed_decides(name):
    mask = masks(name, ratio=0.01)
    assert mask.any(axis=1).all()
    assert not mask.all(axis=1).any()
    assert (masks(name) == masks(name)).all()
    assert (masks(name) != masks(name, seed=1)).any()


def test_sticky_blanks_cluster_random_ones_do_not_and_a_span_is_one_run():
    for name, want in (("random", 0.25), ("sticky", 0.75)):
        mask = masks(name)
        assert abs(mask.mean() - 0.25) < 0.02
        beside = (mask[:, 1:] & mask[:, :-1]).sum() / mask[:, :-1].sum()
        assert abs(beside - want) < 0.03  # P(hidden | the one before is hidden)
    mask = masks("span")
    assert (mask.sum(axis=1) == round(0.25 * len(LINE))).all()
    assert (np.diff(mask.astype(int), axis=1) == 1).sum(axis=1).max() == 1


def test_word_hides_whole_uncut_words_and_short_those_of_two_to_four_letters():
    text = "a cat purred on i the round mat by noon yes"
    inner = set(text.split()[1:-1])  # the window may have cut the others
    for name, want in (("word", inner), ("short", inner - {"purred", "i", "round"})):
        rng = np.random.default_rng(0)
        hidden = make_mask(np.array([[*text]] * 500), name, 0.1, 2, rng)
        found = set()
        for row in hidden:
            words = "".join(c for c, blank in zip(text, row) if blank or c == " ").split()
            assert len(words) == 2
            found |= set(words)
        assert found == want
    nothing_to_hide = np.array([[*"a i purred round sat"], ["x"] * 20])
    mask = make_mask(nothing_to_hide, "short", 0.1, 2, np.random.default_rng(0))
    assert (mask.sum(axis=1) == 1).all()


def test_prepared_text_comes_back(tmp_path):
    """The prepared text is what a loop over the paragraphs gives. Repeated ones are dropped."""
    (tmp_path / "in.txt").write_text(TEXT + "\n\n" + TEXT, encoding="utf-8")
    sizes = prepare(tmp_path / "d", tmp_path / "in.txt")
    assert {path.name for path in (tmp_path / "d").iterdir()} == {"train.bin", "val.bin"}
    for split in ("train", "val"):
        data = read_dataset(tmp_path / "d", split, 16)
        wanted = [p for p in TEXT.split("\n\n") if is_validation(normalise(p)) == (split == "val")]
        text = " ".join(normalise(p) for p in wanted)
        assert decode(data.text) == [text]
        assert len(text) == sizes[f"{split}.bin"]
    assert 0.04 < sizes["val.bin"] / len(TEXT) < 0.2


def prepare_default():
    """Make the default text: -> (train.bin, val.bin, what was printed)."""
    with TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as printed:
        prepare(folder)
        train, val = ((Path(folder) / f"{name}.bin").read_bytes() for name in ("train", "val"))
    return train, val, printed.getvalue()


default_text = early("default_text", prepare_default)


def test_the_default_text_is_the_one_that_the_shipped_models_learned(default_text):
    """The text is documentation of the pinned numpy and torch. No version of Python changes it.

    Nothing of 64 characters stands both in train.bin and in val.bin.
    """
    train, val, printed = default_text
    assert not printed
    begins = [hashlib.sha256(split).hexdigest()[:12] for split in (train, val)]
    assert begins == ["b1fad3dd8d50", "180a9319f990"]
    of_val = {val[i : i + 64] for i in range(len(val) - 63)}
    assert of_val.isdisjoint(train[i : i + 64] for i in range(len(train) - 63))


def test_val_loses_what_shares_40_characters_with_train(tmp_path):
    own, val = TEXT.split("\n\n"), tmp_path / "d" / "val.bin"
    (tmp_path / "in.txt").write_text(TEXT, encoding="utf-8")
    prepare(tmp_path / "d", tmp_path / "in.txt")
    whole = val.read_bytes()
    paragraph = next(p for p in own if is_validation(p))
    (tmp_path / "in.txt").write_text("\n\n".join([*own, f"a {paragraph[-40:]}"]), encoding="utf-8")
    assert not is_validation(f"a {paragraph[-40:]}")
    prepare(tmp_path / "e", tmp_path / "in.txt")
    left = (tmp_path / "e" / "val.bin").read_bytes()
    assert len(left) == len(whole) - len(paragraph) - 1


def test_letters_of_the_users_own_text(tmp_path, capsys):
    """What has a plain form is kept, apostrophes join, and a share that is lost is named."""
    assert (
        normalise("GROẞ groß Søren Łódź æon œuvre đak") == "gross gross soren lodz aeon oeuvre dak"
    )
    (tmp_path / "in.txt").write_text(TEXT.replace(" number", " don't"), encoding="utf-8")
    prepare(tmp_path / "d", tmp_path / "in.txt")
    data = read_dataset(tmp_path / "d", "train", 16)
    assert " dont " in decode(data.text)[0]
    assert not capsys.readouterr().out
    (tmp_path / "in.txt").write_text(TEXT + 100 * " мир", encoding="utf-8")
    prepare(tmp_path / "e", tmp_path / "in.txt")
    assert "3% of its letters are not a to z, and are left out" in capsys.readouterr().out


def test_the_dataset_of_another_text_is_not_replaced(tmp_path):
    (tmp_path / "in.txt").write_text(TEXT, encoding="utf-8")
    prepare(tmp_path / "d", tmp_path / "in.txt")
    prepare(tmp_path / "d", tmp_path / "in.txt")  # the same text again
    before = (tmp_path / "d" / "train.bin").read_bytes()
    (tmp_path / "in.txt").write_text(TEXT + "\n\nthe end", encoding="utf-8")
    with pytest.raises(Mistake, match="d/train.bin holds another text; remove it, or name"):
        prepare(tmp_path / "d", tmp_path / "in.txt")
    assert (tmp_path / "d" / "train.bin").read_bytes() == before


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("train.bin", "ab", "has 2 characters, fewer than block_size=8"),
        ("train.bin", 100 * "\x1b", "holds no text"),
        ("train.txt", "41+47=88\n417+471=888\n", "have .* need the same length"),
        ("train.txt", "4_+47=88\n", "has the characters '_'; use only"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_named(file, content, message, tmp_path):
    (tmp_path / file).write_text(content, encoding="utf-8")
    with pytest.raises(Mistake, match=f"{tmp_path}/{file} {message}"):
        read_dataset(tmp_path, "train", 8)


def test_prompts_of_any_length(world, tmp_path):
    """A prompt is normalised. All blanks between two spaces are one word, as in h_l_."""
    prompts = [" Café H_l_ m_!", "_", "sat — __ the m_t"]
    (tmp_path / "p.json").write_text(json.dumps({"prompts": prompts}), encoding="utf-8")
    data = read_prompts(tmp_path / "p.json", read_dataset(world / "text", "train", 16), 16)
    tokens, mask, words = data.batch(200, None, None, None, (0, 1))
    assert tokens.shape == mask.shape == words.shape == (200, 16)
    found = {}
    for row, numbers in zip(tokens.masked_fill(mask, MASK_ID), words.tolist()):
        found[decode(row[row != PAD])[0]] = [number for number in numbers if number]
    assert found == {"cafe h_l_ m_": [1, 1, 2], "_": [1], "sat __ the m_t": [1, 1, 2]}
    assert torch.equal(words > 0, mask) and not (mask & (tokens == PAD)).any()


def test_a_text_that_the_shipped_models_did_not_learn_is_named(tmp_path, capsys, monkeypatch):
    """It stands in for the documentation of another version of numpy."""
    monkeypatch.setattr(prepare_module, "documentation", lambda: 9 * [TEXT])
    monkeypatch.setattr(prepare_module, "is_prose", lambda _: True)
    prepare(tmp_path)
    assert "not the text that the shipped models learned" in capsys.readouterr().out
