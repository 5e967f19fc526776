"""Hide characters in seven ways, mixed by weight: `masking="random:0.5,span:0.5"`.

    the cat purred on the mat
    t_e cat pu_red _n the mat  random   single characters
    the ca____rred on the mat  span     one run of characters
    the ___ ______ on the mat  word     whole words, between two spaces
    the ___ purred on ___ mat  short    whole words of two to four letters
    the c___purred _____e mat  sticky   runs of four characters on average

    4_+4_=88                   columns  the ones, the tens, ... or several of them, in both summands
    _1+_7=88                   digits   single digits of the summands

Each way is a function of four arguments. `characters` (T,) is one input, an array of one-letter
strings. `ratio` and `words` are the settings mask_ratio and hidden_words. `rng` is a numpy
Generator, the source of all randomness. The function returns a mask (T,) bool. To add a way of your
own, write such a function and add a line to MASKINGS.

Shapes: B inputs, T characters of each.
"""

from functools import partial

import numpy as np

from data.user_mistake import Mistake, refuse


def random_mask(characters, ratio, words, rng):
    """Hide each character with probability `ratio`."""
    return rng.random(len(characters)) < ratio


def span_mask(characters, ratio, words, rng):
    """Hide one run of ratio * T characters, anywhere."""
    T = len(characters)
    length = max(1, round(ratio * T))
    start = rng.integers(T - length + 1)
    position = np.arange(T) - start
    return (0 <= position) & (position < length)


def word_mask(characters, ratio, words, rng, shortest=1, longest=np.inf):
    """Hide `words` random words of `shortest` to `longest` letters, or all if there are fewer.

    A word at either end of the input may be cut off, so it has to stand between two spaces.
    """
    mask = np.zeros(len(characters), dtype=bool)
    spaces = np.flatnonzero(characters == " ")
    words_between = [(a + 1, b) for a, b in zip(spaces[:-1], spaces[1:])]
    candidates = [(a, b) for a, b in words_between if shortest <= b - a <= longest]
    for start, end in rng.permutation(candidates)[:words]:
        mask[start:end] = True
    return mask


def sticky_mask(characters, ratio, words, rng):
    """Hide runs of 4 characters on average, by a Markov chain with the states hidden and visible.

    In the long run it hides the share `ratio` of the characters, but at most 0.8.
    """
    stay = 1 - 1 / 4  # P(hidden | previous hidden)
    enter = ratio / ((1 - ratio) * 4) if ratio < 0.8 else 1.0  # P(hidden | previous visible)
    u = rng.random(len(characters))
    hidden = rng.random() < ratio
    mask = []
    for chance in u:
        mask.append(hidden)
        hidden = chance < (stay if hidden else enter)
    return np.array(mask)


def sum_mask(characters, ratio, words, rng, columns):
    """Hide whole columns of both summands, or single digits. We draw first how many, then which."""
    refuse(
        "+" not in characters or "=" not in characters,
        f"{''.join(characters)!r:.100} is no sum, so masking=columns and masking=digits cannot hide"
        " a part of it; set dataset=sums, or another masking",
    )
    digits = characters.tolist().index("+")
    places = np.arange(digits) + [[0], [digits + 1]]  # (2,digits) of the two summands
    places = places.T if columns else places.ravel()
    hidden = rng.permutation(places)[: rng.integers(1, len(places) + 1)]
    mask = np.zeros(len(characters), dtype=bool)
    mask[hidden] = True
    return mask


MASKINGS = {
    "random": random_mask,
    "span": span_mask,
    "word": word_mask,
    # These words are so short that a policy learns within minutes to spell them.
    "short": partial(word_mask, shortest=2, longest=4),
    "sticky": sticky_mask,
    "columns": partial(sum_mask, columns=True),
    "digits": partial(sum_mask, columns=False),
}


def parse_masking(text):
    """Turn "random:1,span:1" into {"random": 0.5, "span": 0.5}: weights that add up to 1."""
    weights = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            weights[name] = 0.0
        if name not in MASKINGS or not 0 < weights[name] <= 1e9:
            raise Mistake(
                f"masking={text!r} has a part {part!r} that is not allowed; write NAME or"
                f" NAME:WEIGHT, where NAME is one of {', '.join(MASKINGS)}, and WEIGHT is"
                " more than 0 and at most 1e9"
            )
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def make_mask(characters, masking, ratio, words, rng):
    """Choose what to hide in each input: characters (B,T) -> mask (B,T) bool.

    Each input draws its way of hiding by the weights in `masking`, such as "random:0.5,word:0.5".
    Some ways read `ratio`, the share of characters to hide, and the others read `words`, the number
    of words to hide. Each is one number for all inputs, or an array (B,). Every input gets at least
    one blank.
    """
    B, T = characters.shape
    masking = parse_masking(masking)
    names = rng.choice(list(masking), p=list(masking.values()), size=B)
    rows = zip(names, characters, np.broadcast_to(ratio, B), np.broadcast_to(words, B))
    mask = np.stack([MASKINGS[name](*row, rng) for name, *row in rows])  # (B,T)
    empty = np.flatnonzero(~mask.any(axis=1))
    mask[empty, rng.integers(T, size=len(empty))] = True
    return mask
