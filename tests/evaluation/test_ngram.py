"""Compare the 5-gram model with counting in the text itself."""

import random
from math import log2

import numpy as np
import pytest
import torch

from grpo.evaluation.ngram import ngram, ngram_bits


def slow(text, gram, vocab_size):
    """Compute P(last character | those before it) by counting, with Witten-Bell smoothing."""
    if not gram:
        return 1 / vocab_size
    h, shorter = gram[:-1], slow(text, gram[1:], vocab_size)
    after = [text[i + len(h)] for i in range(len(text) - len(h)) if text.startswith(h, i)]
    if not after:
        return shorter
    different = len(set(after))
    return (after.count(gram[-1]) + different * shorter) / (len(after) + different)


def test_probabilities_are_those_counted_the_slow_way_and_add_up_to_one():
    rng = random.Random(0)
    text = "".join(rng.choice("aab ") for _ in range(60))
    probability = ngram(text, 3)
    for _ in range(50):
        h = "".join(rng.choice("ab ") for _ in range(rng.randrange(5)))
        assert probability(h + "a") == pytest.approx(slow(text, h + "a", 3))
        assert sum(probability(h + c) for c in "ab ") == pytest.approx(1)
    assert probability("xxxxa") == probability("a")  # a context that was never seen changes nothing


def test_bits_are_of_the_windows_that_touch_a_blank():
    """All windows of all fills count alike.

    The blank at position 6 is in five windows, and the blank at position 11 is in one.
    """
    probability = ngram("the cat sat on the mat", 27)
    mask = torch.zeros(2, 12, dtype=torch.bool).numpy()
    mask[0, 6] = mask[1, 11] = True
    texts = ["the cat sat ", "the caz sat ", "on the mat s", "on the mat z"]  # two for each input
    bits = []
    for row, text in enumerate(texts):
        for start in range(8):
            if mask[row // 2, start : start + 5].any():
                bits.append(-log2(probability(text[start : start + 5])))
    assert len(bits) == 12 and ngram_bits(probability, mask, texts) == pytest.approx(np.mean(bits))
