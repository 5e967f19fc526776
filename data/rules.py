"""Which fills are good? A rule says it, for the reward, the progress bar and the table alike.

A rule has a `name`, and a `title` for people. It finds the gaps of a text, and tells whether a gap
is filled well:

    gaps(original, mask)      lists (start, end) of each gap of a text, whose blanks are in `mask`
    is_good(fill, start, end) tells whether fill[start:end] is good

Add a rule of your own for a dataset of your own, and give it to `load_data` in
grpo/plumbing/load.py.
"""

from data.lexicon import hidden_spans, is_valid, lexicon


class WordRule:
    """A gap is a word of the text that has blanks, and a fill is good if it is in the lexicon.

    With `cut`, texts may begin and end in the middle of a word, so words there do not count.
    """

    name = "valid_words"
    title = "valid words on held-out text"

    def __init__(self, text, cut=True):
        self.lexicon = lexicon(text)
        self.cut = cut

    def gaps(self, original, mask):
        return hidden_spans(original, mask, self.cut)

    def is_good(self, fill, start, end):
        return is_valid(fill, start, end, self.lexicon)
