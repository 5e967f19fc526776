"""Tell which sums are right, and how often perfect independent blanks are.

A sum is `41+47=88`: two numbers of equally many digits and their sum, which has no more digits.
"""

import functools
import re
from collections import Counter

from data.vocabulary import BLANK

SUM = re.compile(r"([1-9][0-9]*)\+([1-9][0-9]*)=([1-9][0-9]*)")


def is_right(text):
    """Tell whether a sum holds, and its three numbers have equally many digits.

    No number may begin with 0, so `01+87=88` is wrong. Blanks at the end are padding.
    """
    match = SUM.fullmatch(text.rstrip(BLANK))
    if match is None:
        return False
    first, second, result = match.groups()
    return len(first) == len(second) == len(result) and int(first) + int(second) == int(result)


def right_answers(masked):
    """List the right fills of a sum with blanks in its summands: `4_+4_=88` -> 9 texts."""
    result = int(masked.split("=")[1])
    pattern = re.compile(re.escape(masked).replace(BLANK, "[0-9]"))
    answers = (f"{first}+{result - first}={result}" for first in range(1, result))
    return [text for text in answers if pattern.fullmatch(text) and is_right(text)]


@functools.cache
def most_even_answer(masked):
    """Return the right fill whose summands differ least: `4_+4_=88` -> `44+44=88`."""

    def difference(answer):
        first, second = answer.split("=")[0].split("+")
        return abs(int(first) - int(second))

    return min(right_answers(masked), key=difference)


def perfect_blanks(masked_texts, n=16):
    """Compute what independent blanks can reach at best: -> {how: figures}, means over the inputs.

    Given an input, all of its right answers are equally likely (data/sums/prepare.py). We give each
    blank its exact distribution over these answers, which no cross-entropy can improve on.

    sampled    draw all blanks: the probability that this is right, and the expected number of
               different right answers among n draws
    argmax     give each blank its likeliest digit, and break ties at random
    best of n  choose a right one of n draws, if there is one
    """
    total = {"sampled": 0.0, "argmax": 0.0, "best": 0.0, "different": 0.0}
    for masked in masked_texts:
        answers = right_answers(masked)
        each = [1.0] * len(answers)  # the probability that this answer is drawn
        surest = [1.0] * len(answers)  # the same if every blank has its likeliest digit
        for place in [i for i, c in enumerate(masked) if c == BLANK]:
            digits = [answer[place] for answer in answers]
            count = Counter(digits)
            most = max(count.values())
            ties = [digit for digit in count if count[digit] == most]
            for i, digit in enumerate(digits):
                each[i] *= count[digit] / len(digits)
                surest[i] *= (digit in ties) / len(ties)
        total["sampled"] += sum(each)
        total["argmax"] += sum(surest)
        total["best"] += 1 - (1 - sum(each)) ** n
        total["different"] += sum(1 - (1 - p) ** n for p in each)
    mean = {name: value / len(masked_texts) for name, value in total.items()}
    return {
        "sampled": {"right": mean["sampled"], "different_right": mean["different"]},
        "argmax": {"right": mean["argmax"]},
        f"best of {n}": {"right": mean["best"]},
    }
