"""Tell which sums are correct, and list the correct completions of one.

A sum is `41+47=88`: two numbers with the same number of digits, and their sum, which has no more.
"""

import functools
import re

from data.vocabulary import BLANK

SUM = re.compile(r"([1-9][0-9]*)\+([1-9][0-9]*)=([1-9][0-9]*)")


def is_correct(text: str) -> bool:
    """Tell whether a sum holds, and its three numbers have the same number of digits.

    No number may start with 0, so `01+87=88` is wrong.
    """
    match = SUM.fullmatch(text)
    if match is None:
        return False
    first, second, result = match.groups()
    return len(first) == len(second) == len(result) and int(first) + int(second) == int(result)


@functools.cache  # many held-out inputs are the same, once their digits are hidden
def correct_answers(masked: str) -> list[str]:
    """List the correct completions of a sum whose result is visible: `4_+4_=88` -> 9 texts."""
    match = re.fullmatch("[0-9_+]+=([0-9]+)", masked)
    if match is None:
        return []
    result = int(match[1])
    pattern = re.compile(re.escape(masked).replace(BLANK, "."))
    answers = (f"{first}+{result - first}={result}" for first in range(1, result))
    return [text for text in answers if pattern.fullmatch(text) and is_correct(text)]
