import json
import re

import numpy as np
import pytest
import torch

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
    assert mask.any(axis=1).all() and not mask.all(axis=1).any()
    assert (masks(name) == masks(name)).all() and (masks(name) != masks(name, seed=1)).any()


@pytest.mark.parametrize("name", ["random", "span", "sticky"])
def test_the_share_of_hidden_characters(name):
    assert abs(masks(name).mean() - 0.25) < 0.02


def test_sticky_blanks_cluster_and_random_ones_do_not():
    def beside(mask):  # P(hidden | the one before is hidden)
        return (mask[:, 1:] & mask[:, :-1]).sum() / mask[:, :-1].sum()

    assert abs(beside(masks("random")) - 0.25) < 0.03 and abs(beside(masks("sticky")) - 0.75) < 0.03


def test_a_span_is_one_run():
    assert (np.diff(masks("span").astype(int), axis=1) == 1).sum(axis=1).max() == 1


def test_word_hides_whole_uncut_words():
    mask = masks("word", words=2)
    text = "the old cat sat on the mat and ran"
    for row in mask[:200]:
        runs = "".join("_" if m else c for c, m in zip(text, row)).split(" ")
        assert (
            all(set(run) == {"_"} or "_" not in run for run in runs)
            and sum("_" in run for run in runs) == 2
        )
        assert "_" not in runs[0] and "_" not in runs[-1]  # the window may have cut them
    assert not (mask & IS_SPACE).any()


def test_short_hides_words_of_up_to_four_letters():
    text = "a cat purred on the round mat by noon yes"
    is_space = np.array([[c == " " for c in text]] * 500)
    hidden = make_mask(is_space, {"short": 1.0}, 0.1, 2, np.random.default_rng(0))
    words = {
        "".join(c for c, blank in zip(text, row) if blank or c == " ").strip() for row in hidden
    }
    assert {word for pair in words for word in pair.split()} == {
        "cat",
        "on",
        "the",
        "mat",
        "by",
        "noon",
    } and all(len(pair.split()) == 2 for pair in words)
    none = make_mask(
        np.array([[c == " " for c in "a purred rounded sat"]]),
        {"short": 1.0},
        0.1,
        2,
        np.random.default_rng(0),
    )
    assert none.sum() == 1  # no short word: one character


def test_a_mix_uses_every_part():
    weights = parse_masking("span:3,word:1")
    assert weights == {"span": 0.75, "word": 0.25}
    mask = make_mask(IS_SPACE, weights, 0.25, 1, np.random.default_rng(0))
    assert 0.2 < 1 - (mask & IS_SPACE).any(axis=1).mean() < 0.6


def test_one_character_and_no_word_at_all():
    mask = make_mask(np.array([[True], [False]]), {"word": 1.0}, 0.1, 3, np.random.default_rng(0))
    assert mask.all()


@pytest.mark.parametrize(
    "alphabet, want", [("text8", "cafe s resume don t"), ("ascii", "Cafe's resume: don't")]
)
def test_normalise(alphabet, want):
    assert normalise("Café's  résumé: don't", alphabet) == want


def test_prepared_text_comes_back(tmp_path):
    (tmp_path / "in.txt").write_text(TEXT + "\n\n" + TEXT)  # duplicates are dropped
    meta = prepare(tmp_path / "d", tmp_path / "in.txt")
    assert sorted(p.name for p in (tmp_path / "d").iterdir()) == [
        "meta.json",
        "train.bin",
        "val.bin",
    ]
    train, val = Dataset(tmp_path / "d", "train"), Dataset(tmp_path / "d", "val")
    assert (
        len(train.tokens) == meta["train_characters"]
        and 0.04 < len(val.tokens) / (len(train.tokens) + len(val.tokens)) < 0.2
    )
    for split, wanted in ((train, False), (val, True)):
        assert split.decode(split.tokens) == " ".join(
            p
            for p in dict.fromkeys(normalise(p, "text8") for p in TEXT.split("\n\n"))
            if is_validation(p) == wanted
        )
    assert meta["paragraphs"] == len(TEXT.split("\n\n"))


def test_the_split_does_not_depend_on_the_rest_of_the_text(tmp_path):
    paragraphs = TEXT.split("\n\n")
    (tmp_path / "half.txt").write_text("\n\n".join(paragraphs[: len(paragraphs) // 2 * 2 : 2]))
    prepare(tmp_path / "half", tmp_path / "half.txt")
    (tmp_path / "all.txt").write_text(TEXT)
    prepare(tmp_path / "all", tmp_path / "all.txt")
    half, everything = Dataset(tmp_path / "half", "val"), Dataset(tmp_path / "all", "val")
    sentences = lambda data: set(re.findall("the [^_]*? number", data.decode(data.tokens)))  # noqa: E731
    assert sentences(half) <= sentences(everything) and not sentences(half) & sentences(
        Dataset(tmp_path / "all", "train")
    )


def test_prose():
    assert is_prose("The quick brown fox jumps over the lazy dog, and then it sleeps.")
    assert not is_prose(
        "x = f(y); z[3] = {1: 2}; return foo(bar) + baz[qux] * 3 != 4"
    ) and not is_prose("Too short.")


def test_batches_are_a_function_of_the_seed(world):
    data = Dataset(world / "text", "train")
    batch = lambda seed: data.batch(4, 16, {"random": 1.0}, 0.3, 1, seed)
    (a, m), (b, n), (c, _) = batch((1, 5)), batch((1, 5)), batch((1, 6))
    assert (a == b).all() and (m == n).all() and (a != c).any() and a.shape == m.shape == (4, 16)


def test_prompts_of_any_length(world, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({"prompts": ["th_ c_t", "_", "sat on the m_t"]}))
    data = Prompts(world / "text", "train", tmp_path / "p.json", 16)
    tokens, mask = data.batch(200, 16, None, None, None, (0, 1))
    assert (
        tokens.shape == mask.shape == (200, 16)
        and mask.any(dim=1).all()
        and ((tokens == PAD).sum(dim=1).unique() == torch.tensor([2, 9, 15])).all()
    )
    shown = {
        "".join("_" if m else "" if t == PAD else data.vocabulary[t] for t, m in zip(*rows))
        for rows in zip(tokens.tolist(), mask.tolist())
    }
    assert shown == {"th_ c_t", "_", "sat on the m_t"} and not (mask & (tokens == PAD)).any()
