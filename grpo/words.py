"""Words in a text of characters: which are hidden, and is what was filled in a word? For the rewards and for the evaluation."""

import re

import numpy as np

WORD = re.compile(
    r"(?<![A-Za-z])(?<![A-Za-z]')[A-Za-z]+(?:'[A-Za-z]+)*"
)  # don't is one word, with an alphabet that has the apostrophe


def lexicon(text):
    """The words of the training text: of two letters or more, or "a", or "i"."""
    return {word for word in WORD.findall(text.lower()) if len(word) > 1 or word in "ai"}


def hidden_words(text, mask):
    """(start, end) of each word of `text` that holds a blank and that the window does not cut."""
    return [
        m.span()
        for m in WORD.finditer(text)
        if 0 < m.start() and m.end() < len(text) and mask[m.start() : m.end()].any()
    ]


def is_valid(fill, start, end, words):
    """Is the fill of the hidden word at start:end one word of the lexicon, of just this length?"""
    word = (
        WORD.match(fill, start) if fill[start:end].lower() in words else None
    )  # the pattern looks at what stands before start, too
    return word is not None and word.end() == end


def decode(tokens, vocabulary):
    """(..., T) tokens -> a flat list of strings."""
    table = np.frombuffer(vocabulary.encode("ascii"), dtype=np.uint8)
    return [
        row.tobytes().decode("ascii")
        for row in table[tokens.reshape(-1, tokens.shape[-1]).cpu().numpy()]
    ]
