"""Check the exact figures against loops over all completions. Shapes: N inputs, T characters."""

import math
from collections import Counter
from itertools import product

import pytest
import torch
from conftest import BLANK, encode, numbers

from data.sums.rule import correct_answers, is_correct
from grpo.evaluation import exact
from grpo.policy import Product
from grpo.run.config import Config

MASKED = ["4_+4_=88", "_1+_7=88", "__+__=35"]


def answers_of(masked):
    """Try all digits in the blanks of a sum."""
    pieces = masked.split("_")
    digits = product("0123456789", repeat=len(pieces) - 1)
    texts = ("".join(map("".join, zip(pieces, (*each, "")))) for each in digits)
    return [text for text in texts if is_correct(text)]


def blanks_of(masked):
    return [t for t, c in enumerate(masked) if c == "_"]


def test_exact_figures_are_those_of_a_loop_over_all_completions():
    masked = encode(*MASKED)
    logits = 2 * numbers(0, *masked.shape, 40).index_fill(-1, torch.arange(28), -1e9)  # digits
    q = Product(logits, masked, masked == BLANK, Config(temperature=0.8))
    p = (logits / 0.8).softmax(dim=-1)  # (N,T,V)
    want = Counter()
    for row, text in zip(p, MASKED):
        chances = []
        for y in encode(*answers_of(text)):
            chances.append(math.prod(row[t, y[t]].item() for t in blanks_of(text)))
        want.update({"correct": sum(chances) / 3})
        want.update({"different_correct": sum(1 - (1 - x) ** 16 for x in chances) / 3})
        want.update({f"pass@{k}": (1 - (1 - sum(chances)) ** k) / 3 for k in (16, 1024)})
    answers = [correct_answers(text) for text in MASKED]
    have = exact.figures(exact.probabilities(q, answers), q.mask)
    assert {name: have[name] for name in want} == pytest.approx(want, rel=1e-5)
    assert (2 * have["2 blanks"] + have["4 blanks"]) / 3 == pytest.approx(have["correct"])


def test_perfect_blanks_have_the_marginals_of_the_answers():
    answers = [*map(answers_of, MASKED)]
    for text, texts, q in zip(MASKED, answers, exact.marginals(answers, encode(*MASKED) == BLANK)):
        columns = [*zip(*texts)]
        for y, chance in zip(texts, q.tolist()):
            shares = [columns[t].count(y[t]) / len(texts) for t in blanks_of(text)]
            assert chance == pytest.approx(math.prod(shares))
