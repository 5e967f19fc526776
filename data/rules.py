"""Which completions are good? A rule decides: for the reward, the bar and the table alike.

A rule looks at pieces of a text. A piece that has blanks is a gap.

    name, title           as a reward and a metric, and in the bar and the table
    whole                 True if a text has one piece, which is all of it
    made_for(train, cut)  returns the rule for a dataset, or None if it doesn't fit
    spans(text)           lists (start, end) of each piece, from left to right
    good_spans(text)      lists those whose text[start:end] is good
    answers(masked)       lists all good completions of a text, if the rule can do that

To add one, write its class, and name it in RULES.

Shapes: B masked inputs, T characters, G completions of each, D different texts.
"""

import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from data.dataset import Dataset
from data.per_word import begins_word, distinct
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

    def good_spans(self, text):
        return [(a, b) for a, b in self.spans(text) if text[a:b] in self.lexicon]


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

    def good_spans(self, text):
        return self.spans(text) if is_correct(text) else []


RULES = [SumRule, WordRule]
Rule = WordRule | SumRule  # for annotations


def pick_rule(train: Dataset, cut: bool = True) -> Rule | None:
    """Return the first rule that fits a dataset, or None."""
    rules = (kind.made_for(train, cut) for kind in RULES)
    return next(filter(None, rules), None)


def number_spans(find: Callable, texts: Tensor) -> Tensor:
    """Call find(text) on each text, and number the spans it lists: texts (D,T) -> (D,T).

    The number of a span stands at each of its characters, and 0 outside of all spans. It depends on
    start and end alone, so that we can compare two texts.
    """
    D, T = texts.shape
    numbers = np.zeros((D, T), dtype=np.int64)
    for row, text in zip(numbers, decode(texts)):
        for start, end in find(text):
            row[start:end] = start * T + end
    return torch.from_numpy(numbers).to(texts.device)


def check_gaps(
    rule: Rule | None,
    texts: Tensor,  # (D,T) the different completions, from `distinct`
    which: Tensor,  # (B,G) which of these each completion is
    tokens: Tensor,  # (B,T) the original text
    mask: Tensor,  # (B,T) True at a blank
) -> tuple[Tensor, Tensor]:  # (B,G,T) bool, (B,T) int64
    """Mark the first blank of each gap that a completion fills well, and number the gaps.

    Gaps are numbered like words: 1 at the blanks of the first one, 2 at those of the second, and 0
    elsewhere. A completion fills a gap well if a good piece of it starts and ends where the gap
    does. Without a rule there are no gaps.
    """
    if rule is None:
        gaps = torch.zeros_like(mask, dtype=torch.int64)
        return gaps[:, None].expand(-1, which.shape[1], -1) > 0, gaps
    originals, which_original = distinct(tokens)  # (D,T), (B,)
    spans = number_spans(rule.spans, originals)[which_original] * mask  # (B,T) of each blank
    found = number_spans(rule.good_spans, texts)[which]  # (B,G,T)
    first = begins_word(spans)  # (B,T)
    return first[:, None] & (found == spans[:, None]), first.cumsum(dim=1) * (spans > 0)
