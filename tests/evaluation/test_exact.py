"""Check the exact figures against loops over all completions. Shapes: N inputs, T characters."""

from itertools import product

import numpy as np
import pytest
from conftest import BLANK, encode, make_batch, numbers

from data.rules import SumRule
from data.sums.rule import correct_answers, is_correct
from data.user_mistake import Mistake
from data.vocabulary import VOCABULARY
from grpo.evaluation import exact
from grpo.policy import Product
from grpo.run.config import Config
from grpo.run.load import HeldOut

MASKED = ["4_+4_=88", "_1+_7=88", "__+__=35"]
V = len(VOCABULARY)


def filled(masked):
    """List all ways to fill a sum's blanks with digits."""
    pieces = masked.split("_")
    for digits in product("0123456789", repeat=len(pieces) - 1):
        yield "".join(a + b for a, b in zip(pieces, (*digits, "")))


def distribution():
    """Make a random distribution over the digits of each blank."""
    masked = encode(*MASKED)
    logits = numbers(0, *masked.shape, V)
    logits[..., [c for c in range(V) if not VOCABULARY[c].isdigit()]] = -1e9
    return Product(2 * logits, masked, masked == BLANK, Config(temperature=0.8))


def test_exact_figures_are_those_of_a_loop_over_all_completions():
    q = distribution()
    p = (q.logits / 0.8).softmax(dim=-1)  # (N,T,V)
    want = {"correct": 0.0, "different_correct": 0.0, "pass@16": 0.0, "pass@1024": 0.0}
    for i, masked in enumerate(MASKED):
        chances = []
        for text in filter(is_correct, filled(masked)):
            blanks = [t for t, c in enumerate(masked) if c == "_"]
            chances.append(np.prod([p[i, t, VOCABULARY.index(text[t])].item() for t in blanks]))
        want["correct"] += sum(chances) / 3
        want["different_correct"] += sum(1 - (1 - x) ** 16 for x in chances) / 3
        for k in (16, 1024):
            want[f"pass@{k}"] += (1 - (1 - sum(chances)) ** k) / 3
    answers = [correct_answers(masked) for masked in MASKED]
    have = exact.figures(exact.probabilities(q, answers), q.mask)
    assert {name: have[name] for name in want} == pytest.approx(want, rel=1e-5)
    assert (2 * have["2 blanks"] + have["4 blanks"]) / 3 == pytest.approx(have["correct"])


def test_perfect_blanks_have_the_marginals_of_the_answers():
    answers = [[text for text in filled(masked) if is_correct(text)] for masked in MASKED]
    for i, q in enumerate(exact.marginals(answers, encode(*MASKED) == BLANK)):
        for text, chance in zip(answers[i], q.tolist()):
            shares = [
                sum(other[t] == text[t] for other in answers[i]) / len(answers[i])
                for t, c in enumerate(MASKED[i])
                if c == "_"
            ]
            assert chance == pytest.approx(np.prod(shares))


@pytest.mark.parametrize("answers", [["41+48=88"], ["41+47=88", "41+47=88"], ["41+47"]])
def test_a_rules_answers_have_to_be_different_and_good(answers):
    class Wrong(SumRule):
        def answers(self, masked):
            return answers

    batch = make_batch(encode("41+47=88"), encode("4_+4_=88") == BLANK, BLANK, 1, (0,))
    with pytest.raises(Mistake, match="answers.'4_.4_=88'. isn't a list of different"):
        HeldOut(batch, Wrong()).answers  # noqa: B018
