"""Which characters are hidden. Five ways, mixed by weight in the config: `masking="short"`, `masking="random:0.5,span:0.5"`.

    the cat purred on the mat
    t_e cat pu_red _n the mat  random   single characters
    the ca____rred on the mat  span     one run of characters
    the ___ ______ on the mat  word     whole words, between two spaces
    the ___ purred on ___ mat  short    whole words of up to four letters
    the cat __r_ed __ the mat  sticky   likelier beside a hidden character

Letters: B inputs, T characters. Each way maps (T,) bool, is it a space?, to a (T,) bool mask; `rng` is a numpy Generator and owns the randomness.
"""

import numpy as np


def whole_words(is_space):
    """(start, end) of each word that the window does not cut: one with a space on both sides."""
    spaces = np.flatnonzero(is_space)
    return [(a + 1, b) for a, b in zip(spaces[:-1], spaces[1:]) if b - a > 1]


def random_mask(is_space, ratio, words, rng):
    """Hide each character with probability `ratio`."""
    return rng.random(len(is_space)) < ratio


def span_mask(is_space, ratio, words, rng):
    """Hide one run of ratio * T characters, anywhere."""
    length = max(1, round(ratio * len(is_space)))
    position = np.arange(len(is_space)) - rng.integers(len(is_space) - length + 1)
    return (0 <= position) & (position < length)


def word_mask(is_space, ratio, words, rng, longest=np.inf):
    """Hide `words` whole words of up to `longest` letters; fewer if there are fewer."""
    mask = np.zeros(len(is_space), dtype=bool)
    for start, end in rng.permutation(
        [(start, end) for start, end in whole_words(is_space) if end - start <= longest]
    )[:words]:
        mask[start:end] = True
    return mask


def short_mask(is_space, ratio, words, rng):
    """Hide `words` whole words of up to four letters: enough to clash, and few enough ways to agree that a policy finds them in minutes."""
    return word_mask(is_space, ratio, words, rng, longest=4)


def sticky_mask(is_space, ratio, words, rng):
    """Hide runs of mean length 4: a two-state Markov chain whose long-run share of hidden characters is `ratio` (up to 0.8)."""
    enter = (
        ratio / ((1 - ratio) * 4) if ratio < 0.8 else 1.0
    )  # P(hidden | the one before is visible)
    mask, u, hidden = (
        np.zeros(len(is_space), dtype=bool),
        rng.random(len(is_space)),
        rng.random() < ratio,
    )
    for t in range(len(mask)):
        mask[t] = hidden
        hidden = u[t] < (
            0.75 if hidden else enter
        )  # 0.75 = 1 - 1/4 = P(hidden | the one before is hidden)
    return mask


MASKINGS = {
    "random": random_mask,
    "span": span_mask,
    "word": word_mask,
    "short": short_mask,
    "sticky": sticky_mask,
}


def parse_masking(text):
    """ "word" or "random:0.5,span:0.5" -> {"random": 0.5, "span": 0.5}, weights summing to 1. ValueError if it is neither."""
    weights = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        try:
            share = float(weight or 1)
        except ValueError:
            share = -1.0
        if name not in MASKINGS or name in weights or not 0 <= share < float("inf"):
            raise ValueError(
                f"masking={text!r} has a part {part!r}; allowed: NAME or NAME:WEIGHT, with NAME one of {', '.join(MASKINGS)}, each once, and WEIGHT >= 0"
            )
        weights[name] = share
    total = sum(weights.values())
    if total <= 0:
        raise ValueError(
            f"masking={text!r} has no positive weight; write for example masking='word:1'"
        )
    return {name: weight / total for name, weight in weights.items()}


def make_mask(is_space, masking, ratio, words, rng):
    """Masks for a batch: `is_space` (B,T) bool, `masking` a dict of weights, `ratio` and `words` one number or (B,) -> mask (B,T) bool."""
    B, T = is_space.shape
    names = rng.choice(list(masking), p=list(masking.values()), size=B)
    mask = np.stack(
        [
            MASKINGS[name](row, r, w, rng)
            for name, row, r, w in zip(
                names, is_space, np.broadcast_to(ratio, B), np.broadcast_to(words, B)
            )
        ]
    )  # (B,T)
    empty = np.flatnonzero(~mask.any(axis=1))
    mask[empty, rng.integers(T, size=len(empty))] = True  # every row has at least one blank
    return mask
