"""Collect a text's words, find those with a blank, and tell which fills are words."""

import re

WORD = re.compile("(?<![a-z])[a-z]+")


def lexicon(text):
    """Collect the words of a text: those of two letters or more, and "a" and "i"."""
    return {word for word in WORD.findall(text) if len(word) > 1 or word in "ai"}


def hidden_spans(text, mask, cut=True):
    """List (start, end) of each word of `text` that holds a blank.

    With `cut`, `text` may begin and end in the middle of a word. So we leave out a word that
    touches either end.
    """
    spans = []
    for match in WORD.finditer(text):
        start, end = match.span()
        whole = not cut or 0 < start and end < len(text)
        if whole and mask[start:end].any():
            spans.append((start, end))
    return spans


def is_valid(fill, start, end, words):
    """Tell whether fill[start:end] is one whole word of `fill`, and in the lexicon `words`."""
    word = WORD.match(fill, start)  # WORD also looks at the character before start
    return word is not None and word.end() == end and word[0] in words


def highlight(text, mask):
    """Put the letters that stand in blanks into [brackets]: mask (T,) -> str."""
    pieces = [f"[{c}]" if blank else c for c, blank in zip(text, mask)]
    return "".join(pieces).replace("][", "")
