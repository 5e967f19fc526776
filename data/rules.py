"""Which fills are good? A rule says it, for the reward, the progress bar and the table alike.

A rule has a `name`, and a `title` for people. `one_answer` says whether only the hidden text is the
answer that was looked for. A rule finds the gaps of a text, and tells whether a gap is filled well:

    gaps(original, mask)       lists (start, end) of each gap of a text, whose blanks are in `mask`
    is_good(fill, start, end)  tells whether fill[start:end] is good

If you have a dataset of your own, write a rule for it, and let `load_data` in grpo/plumbing/load.py
choose it.
"""

from data.lexicon import hidden_spans, is_valid, lexicon
from data.sums.rule import is_right


class WordRule:
    """A gap is a word of the text that has blanks, and a fill is good if it is in the lexicon.

    With `cut`, texts may begin and end in the middle of a word, so words there do not count.
    """

    name = "valid_words"
    title = "valid words on held-out text"
    one_answer = True

    def __init__(self, text, cut=True):
        self.lexicon = lexicon(text)
        self.cut = cut

    def gaps(self, original, mask):
        return hidden_spans(original, mask, self.cut)

    def is_good(self, fill, start, end):
        return is_valid(fill, start, end, self.lexicon)


class SumRule:
    """A gap is a whole sum, and a fill is good if the sum is right. There are many right fills."""

    name = "right"
    title = "right sums on held-out results"
    one_answer = False

    def gaps(self, original, mask):
        return [(0, len(original))]

    def is_good(self, fill, start, end):
        return is_right(fill)
