"""The n-gram referee: how well does a fill read, by a model of the text that nobody optimises?"""

import functools
from collections import Counter

import numpy as np

ORDER = 5  # characters that it looks at


@functools.cache
def ngram(text, vocab_size):
    """The probability of a character after the four before it, as Witten & Bell 1991 smooth it.

    P(c | h) = (count(hc) + distinct(h) · P(c | h without its first character))
               / (count(h) + distinct(h))                                     from 1/V up,
    where distinct(h) counts the different characters seen after h.
    -> the function from the string hc to P(c | h)
    """
    count, followed, distinct = Counter(), Counter(), Counter()
    letters = np.frombuffer(text.encode("ascii"), dtype=np.uint8).astype(np.int64)  # 7 bits each
    for length in range(1, min(ORDER, len(text)) + 1):
        windows = np.lib.stride_tricks.sliding_window_view(letters, length)
        codes = windows @ (128 ** np.arange(length))  # a number for each string of this length
        _, first, times = np.unique(codes, return_index=True, return_counts=True)
        for start, often in zip(first.tolist(), times.tolist()):
            count[text[start : start + length]] = often
    for gram, times in count.items():
        followed[gram[:-1]] += times
        distinct[gram[:-1]] += 1

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
    """Bits per character, −log2 P, over every position whose 5-gram touches a blank.

    mask (N,T); texts, N·n of them: n fills of each input.
    """
    n = len(texts) // len(mask)
    flags = mask.cpu().numpy()
    windows = np.lib.stride_tricks.sliding_window_view(flags, ORDER, axis=1)  # (N,T-4,5)
    touches = windows.any(axis=-1).repeat(n, axis=0)  # (N·n,T-4)
    at = np.argwhere(touches)  # row of fill, first character
    return float(-np.log2([probability(texts[i][t : t + ORDER]) for i, t in at]).mean())
