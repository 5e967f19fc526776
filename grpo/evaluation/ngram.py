"""A 5-gram model of the training text says how well a fill reads. It is part of no reward."""

import functools
from collections import Counter

import numpy as np

ORDER = 5  # characters: the one that is predicted, and the four before it


@functools.cache
def ngram(text, vocab_size):
    """Return a function that maps a string to the probability of its last character.

    In the formula c is the last character of the string, and h is the part before it.

    P(c | h) = (count(hc) + distinct(h) · P(c | h without its first character))
               / (count(h) + distinct(h))
    This smoothing is by Witten & Bell (1991). distinct(h) is the number of different characters
    that follow h in the text. If h is empty, the P on the right of the formula is 1/vocab_size.
    """
    count, followed = Counter(), Counter()
    windows = Counter(text[start : start + ORDER] for start in range(len(text)))
    for window, times in windows.items():
        for end in range(len(window)):
            count[window[: end + 1]] += times
            followed[window[:end]] += times
    distinct = Counter(gram[:-1] for gram in count)

    @functools.cache
    def probability(gram):
        if not gram:
            return 1 / vocab_size
        shorter = probability(gram[1:])
        h = gram[:-1]
        if h not in followed:
            return shorter
        return (count[gram] + distinct[h] * shorter) / (followed[h] + distinct[h])

    return probability


def ngram_bits(probability, mask, texts):
    """Average −log2 P over all 5-grams that contain a blank: -> bits per character.

    P is what `probability` returns for a 5-gram. mask (N,T) is a numpy array. `texts` has N·n
    fills: n fills of the first input, then n fills of the next, and so on.
    """
    windows = np.lib.stride_tricks.sliding_window_view(mask, ORDER, axis=1)
    touches = windows.any(axis=-1).repeat(len(texts) // len(mask), axis=0)  # (N·n,T-4)
    at = np.argwhere(touches)  # index of the fill, start of the 5-gram
    return float(-np.log2([probability(texts[i][t : t + ORDER]) for i, t in at]).mean())
