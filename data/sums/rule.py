"""Tell which sums are correct, and how often perfect independent blanks would be.

A sum is `41+47=88`: two numbers with the same number of digits, and their sum, which has no more.
"""

import functools
import re
from collections import Counter

from data.vocabulary import BLANK

SUM = re.compile(r"([1-9][0-9]*)\+([1-9][0-9]*)=([1-9][0-9]*)")


def is_correct(text: str) -> bool:
    """Tell whether a sum holds, and its three numbers have the same number of digits.

    No number may start with 0, so `01+87=88` is wrong. Blanks at the end are padding.
    """
    match = SUM.fullmatch(text.rstrip(BLANK))
    if match is None:
        return False
    first, second, result = match.groups()
    return len(first) == len(second) == len(result) and int(first) + int(second) == int(result)


def correct_answers(masked: str) -> list[str]:
    """List the correct completions of a sum whose result is visible: `4_+4_=88` -> 9 texts."""
    match = re.fullmatch("[0-9_+]+=([0-9]+)", masked)
    if match is None:
        return []
    result = int(match[1])
    pattern = re.compile(re.escape(masked).replace(BLANK, "."))
    answers = (f"{first}+{result - first}={result}" for first in range(1, result))
    return [text for text in answers if pattern.fullmatch(text) and is_correct(text)]


@functools.cache  # many held-out inputs are the same, once their digits are hidden
def perfect_draws(masked: str) -> list[float]:
    """Compute how likely perfect independent blanks are to draw each correct answer of an input.

    All of its correct answers are equally likely (data/sums/prepare.py). So we give each blank its
    exact marginal over these answers. Cross-entropy can't do better than that.
    """
    answers = correct_answers(masked)
    probability = [1.0] * len(answers)
    for place in [i for i, c in enumerate(masked) if c == BLANK]:
        count = Counter(answer[place] for answer in answers)
        for i, answer in enumerate(answers):
            probability[i] *= count[answer[place]] / len(answers)
    return probability


def perfect_blanks(masked_texts: list[str], n: int = 16) -> dict[str, float]:
    """Compute the ceiling for independent blanks: -> {column: number}, averaged over the inputs.

    correct            the probability that a draw is correct
    different_correct  the expected number of different correct answers among n draws
    """
    correct = different = 0.0
    for masked in masked_texts:
        correct += sum(perfect_draws(masked))
        different += sum(1 - (1 - p) ** n for p in perfect_draws(masked))
    return {
        "correct": correct / len(masked_texts),
        "different_correct": different / len(masked_texts),
    }
