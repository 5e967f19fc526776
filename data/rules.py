"""Which fills are good? A rule says it, for the reward, the progress bar and the table alike.

A rule has a `name`, and a `title` for people. `one_answer` says whether only the hidden text is the
answer that was looked for. A rule finds the gaps of a text, and tells whether a gap is filled well:

    gaps(original, mask)       lists (start, end) of each gap of a text, whose blanks are in `mask`
    is_good(fill, start, end)  tells whether fill[start:end] is good

If you have a dataset of your own, write a rule for it, and let `load_data` in grpo/run/load.py
choose it.
"""

import re

from data.sums.rule import is_right

WORD = re.compile("(?<![a-z])[a-z]+")


class WordRule:
    """A gap is a word of the text that has blanks, and a fill is good if it is in the lexicon.

    With `cut`, texts may begin and end in the middle of a word, so words there do not count.
    """

    name = "valid_words"
    title = "valid words on held-out text"
    one_answer = True

    def __init__(self, text, cut=True):
        """Collect the words of `text`: those of two letters or more, and "a" and "i"."""
        self.lexicon = {word for word in WORD.findall(text) if len(word) > 1 or word in "ai"}
        self.cut = cut

    def gaps(self, original, mask):
        spans = []
        for match in WORD.finditer(original):
            start, end = match.span()
            whole = not self.cut or 0 < start and end < len(original)
            if whole and mask[start:end].any():
                spans.append((start, end))
        return spans

    def is_good(self, fill, start, end):
        word = WORD.match(fill, start)  # WORD also looks at the character before start
        return word is not None and word.end() == end and word[0] in self.lexicon


class SumRule:
    """A gap is a whole sum, and a fill is good if the sum is right. There are many right fills."""

    name = "right"
    title = "right sums on held-out results"
    one_answer = False

    def gaps(self, original, mask):
        return [(0, len(original))]

    def is_good(self, fill, start, end):
        return is_right(fill)
