"""Which completions are good? A rule decides: for the bar and the table, and as a reward if asked.

A rule answers two questions, about a text in which _ marks the blanks:

    is_good(completion, masked)  is this completion good?
    answers(masked)              which completions are? None if nobody can list them

Its name is a reward, a metric and a column of the table, so pick one that isn't taken. To add one
for lines of your own, write its class and name it in LINE_RULES (data/README.md has an example).
Lines have the first rule that finds all of them good.

Shapes: B masked inputs, T characters, G completions of each.
"""

import re
from collections import Counter

import torch
from torch import Tensor

from data.sums.rule import correct_answers, is_correct
from data.user_mistake import Mistake
from data.vocabulary import BLANK, decode


class Rule:
    name = ""

    def answers(self, masked: str) -> list[str] | None:
        return None


class SumRule(Rule):
    """The sum holds. There may be many such completions, or none."""

    name = "correct"

    def is_good(self, completion, masked):
        return is_correct(completion)

    def answers(self, masked):
        result = masked.rpartition("=")[2]
        return None if BLANK in result else correct_answers(masked)


class WordRule(Rule):
    """What stands between two visible spaces, and has a blank, is a word of the lexicon.

    It's meant for hidden words. Single characters may hide a space, or be part of a word that the
    window cuts off, and then not even the truth is valid.
    """

    name = "valid"

    def __init__(self, text: str):
        """Count the words of `text`: those of two letters or more, and "a" and "i"."""
        self.lexicon = Counter(word for word in text.split() if len(word) > 1 or word in "ai")

    def is_good(self, completion, masked):
        pieces = (match.span() for match in re.finditer("[^ ]+", masked))
        return all(completion[a:b] in self.lexicon for a, b in pieces if BLANK in masked[a:b])


LINE_RULES = [SumRule()]


def check(rule: Rule, completions: Tensor, masked: Tensor) -> Tensor:
    """Ask a rule about completions (B,G,T) of masked inputs (B,T): -> (B,G) bool."""
    B, G, _ = completions.shape
    texts = decode(completions)  # B·G of them
    good = []
    for b, blanks in enumerate(decode(masked)):
        for text in texts[b * G : (b + 1) * G]:
            try:
                good.append(rule.is_good(text, blanks))
            except Exception as error:
                what = f"{type(error).__name__}: {error}"
                raise Mistake(f"rule {rule.name} fails for {text!r} ({what}); fix it") from error
    return torch.tensor(good, dtype=torch.bool, device=completions.device).view(B, G)
