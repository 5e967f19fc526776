"""How well does a fill read, by a 5-gram model of the text, which nobody optimises?"""

import functools
from collections import Counter

import numpy as np

ORDER = 5  # characters that it looks at


@functools.cache
def ngram(text, vocab_size):
    """Make the probability of a character after the four before it, smoothed (Witten & Bell 1991).

    P(c | h) = (count(hc) + distinct(h) · P(c | h without its first character))
               / (count(h) + distinct(h))
    distinct(h) counts the different characters seen after h. The recursion ends at 1/vocab_size,
    below the empty h. Returns the function that maps the string hc to P(c | h).
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
    """Average −log2 P over every position whose 5-gram touches a blank: -> bits per character.

    mask (N,T), in numpy; texts, N·n of them: n fills of each input.
    """
    windows = np.lib.stride_tricks.sliding_window_view(mask, ORDER, axis=1)
    touches = windows.any(axis=-1).repeat(len(texts) // len(mask), axis=0)  # (N·n,T-4)
    at = np.argwhere(touches)  # row of fill, first character
    return float(-np.log2([probability(texts[i][t : t + ORDER]) for i, t in at]).mean())
