"""What is counted in a set of fills: words, and inputs that are right.

Letters: N inputs, n fills of each, T characters. Fills are (N,n,T).
"""

import math

import numpy as np

from grpo.words import decode, hidden_words, is_valid


def word_figures(tokens, mask, fills, vocabulary, words, cut=True):
    """Of the hidden words: tokens, mask (N,T), fills (N,n,T) -> {name: number}.

    valid_words, exact_words: shares, over all fills.
    distinct_words: different valid words among the first fills ÷ different hidden words.
    With several fills, different_valid_words: in the n fills of a hidden word; any_of_n: share of
    hidden words of which at least one fill is exact. `cut` as in `hidden_words`.
    """
    n = fills.shape[1]
    texts = decode(fills, vocabulary)
    flags = mask.cpu().numpy()
    total = valid = exact = different = found = 0
    hidden, first_valid = set(), set()
    for i, original in enumerate(decode(tokens, vocabulary)):
        for start, end in hidden_words(original, flags[i], cut):
            word = original[start:end]
            total += 1
            hidden.add(word)
            seen = set()
            right = 0
            for j in range(n):
                text = texts[i * n + j]
                fill = text[start:end]
                right += fill == word
                if is_valid(text, start, end, words):
                    valid += 1
                    seen.add(fill)
                    if j == 0:
                        first_valid.add(fill)
            exact += right
            found += right > 0
            different += len(seen)
    total = max(total, 1)  # without a hidden word all is 0
    figures = {
        "valid_words": valid / (total * n),
        "exact_words": exact / (total * n),
        "distinct_words": len(first_valid) / max(len(hidden), 1),
    }
    if n > 1:
        figures |= {"different_valid_words": different / total, f"any_of_{n}": found / total}
    return figures


def pass_at_k(solved, n, k):
    """P(at least one of k of the n fills is right), unbiased (2107.03374, equation 1).

    solved (N,): how many of each input's n fills are. -> mean over inputs
    """
    missed = [math.comb(n - right, k) / math.comb(n, k) for right in solved]
    return float(np.mean([1 - share for share in missed]))
