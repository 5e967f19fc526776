"""Check the datasets, what is hidden in them, prompts, and what's refused with one line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from data import files
from data.dataset import (
    make_if_missing,
    read_dataset,
    read_prompts,
    read_splits,
)
from data.masking import MASKINGS, make_mask
from data.per_word import begins_word
from data.rules import SumRule, WordRule, check_gaps, pick_rule
from data.sums.prepare import prepare
from data.user_mistake import Mistake
from data.vocabulary import MASK_ID, PAD, decode, encode, normalize

ROOT = Path(__file__).parents[2]
LINE = "the old cat sat on the mat and ran"
TEXTS = np.array([[*LINE]] * 2000)  # (B,T)
SUMS = np.array([[*"417+471=888"]] * 2000)  # (B,T)
CORRECT = ["41+47=88", "12+23=35", "10+20=30"]


def write_lines(folder, train, val):
    """Write a dataset of lines: -> its folder, as a text."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in (("train", train), ("val", val)):
        (folder / f"{split}.txt").write_text("\n".join(lines), encoding="utf-8")
    return str(folder)


def prompts(folder, train, *texts, **more):
    """Read prompts: -> a dataset of them."""
    (folder / "p.json").write_text(json.dumps({"prompts": texts, **more}), encoding="utf-8")
    return read_prompts(folder / "p.json", train, train.inputs.shape[1])


@pytest.fixture
def text(world):
    return read_dataset(world / "text" / "train.txt", 16)


@pytest.fixture
def sums(tmp_path):
    return read_splits(write_lines(tmp_path / "some", CORRECT[:2], CORRECT[2:]), 8)[0]


# What is hidden.


def test_random_hides_single_characters_from_a_tenth_to_six_tenths():
    """Each input has a ratio of its own, uniform from .1 to .6, and no blank knows of another."""
    texts = np.array([[*"ab"] * 1000] * 300)  # long, so that an input's ratio shows
    mask = make_mask(texts, "random", np.random.default_rng(0))
    ratios = mask.mean(axis=1)
    assert 0.05 < ratios.min() < 0.15 and 0.55 < ratios.max() < 0.65
    assert ratios.mean() == pytest.approx(0.35, abs=0.03)
    assert ratios.std() == pytest.approx(0.5 / 12**0.5, abs=0.015)
    pairs = (mask[:, 1:] & mask[:, :-1]).mean(axis=1)
    assert abs(pairs - ratios**2).max() < 0.05


def test_word_hides_one_to_five_whole_uncut_words_and_short_those_of_two_to_four_letters():
    text = "a cat purred on i the round mat by noon yes"
    inner = set(text.split()[1:-1])  # the window may have cut the others
    for name, want in (("word", inner), ("short", inner - {"purred", "i", "round"})):
        hidden = make_mask(np.array([[*text]] * 2000), name, np.random.default_rng(0))
        found, counts = set(), []
        for row in hidden:
            words = "".join(c for c, blank in zip(text, row) if blank or c == " ").split()
            counts.append(len(words))
            found |= set(words)
        assert found == want
        assert np.bincount(counts)[1:] == pytest.approx(np.full(5, 400), rel=0.2)
    nothing_to_hide = np.array([[*"a i purred round sat"], ["x"] * 20])
    mask = make_mask(nothing_to_hide, "short", np.random.default_rng(0))
    assert (mask.sum(axis=1) == 1).all()


def test_maskings_are_mixed_by_weight(monkeypatch):
    for i, name in enumerate(("first", "second")):
        monkeypatch.setitem(MASKINGS, name, lambda row, rng, i=i: np.arange(len(row)) == i)
    mask = make_mask(TEXTS, "first:3,second", np.random.default_rng(0))
    assert mask[:, :2].mean(axis=0) == pytest.approx([0.75, 0.25], abs=0.05)
    assert (mask.sum(axis=1) == 1).all()


@pytest.mark.parametrize("name, groups", [("columns", [[0, 4], [1, 5], [2, 6]]), ("digits", None)])
def test_sums_draw_a_choice_of_masking_and_then_a_permutation_and_a_number(name, groups):
    """So a seed goes on hiding the same blanks."""
    groups = groups or [[0], [1], [2], [4], [5], [6]]
    rng, again = np.random.default_rng(3), np.random.default_rng(3)
    mask = make_mask(SUMS[:50], name, rng)
    again.random(50)  # which masking each input gets
    for row in mask:
        order = again.permutation(len(groups))[: again.integers(1, len(groups) + 1)]
        assert {*np.flatnonzero(row)} == {t for i in order for t in groups[i]}
    assert rng.random() == again.random()


# The three kinds of data, and which masking and rule each has.


def test_lines_are_sums_only_if_all_of_them_are_right(tmp_path):
    for wrong in ("41+48=88", "1+10=111", "hello me"):
        folder = write_lines(tmp_path / "mixed", [*CORRECT[:2], wrong], [*CORRECT[2:], "ab cd ef"])
        train, _ = read_splits(folder, 8)
        assert train.kind == "lines" and pick_rule(train) is None
    train, val = read_splits(write_lines(tmp_path / "sums", CORRECT[:2], CORRECT[2:]), 8)
    assert train.kind == val.kind == "sums" and isinstance(pick_rule(train), SumRule)


def test_splits_of_different_kinds_are_refused(tmp_path):
    """Otherwise val would be checked for the masking, and train would crash on it."""
    folder = write_lines(tmp_path / "d", [*CORRECT[:2], "hello me"], CORRECT[2:])
    with pytest.raises(
        Mistake, match="train is lines that aren't all correct sums, but val is sums"
    ):
        read_splits(folder, 8)


def test_empty_lines_are_dropped_and_a_line_of_another_length_is_named(tmp_path):
    """Such a file is no text, whose windows would run from one line into the next."""
    lines = ["abcdefgh", "", "hgfedcba", ""]
    train, _ = read_splits(write_lines(tmp_path / "d", lines, ["aaaabbbb", ""]), 8)
    assert train.kind == "lines" and train.lines == ["abcdefgh", "hgfedcba"]
    folder = write_lines(tmp_path / "d", [*lines, "short", "bbbbaaaa"], ["aaaabbbb"])
    with pytest.raises(Mistake, match="train.txt has the line 'short', but most have block_size=8"):
        read_splits(folder, 8)


def test_a_text_has_the_rule_of_its_own_words(text):
    rule = pick_rule(text)
    assert isinstance(rule, WordRule) and "cat" in rule.lexicon
    assert rule.cut and not pick_rule(text, cut=False).cut


@pytest.mark.parametrize(
    "kind, allowed, refused",
    [
        ("text", "random word short word:0.5,random:0.5", "columns digits word:0.9,digits:0.1"),
        ("sums", "columns digits columns,digits", "random word short columns,random"),
        ("lines", "random word short", "columns digits"),
        ("letters", "random", "word short columns digits"),
    ],
)
def test_a_masking_that_makes_no_sense_is_refused(kind, allowed, refused, text, sums, tmp_path):
    lines = ["he has 1", "she is 2"] if kind == "lines" else ["abcdefgh", "hgfedcba"]
    train, _ = read_splits(write_lines(tmp_path / "lines", lines, ["ab ef hi"]), 8)
    data = {"text": text, "sums": sums}.get(kind, train)
    for masking in allowed.split():
        data.check_masking(masking)
        assert data.batch(20, masking, (0, 1))[1].any(dim=1).all()
    for masking in refused.split():
        with pytest.raises(Mistake) as error:
            data.check_masking(masking)
        line = str(error.value)
        assert line.startswith(f"masking={masking} ") and "\n" not in line
        data.check_masking(re.search(r"for example --masking=(\w+)$", line)[1])


def test_lines_that_are_all_trained_on_are_not_held_out(tmp_path):
    val = [CORRECT[2], CORRECT[0], CORRECT[2]]
    with pytest.raises(Mistake, match="all of val is in train, so nothing is held out"):
        read_splits(write_lines(tmp_path / "d", CORRECT, val), 8)
    read_splits(write_lines(tmp_path / "d", CORRECT, [*val, "10+11=21"]), 8)  # one line is enough


def test_a_text_that_is_trained_on_is_not_held_out(tmp_path):
    folder = write_lines(tmp_path / "d", ["the old cat", "sat on the mat"], ["the old cat sat"])
    read_splits(folder, 12)
    (tmp_path / "d" / "val.txt").write_text("the old\ncat sat on the mat\n", encoding="utf-8")
    with pytest.raises(Mistake, match="all of val is in train"):
        read_splits(folder, 12)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "isn't lines of block_size=8 characters each .the first has 0., .* only 0 letters"),
        ("41+47=88\n417+471=888\n", "isn't lines of block_size=8 "),
        ("Всё это не по-английски, and this is", "isn't lines of block_size=8 "),
        ("4_+47=88\n", "has the characters '_'; use only ' abc"),
        ("Ab\tbc  d\n", r"has the characters '\\tA'; use only"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_named(content, message, tmp_path):
    file = tmp_path / "train.txt"
    with pytest.raises(Mistake, match="there is no .*train.txt; a dataset is a folder with"):
        read_dataset(file, 8)
    file.write_text(content, encoding="utf-8")
    with pytest.raises(Mistake, match=f"{file} {message}"):
        read_dataset(file, 8)


# A dataset is whole or absent.

KILL = """
import os, signal, sys
from data import files
from data.sums.prepare import prepare

replace, left = os.replace, {n}

def replace_or_die(*paths):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*paths)

os.replace = replace_or_die
prepare(sys.argv[1], 2, "report")
"""


@pytest.mark.parametrize("n", [0, 1])
def test_a_kill_between_the_files_leaves_none_and_the_next_run_makes_both(n, tmp_path):
    out, whole = tmp_path / "d", tmp_path / "whole"
    command = [sys.executable, "-c", KILL.format(n=n), str(out)]
    assert subprocess.run(command, cwd=ROOT).returncode < 0
    assert [path.name for path in out.iterdir() if path.suffix != ".tmp"] == ["val.txt"][:n]
    for folder in (out, whole):
        prepare(folder, 2, "report")
    for path in whole.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes()


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Work in a folder that has no dataset, with a project that has none: -> the folder."""
    monkeypatch.setattr(files, "PROJECT", tmp_path / "project")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data" / "sums2"


@pytest.mark.parametrize("missing", ["train.txt", "val.txt"])
def test_what_ships_is_made_again_if_a_part_is_missing(missing, elsewhere):
    make_if_missing("sums2")
    whole = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    assert {*whole} == {"train.txt", "val.txt"}
    os.replace(elsewhere / missing, elsewhere / f"{missing}.1234.tmp")  # a kill leaves this
    make_if_missing("sums2")
    assert all((elsewhere / name).read_bytes() == whole[name] for name in whole)
    before = [path.stat().st_mtime_ns for path in elsewhere.iterdir()]
    make_if_missing("sums2")  # all is there
    assert [path.stat().st_mtime_ns for path in elsewhere.iterdir()] == before
    make_if_missing("mine")  # does not ship
    assert not (elsewhere.parent / "mine").exists()


# The text.


def test_a_text_keeps_its_words(tmp_path):
    (tmp_path / "train.txt").write_text("\ufeffDidn’t the 3 cats\n\n sit?", encoding="utf-8")
    data = read_dataset(tmp_path / "train.txt", 16)
    assert data.lines == ["didnt the cats sit"] and data.kind == "text"
    assert decode(data.inputs) == ["didnt the cats s", "idnt the cats si", "dnt the cats sit"]


def slow_gaps(rule, completions, tokens, mask):
    """List (input, completion, first blank) of each gap that's filled well, and of all gaps."""
    good, gaps = [], []
    for i, original in enumerate(decode(tokens)):
        for word in re.finditer("[a-z]+", original):
            start, end = word.span()
            blanks = [t for t in range(start, end) if mask[i, t]]
            if not blanks or rule.cut and (start == 0 or end == len(original)):
                continue
            gaps.append([i, blanks[0]])
            for j, text in enumerate(decode(completions[i])):
                whole = not f" {text} "[start].isalpha() and not f" {text} "[end + 1].isalpha()
                if whole and text[start:end] in rule.lexicon:
                    good.append([i, j, blanks[0]])
    return good, gaps


@pytest.mark.parametrize("cut", [True, False])
def test_gaps_are_those_of_a_loop_over_words(cut):
    """Any character may be hidden, a space too."""
    g = torch.Generator().manual_seed(0)
    rule = WordRule("ab ba bab abba", cut)
    tokens = encode(" ab")[torch.randint(3, (60, 9), generator=g)]  # (B,T)
    mask = torch.rand(60, 9, generator=g) < 0.3  # (B,T)
    drawn = encode(" ab")[torch.randint(3, (60, 8, 9), generator=g)]  # (B,G,T)
    completions = torch.where(mask[:, None], drawn, tokens[:, None])  # (B,G,T)
    good, gaps = check_gaps(rule, completions, tokens, mask)
    have = good.nonzero().tolist(), begins_word(gaps).nonzero().tolist()
    want = slow_gaps(rule, completions, tokens, mask)
    assert have == tuple(map(sorted, want)) and all(map(len, want))


def test_the_text_that_ships_is_whole():
    train, val = read_splits(str(ROOT / "data" / "text"), 64)
    assert train.kind == val.kind == "text"
    assert (len(train.lines[0]), len(val.lines[0])) == (1986879, 96981)


@pytest.mark.parametrize(
    "written, read",
    [
        ("GROẞ groß Ærø, cafés", "gross gross r cafes"),
        ("didn’t didn't", "didnt didnt"),
        ("it 'is'  so\n", "it is so"),
        ("a_b 12c", "a b c"),
    ],
)
def test_what_has_a_plain_form_is_kept_and_apostrophes_join(written, read):
    assert normalize(written) == read


# Prompts.


def test_prompts_may_have_any_length(text, tmp_path):
    """All blanks between two spaces are one word, as in h_l_."""
    data = prompts(tmp_path, text, "_", "cafe h_l_ m_", "sat __ the m_t")
    tokens, mask, words = data.batch(200, "short", (0, 1))
    assert tokens.shape == mask.shape == words.shape == (200, 16)
    found = {}
    for row, numbers in zip(tokens.masked_fill(mask, MASK_ID), words.tolist()):
        found[decode(row[row != PAD])[0]] = [number for number in numbers if number]
    assert found == {"cafe h_l_ m_": [1, 1, 2], "_": [1], "sat __ the m_t": [1, 1, 2]}
    assert torch.equal(words > 0, mask) and not (mask & (tokens == PAD)).any()


@pytest.mark.parametrize(
    "prompt, message",
    [
        ("__+__=46", r"has '\+'; this model only knows ' abc"),
        ("the cat", "has no blank; write _"),
        ("the cat sat on the m_t", "has 22 characters, more than 16; shorten it"),
    ],
)
def test_a_prompt_that_the_model_cannot_read_is_refused(prompt, message, text, tmp_path):
    with pytest.raises(Mistake, match=f"prompt 1 .*{message}"):
        prompts(tmp_path, text, "th_", prompt)


def test_a_key_that_nothing_reads_is_refused(text, tmp_path):
    with pytest.raises(Mistake, match="and nothing else$"):
        prompts(tmp_path, text, "th_", masking="word")
    for content in ("[]", "3", '"prompts"', "{}", '{"prompts": []}', '{"prompts": [3]}', "{"):
        (tmp_path / "p.json").write_text(content, encoding="utf-8")
        with pytest.raises(Mistake, match="and nothing else$|can't be read as JSON .*; fix it"):
            read_prompts(tmp_path / "p.json", text, 16)


def test_lines_that_are_not_utf_8_are_one_line(tmp_path):
    (tmp_path / "train.txt").write_bytes(b"caf\xe9")
    with pytest.raises(Mistake, match="train.txt isn't UTF-8"):
        read_dataset(tmp_path / "train.txt", 4)
