"""Check the sums: the rule, and what is held out and hidden.

Each is compared with a loop over all possible answers.
"""

from collections import Counter
from itertools import product

import pytest
import torch

from data.sums.prepare import draw_sums, prepare, split_results
from data.sums.rule import correct_answers, is_correct
from data.vocabulary import MASK_ID, encode
from model.transformer import IMPOSSIBLE, TransformerConfig, make_generator


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make the sums of two digits."""
    folder = tmp_path_factory.mktemp("sums")
    prepare(folder, 2)
    return folder


def test_the_rule():
    assert is_correct("41+47=88") and is_correct("417+471=888")
    wrong = "41+48=88 01+87=88 9+79=88 41+47=088 a1+47=88 4_+47=88 60+60=120 41+47 41+47=88+ _"
    assert not any(map(is_correct, wrong.split()))


def filled(masked):
    """List all ways to put digits into the blanks of a sum."""
    pieces = masked.split("_")
    for digits in product("0123456789", repeat=len(pieces) - 1):
        yield "".join(a + b for a, b in zip(pieces, [*digits, ""]))


def holds(text):
    """Tell whether a sum of two digits is correct, by its places."""
    a, b, c = int(text[:2]), int(text[3:5]), int(text[6:])
    return a + b == c and a >= 10 and b >= 10


@pytest.mark.parametrize("masked", ["4_+4_=88", "_1+_7=88", "__+__=88", "__+__=20", "9_+9_=11"])
def test_right_answers_are_those_of_a_loop_over_all_digits(masked):
    want = sorted(text for text in filled(masked) if holds(text))
    assert sorted(correct_answers(masked)) == want
    assert all(is_correct(text) == holds(text) for text in filled(masked))


@pytest.mark.parametrize("digits", [2, 3])
def test_no_held_out_result_is_trained_on_and_every_last_digit_is_everywhere(digits):
    split = split_results(digits)
    everything = split["train"] + split["choose"] + split["report"]
    least = 10 ** (digits - 1)
    assert sorted(everything) == [*range(2 * least, 10 * least)]  # so no result is in two parts
    for half in ("choose", "report"):
        assert len(set(Counter(c % 10 for c in split[half]).values())) == 1
        assert {c % 10 for c in split[half]} == {c % 10 for c in split["train"]} == {*range(10)}


def test_the_files_hold_right_sums_of_their_own_results(folder):
    split = split_results(2)
    for name, part in (("train", "train"), ("choose", "choose"), ("val", "report")):
        lines = (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        assert all(map(is_correct, lines[:1000]))
        assert {int(line[-2:]) for line in lines} == {*split[part]}


def test_a_result_is_uniform_and_so_is_its_first_summand():
    lines = draw_sums([20, 23], 2, 4000, seed=3)
    counts = Counter(lines)
    assert counts["10+10=20"] == pytest.approx(2000, rel=0.1)
    want = {f"{a}+{23 - a}=23" for a in range(10, 14)}
    assert {*counts} - {"10+10=20"} == want
    assert all(counts[text] == pytest.approx(500, rel=0.2) for text in want)


def test_the_blank_is_never_drawn():
    network = make_generator(TransformerConfig(40, 8, 1, 1, 8))
    masked = encode("4_+4_=88")[None]  # (1,T)
    before, blank, behind = network(masked).split([MASK_ID, 1, 39 - MASK_ID], dim=-1)
    assert (blank == IMPOSSIBLE).all()
    of_letters = network.head(network.trunk(masked, None))  # (1,T,V-1)
    torch.testing.assert_close(torch.cat([before, behind], dim=-1), of_letters)
