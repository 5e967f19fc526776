"""Check the datasets, what is hidden in them, prompts, and what's refused with one line."""

import json

import numpy as np
import pytest
from conftest import contents, write_lines, write_text

from data import dataset
from data.dataset import make_if_missing, read_dataset, read_prompts, read_splits
from data.masking import MASKINGS, make_mask
from data.rules import SumRule, WordRule
from data.sums import prepare
from data.user_mistake import Mistake
from data.vocabulary import MASK_ID, PAD, decode

LINE = "the old cat sat on the mat and ran"
TEXTS = np.array([[*LINE]] * 2000)  # (B,T)
SUMS = np.array([[*"417+471=888"]] * 2000)  # (B,T)
CORRECT = ["41+47=88", "12+23=35", "10+20=30"]


def prompts(folder, train, *texts):
    """Read prompts: -> a dataset of them."""
    write_text(folder / "p.json", json.dumps({"prompts": texts}))
    return read_prompts(folder / "p.json", train, train.inputs.shape[1])


@pytest.fixture
def text(world):
    return read_dataset(world / "text" / "train.txt", 16)


# What is hidden.


def test_random_hides_single_characters_from_a_tenth_to_six_tenths():
    """Each input has a ratio of its own, uniform from .1 to .6."""
    texts = np.array([[*"ab"] * 1000] * 300)  # long, so that an input's ratio shows
    mask = make_mask(texts, "random", np.random.default_rng(0))
    ratios = mask.mean(axis=1)
    assert 0.05 < ratios.min() < 0.15 and 0.55 < ratios.max() < 0.65
    assert ratios.mean() == pytest.approx(0.35, abs=0.03)
    assert ratios.std() == pytest.approx(0.5 / 12**0.5, abs=0.015)


@pytest.mark.parametrize("name, most", [("word", 1), ("short", 1), ("words", 5), ("shorts", 5)])
def test_whole_uncut_words_are_hidden_and_short_ones_have_two_to_four_letters(name, most):
    text = "a cat purred on i the round mat by noon yes"
    want = set(text.split()[1:-1])  # the window may have cut the others
    if name.startswith("short"):
        want -= {"purred", "i", "round"}
    hidden = make_mask(np.array([[*text]] * 2000), name, np.random.default_rng(0))
    found, counts = set(), []
    for row in hidden:
        words = "".join(c for c, blank in zip(text, row) if blank or c == " ").split()
        counts.append(len(words))
        found |= set(words)
    assert found == want
    assert np.bincount(counts)[1:] == pytest.approx(np.full(most, 2000 / most), rel=0.2)


def test_an_input_with_nothing_to_hide_is_drawn_again(tmp_path):
    none, *some = ["a purred round", "on ant owls xx", "xxx aaa bbbbbb"]

    def hidden(masking, times):
        """List what 400 inputs look like, if `none` is there so many times."""
        folder = write_lines(tmp_path / f"{times}", [*times * [none], *some], ["the cat sat on"])
        tokens, mask = read_splits(folder, "val", 14)[0].batch(400, masking, (0, 1))
        return {*decode(tokens.masked_fill(mask, MASK_ID))}

    short = {"on ___ owls xx", "on ant ____ xx", "xxx ___ bbbbbb"}
    assert hidden("short", 9) == short
    assert hidden("word", 9) == short | {"a ______ round"}
    assert hidden("shorts", 9) == short | {"on ___ ____ xx"}


def test_maskings_are_mixed_by_weight(monkeypatch):
    for i, name in enumerate(("first", "second")):
        monkeypatch.setitem(MASKINGS, name, lambda row, rng, i=i: np.arange(len(row)) == i)
    mask = make_mask(TEXTS, "first:3,second", np.random.default_rng(0))
    assert mask[:, :2].mean(axis=0) == pytest.approx([0.75, 0.25], abs=0.05)
    assert (mask.sum(axis=1) == 1).all()


@pytest.mark.parametrize("name, n", [("columns", 3), ("digits", 6)])
def test_sums_hide_one_to_all_columns_or_digits_of_the_summands(name, n):
    mask = make_mask(SUMS, name, np.random.default_rng(0))
    first, second = mask[:, :3], mask[:, 4:7]
    assert mask.sum() == first.sum() + second.sum()
    hidden = np.hstack([first, second]) if name == "digits" else first
    assert (first == second).all() == (name == "columns")
    assert hidden.mean(axis=0) == pytest.approx(np.full(n, (n + 1) / 2 / n), rel=0.1)
    assert np.bincount(hidden.sum(axis=1))[1:] == pytest.approx(np.full(n, 2000 / n), rel=0.2)


# The three kinds of data, and which masking and rule each has.


def test_lines_have_the_rule_that_finds_all_of_them_good(tmp_path):
    for wrong in ("41+48=88", "1+10=111", "hello me"):
        folder = write_lines(tmp_path / "mixed", [*CORRECT[:2], wrong], [*CORRECT[2:], "ab cd ef"])
        assert [data.rule for data in read_splits(folder, "val", 8)] == [None, None]
    for data in read_splits(write_lines(tmp_path / "sums", CORRECT[:2], CORRECT[2:]), "val", 8):
        assert isinstance(data.rule, SumRule)


def test_empty_lines_are_dropped_and_a_line_of_another_length_is_named(tmp_path):
    """Such a file is no text, whose windows would run from one line into the next."""
    lines = ["abcdefgh", "", "hgfedcba", ""]
    train, _ = read_splits(write_lines(tmp_path / "d", lines, ["aaaabbbb", ""]), "val", 8)
    assert train.lines == decode(train.inputs) == ["abcdefgh", "hgfedcba"]
    folder = write_lines(tmp_path / "d", [*lines, "short", "bbbbaaaa"], ["aaaabbbb"])
    with pytest.raises(Mistake, match="train.txt has the line 'short', but most have block_size=8"):
        read_splits(folder, "val", 8)


@pytest.mark.parametrize(
    "lines, allowed, refused",
    [
        ([LINE], "random word short words shorts,random", "columns digits"),  # a text
        (CORRECT, "columns digits columns,digits random", "word short words shorts"),
    ],
)
def test_a_masking_that_finds_nothing_to_hide_is_refused(lines, allowed, refused, tmp_path):
    write_lines(tmp_path, lines, [])
    data = read_dataset(tmp_path / "train.txt", 8)
    for masking in allowed.split():
        assert data.batch(20, masking, (0, 1))[1].any(dim=1).all()
    for masking in refused.split():
        with pytest.raises(Mistake, match=f"^masking={masking} finds nothing to hide in .*; use"):
            data.batch(20, masking, (0, 1))


@pytest.mark.parametrize("content", ["", "41+47=88\n417+471=888\n", "4_+47=88\n", "Ab\tbc  d\n"])
def test_a_dataset_that_cannot_be_read_is_named(content, tmp_path):
    (tmp_path / "train.txt").write_bytes(content.encode("latin-1"))
    with pytest.raises(Mistake, match="train.txt .* block_size=8"):
        read_dataset(tmp_path / "train.txt", 8)


# A dataset is whole or absent, and each has two held-out halves.


def test_a_kill_between_the_files_leaves_no_dataset(tmp_path, monkeypatch):
    """Without train.txt there's none, and it's written last."""
    written = []
    monkeypatch.setattr(prepare, "write_whole", lambda path, content: written.append(path.name))
    prepare.prepare(tmp_path, 2)
    assert written == ["choose.txt", "val.txt", "train.txt"]


def test_what_ships_is_made_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("sums2", "mine"):
        make_if_missing(name)
    folder = tmp_path / "data"
    assert [path.name for path in folder.iterdir()] == ["sums2"]
    assert {*contents(folder / "sums2")} == {"train.txt", "choose.txt", "val.txt"}
    monkeypatch.setattr(dataset, "prepare_sums", None)  # now it's there
    make_if_missing("sums2")


def test_a_dataset_is_its_own_folder_whatever_its_name(tmp_path, monkeypatch):
    """`my_choose` isn't a half of `my`."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"my": "the old cat sat", "my_choose": "a big red hen ran"}.items():
        write_lines(tmp_path / "data" / name, [LINE], [text])
        write_text(tmp_path / "data" / name / "choose.txt", f"{text} to us")
        for half, want in {"val": text, "choose": f"{text} to us"}.items():
            assert read_splits(name, half, 8)[1].lines == [want]


# The text.


def test_a_text_keeps_its_words(tmp_path):
    write_text(tmp_path / "train.txt", "\ufeffDidn’t the 3 CAFÉS\n\n groß?")
    data = read_dataset(tmp_path / "train.txt", 19)
    assert data.lines == ["didnt the cafes gross"]
    assert decode(data.inputs) == [
        "didnt the cafes gro",
        "idnt the cafes gros",
        "dnt the cafes gross",
    ]


@pytest.mark.parametrize(
    "masked, good, bad",
    [
        ("th_ __ sat", "the hi sat|tho me sat", "thx hi sat|the a  sat"),
        ("a h_l_ on__ xy", "a half once xy|a help once xy", "a help onxx xy|a helf once xy"),
        ("_ at", "a at|i at", "s at|  at"),
    ],
)
def test_a_completion_of_a_text_is_good_if_its_words_are(masked, good, bad):
    """All words with a blank count, and no others. One letter is a word if it's a or i."""
    rule = WordRule("the tho hi me help half once a i s")
    assert all(rule.is_good(text, masked) for text in good.split("|"))
    assert not any(rule.is_good(text, masked) for text in bad.split("|"))
    assert rule.answers(masked) is None


# Prompts.


def test_prompts_may_have_any_length_and_keep_their_own_blanks(text, tmp_path):
    data = prompts(tmp_path, text, "_", "cafe h_l_ m_", "sat __ the m_t")
    tokens, mask = data.batch(200, "short", (0, 1))
    assert tokens.shape == mask.shape == (200, 16) and not (mask & (tokens == PAD)).any()
    masked = tokens.masked_fill(mask, MASK_ID)
    assert {*decode(masked)} == {"_", "cafe h_l_ m_", "sat __ the m_t"}
    assert data.rule is text.rule
