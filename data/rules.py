"""Which completions are good? A rule decides: for the reward, the bar and the table alike.

A rule looks at pieces of a text. A piece that has blanks is a gap.

    name, title           as a reward and a metric, and in the bar and the table
    whole                 True if a text has one piece, which is all of it
    made_for(train, cut)  returns the rule for a dataset, or None if it doesn't fit
    spans(text)           lists (start, end) of each piece, from left to right
    is_good(text, a, b)   tells whether a completion has a good piece from a to b
    answers(masked)       lists all good completions of a text, if the rule can do that

To add one, write its class, and name it in RULES.

Shapes: B masked inputs, T characters, G completions of each.
"""

import re
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset
from data.sums.rule import correct_answers, is_correct
from data.vocabulary import decode

WORD = re.compile("[a-z]+")


class WordRule:
    """A piece is a word. It's good if it's in the lexicon.

    With `cut`, texts may start and end in the middle of a word, so the words there don't count.
    """

    name, title = "valid_words", "valid"
    whole = False

    def __init__(self, text: str, cut: bool = True):
        """Count the words of `text`: those of two letters or more, and "a" and "i"."""
        self.lexicon = Counter(w for w in WORD.findall(text) if len(w) > 1 or w in "ai")
        self.cut = cut

    @classmethod
    def made_for(cls, train, cut):
        return cls(train.lines[0], cut) if train.kind == "text" else None

    def spans(self, text):
        found = [match.span() for match in WORD.finditer(text)]
        return [(a, b) for a, b in found if not self.cut or 0 < a and b < len(text)]

    def is_good(self, text, start, end):
        return text[start:end] in self.lexicon and (start, end) in self.spans(text)


class SumRule:
    """There's one piece, the whole sum. Many completions of it may be correct."""

    name = title = "correct"
    whole = True
    answers = staticmethod(correct_answers)

    @classmethod
    def made_for(cls, train, cut):
        return cls() if train.kind == "sums" else None

    def spans(self, text):
        return [(0, len(text))]

    def is_good(self, text, start, end):
        return is_correct(text)


RULES = [SumRule, WordRule]
Rule = WordRule | SumRule  # for annotations


def pick_rule(train: Dataset, cut: bool = True) -> Rule | None:
    """Return the first rule that fits a dataset, or None."""
    rules = (kind.made_for(train, cut) for kind in RULES)
    return next(filter(None, rules), None)


def check_gaps(
    rule: Rule | None,
    completions: Tensor,  # (B,G,T)
    tokens: Tensor,  # (B,T) the original text
    mask: Tensor,  # (B,T) True at a blank
) -> tuple[Tensor, Tensor]:  # (B,G,T) bool, (B,T) int64
    """Mark the first blank of each gap that a completion fills well, and number the gaps.

    Gaps are numbered like words: 1 at the blanks of the first one, 2 at those of the second, and 0
    elsewhere. Without a rule there are no gaps.
    """
    B, G, _ = completions.shape
    gaps = np.zeros(mask.shape, dtype=np.int64)
    good = np.zeros(completions.shape, dtype=bool)
    texts = decode(completions)
    for b, (original, blanks) in enumerate(zip(decode(tokens), mask.cpu().numpy())):
        for start, end in rule.spans(original) if rule else []:
            places = start + np.flatnonzero(blanks[start:end])
            if len(places):
                gaps[b, places] = gaps[b].max() + 1
                filled = texts[b * G : (b + 1) * G]
                good[b, :, places[0]] = [rule.is_good(text, start, end) for text in filled]
    return torch.from_numpy(good).to(mask.device), torch.from_numpy(gaps).to(mask.device)
