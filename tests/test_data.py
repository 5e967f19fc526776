import json
import os
import re

import numpy as np
import pytest

from data.char_diffusion import prepare as script
from data.char_diffusion.prepare import is_prose, is_validation, normalise, prepare
from data.dataset import PAD, Dataset, Prompts
from data.masking import MASKINGS, make_mask, parse_masking
from tests.conftest import TEXT

IS_SPACE = np.array([[c == " " for c in "the old cat sat on the mat and ran"]] * 2000)


def masks(name, ratio=0.25, words=2, seed=0):
    return make_mask(IS_SPACE, {name: 1.0}, ratio, words, np.random.default_rng(seed))


@pytest.mark.parametrize("name", MASKINGS)
def test_every_row_has_a_blank_and_the_seed_decides(name):
    mask = masks(name, ratio=0.01)
    assert mask.any(axis=1).all()
    assert not mask.all(axis=1).any()
    assert (masks(name) == masks(name)).all()
    assert (masks(name) != masks(name, seed=1)).any()


@pytest.mark.parametrize("name", ["random", "span", "sticky"])
def test_the_share_of_hidden_characters(name):
    assert abs(masks(name).mean() - 0.25) < 0.02


def test_sticky_blanks_cluster_and_random_ones_do_not():
    def beside(mask):  # P(hidden | the one before is hidden)
        return (mask[:, 1:] & mask[:, :-1]).sum() / mask[:, :-1].sum()

    assert abs(beside(masks("random")) - 0.25) < 0.03
    assert abs(beside(masks("sticky")) - 0.75) < 0.03


def test_a_span_is_one_run():
    assert (np.diff(masks("span").astype(int), axis=1) == 1).sum(axis=1).max() == 1


def test_word_hides_whole_uncut_words():
    mask = masks("word", words=2)
    text = "the old cat sat on the mat and ran"
    for row in mask[:200]:
        runs = "".join("_" if m else c for c, m in zip(text, row)).split(" ")
        hidden = [run for run in runs if "_" in run]
        assert len(hidden) == 2
        assert set("".join(hidden)) == {"_"}
        assert runs[0] == "the" and runs[-1] == "ran"  # the window may have cut them
    assert not (mask & IS_SPACE).any()


def test_short_hides_words_of_up_to_four_letters():
    text = "a cat purred on the round mat by noon yes"
    is_space = np.array([[c == " " for c in text]] * 500)
    hidden = make_mask(is_space, {"short": 1.0}, 0.1, 2, np.random.default_rng(0))
    found = set()
    for row in hidden:
        words = "".join(c for c, blank in zip(text, row) if blank or c == " ").split()
        assert len(words) == 2
        found |= set(words)
    assert found == {"cat", "on", "the", "mat", "by", "noon"}


def test_no_short_word_at_all_hides_one_character():
    is_space = np.array([[c == " " for c in "a purred rounded sat"]])
    mask = make_mask(is_space, {"short": 1.0}, 0.1, 2, np.random.default_rng(0))
    assert mask.sum() == 1


def test_a_mix_uses_every_part():
    weights = parse_masking("span:3,word:1")
    assert weights == {"span": 0.75, "word": 0.25}
    mask = make_mask(IS_SPACE, weights, 0.25, 1, np.random.default_rng(0))
    assert 0.2 < 1 - (mask & IS_SPACE).any(axis=1).mean() < 0.6


@pytest.mark.parametrize("text", ["word:0", "word:1e308,random:1e308", "word:nan", "word,word"])
def test_weights_that_are_no_shares(text):
    with pytest.raises(ValueError, match="masking=.*(allowed|write for example)"):
        parse_masking(text)


def test_one_character_and_no_word_at_all():
    mask = make_mask(np.array([[True], [False]]), {"word": 1.0}, 0.1, 3, np.random.default_rng(0))
    assert mask.all()


@pytest.mark.parametrize(
    "alphabet, want", [("text8", "cafe s resume don t"), ("ascii", "Cafe's resume: don't")]
)
def test_normalise(alphabet, want):
    assert normalise("Café's  résumé: don't", alphabet) == want


def paragraphs_of(text, validation):
    """The normalised paragraphs of a split, without duplicates, in order."""
    paragraphs = dict.fromkeys(normalise(p, "text8") for p in text.split("\n\n"))
    return [p for p in paragraphs if is_validation(p) == validation]


def test_prepared_text_comes_back(tmp_path):
    (tmp_path / "in.txt").write_text(TEXT + "\n\n" + TEXT)  # duplicates are dropped
    meta = prepare(tmp_path / "d", tmp_path / "in.txt")
    assert sorted(os.listdir(tmp_path / "d")) == ["meta.json", "train.bin", "val.bin"]
    train = Dataset(tmp_path / "d", "train")
    val = Dataset(tmp_path / "d", "val")
    assert len(train.tokens) == meta["train_characters"]
    assert 0.04 < len(val.tokens) / (len(train.tokens) + len(val.tokens)) < 0.2
    assert train.decode(train.tokens) == " ".join(paragraphs_of(TEXT, validation=False))
    assert val.decode(val.tokens) == " ".join(paragraphs_of(TEXT, validation=True))
    assert meta["paragraphs"] == len(TEXT.split("\n\n"))


def test_the_split_does_not_depend_on_the_rest_of_the_text(tmp_path):
    def sentences(name, split):
        data = Dataset(tmp_path / name, split)
        return set(re.findall("the [^_]*? number", data.decode(data.tokens)))

    paragraphs = TEXT.split("\n\n")
    for name, part in (("half", paragraphs[::2]), ("all", paragraphs)):
        (tmp_path / "in.txt").write_text("\n\n".join(part))
        prepare(tmp_path / name, tmp_path / "in.txt")
    half = sentences("half", "val")
    assert half <= sentences("all", "val")
    assert not half & sentences("all", "train")


@pytest.mark.parametrize("arguments", (["--input=in.txt"], ["--alphabet=ascii"]))
def test_another_text_does_not_replace_the_default_one(arguments, monkeypatch, capsys):
    monkeypatch.setattr(script, "prepare", lambda *_: pytest.fail("it was prepared"))
    with pytest.raises(SystemExit, match="2"):
        script.main(arguments)
    told = capsys.readouterr().err
    assert "would replace the default one" in told and "--out_dir=data/mine" in told


def test_ctrl_c_ends_prepare_in_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "prepare", interrupted)
    with pytest.raises(SystemExit, match="130"):
        script.main(["--input=in.txt", "--out_dir=out"])
    assert capsys.readouterr().err == "prepare.py: stopped before its end; run it again\n"


def test_prepared_files_are_on_the_disk(tmp_path, monkeypatch):
    """Three files and their folder are synced; where that fails, the old files are still there."""
    (tmp_path / "in.txt").write_text(TEXT)
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(fsync(handle)))
    prepare(tmp_path / "d", tmp_path / "in.txt")
    assert len(synced) == 4
    before = {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()}

    def full(handle):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "in.txt").write_text(TEXT[: len(TEXT) // 2 * 2].replace("cat", "cub"))
    with pytest.raises(OSError):
        prepare(tmp_path / "d", tmp_path / "in.txt")
    assert {path.name: path.read_bytes() for path in (tmp_path / "d").iterdir()} == before


def test_the_advice_on_a_missing_dataset_names_your_own_text(tmp_path):
    with pytest.raises(ValueError, match="prepare.py --out_dir=.* --input=FILE"):
        Dataset(tmp_path / "none", "train")


def test_prose():
    assert is_prose("The quick brown fox jumps over the lazy dog, and then it sleeps.")
    assert not is_prose("x = f(y); z[3] = {1: 2}; return foo(bar) + baz[qux] * 3 != 4")
    assert not is_prose("Too short.")


def test_batches_are_a_function_of_the_seed(world):
    data = Dataset(world / "text", "train")

    def batch(seed):
        return data.batch(4, 16, {"random": 1.0}, 0.3, 1, seed)

    tokens, mask = batch((1, 5))
    again, same_mask = batch((1, 5))
    others, _ = batch((1, 6))
    assert (tokens == again).all() and (mask == same_mask).all()
    assert (tokens != others).any()
    assert tokens.shape == mask.shape == (4, 16)


def test_prompts_of_any_length(world, tmp_path):
    prompts = ["th_ c_t", "_", "sat on the m_t"]
    (tmp_path / "p.json").write_text(json.dumps({"prompts": prompts}))
    data = Prompts(world / "text", "train", tmp_path / "p.json", 16)
    tokens, mask = data.batch(200, 16, None, None, None, (0, 1))
    assert tokens.shape == mask.shape == (200, 16)
    assert mask.any(dim=1).all()
    assert set((tokens == PAD).sum(dim=1).tolist()) == {2, 9, 15}
    assert not (mask & (tokens == PAD)).any()
    masked = tokens.masked_fill(mask, data.mask_id)
    shown = {data.decode(row[row != PAD]) for row in masked}
    assert shown == set(prompts)
    assert not data.cuts_words and Dataset(world / "text", "train").cuts_words
