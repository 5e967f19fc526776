"""Which completions are good? A rule decides: for the reward, the bar and the table alike.

A rule finds the gaps of a text, and judges what's in them:

    name, title                as a reward and a metric, and in the bar and the table
    whole                      True if a text has one gap, which is all of it
    made_for(train, cut)       returns the rule for a dataset, or None if it doesn't fit
    gaps(original, mask)       lists (start, end) of each gap of a text, whose blanks are in `mask`,
                               from left to right
    is_good(text, start, end)  tells whether text[start:end] is good
    answers(masked)            lists all good completions of a text, if the rule can do that

To add one, write its class, and name it in RULES.

Shapes: B masked inputs, T characters, G completions of each.
"""

import re
from collections import Counter

import torch
from torch import Tensor

from data.dataset import Dataset
from data.sums.rule import correct_answers, is_correct
from data.vocabulary import decode

WORD = re.compile("(?<![a-z])[a-z]+")


class WordRule:
    """A gap is a word of the text that has blanks. It's filled well if it's in the lexicon.

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

    def gaps(self, original, mask):
        spans = []
        for match in WORD.finditer(original):
            start, end = match.span()
            whole = not self.cut or 0 < start and end < len(original)
            if whole and mask[start:end].any():
                spans.append((start, end))
        return spans

    def is_good(self, text, start, end):
        word = WORD.match(text, start)  # WORD also looks at the character before start
        return word is not None and word.end() == end and word[0] in self.lexicon


class SumRule:
    """A gap is a whole sum. Many completions of it may be correct."""

    name = title = "correct"
    whole = True
    answers = staticmethod(correct_answers)

    @classmethod
    def made_for(cls, train, cut):
        return cls() if train.kind == "sums" else None

    def gaps(self, original, mask):
        return [(0, len(original))]

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
    elsewhere. Without a rule there are none.
    """
    B, G, T = completions.shape
    gaps = torch.zeros(B, T, dtype=torch.int64)
    good = torch.zeros(B, G, T, dtype=torch.bool)
    if rule:
        masks = mask.cpu().numpy()  # (B,T)
        texts = decode(completions)
        for i, original in enumerate(decode(tokens)):
            for number, (start, end) in enumerate(rule.gaps(original, masks[i]), start=1):
                first = start + int(masks[i, start:end].argmax())
                gaps[i, start:end] = number
                for j, text in enumerate(texts[i * G : (i + 1) * G]):
                    good[i, j, first] = rule.is_good(text, start, end)
    return good.to(mask.device), gaps.to(mask.device) * mask
