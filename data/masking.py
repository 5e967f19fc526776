"""Decide what to hide: seven maskings, mixed by weight as in `masking="short:0.8,word:0.2"`.

    the cat purred on the mat
    t_e c_t pu_red _n the mat  random   single characters, 10 to 60 % of them
    the cat ______ on the mat  word     one whole word
    the ___ purred on the mat  short    one word of two to four letters
    the ___ ______ on the mat  words    one to five whole words
    the ___ purred on ___ mat  shorts   one to five words of two to four letters

    4_+4_=88                   columns  the ones, the tens, ... or several, in both summands
    _1+_7=88                   digits   one or more digits of the summands, up to all of them

All that's hidden of an input is filled together, judged together and rewarded together. How much
that is gets drawn anew for each input, so one model sees easy inputs and hard ones. (`words` and
`shorts` are for pretraining, which doesn't care what belongs together.)

A masking is a function f(characters, rng) -> mask. It gets one input as an array of one-letter
strings (T,), and a numpy Generator to take all its randomness from. The mask (T,) is True where a
character gets hidden. If that's nowhere, another input is drawn. To add your own, write such a
function and add a line to MASKINGS.

Shapes: B inputs, T characters of each.
"""

from functools import cache, partial

import numpy as np
from numpy import ndarray
from numpy.random import Generator

from data.user_mistake import Mistake
from data.weights import parse_weights


def random_mask(characters: ndarray, rng: Generator) -> ndarray:
    """Hide each character with the same probability, drawn uniformly from .1 to .6."""
    return rng.random(len(characters)) < rng.uniform(0.1, 0.6)  # (T,)


def word_mask(characters: ndarray, rng: Generator, lengths: range, most: int) -> ndarray:
    """Hide one to `most` random words of these lengths, or all if there are fewer.

    A window may cut off the word at either of its ends, so a word has to stand between two spaces.
    """
    mask = np.zeros(len(characters), dtype=bool)  # (T,)
    spaces = np.flatnonzero(characters == " ")
    words = [(a + 1, b) for a, b in zip(spaces[:-1], spaces[1:]) if b - a - 1 in lengths]
    for start, end in rng.permutation(words)[: rng.integers(1, most + 1)]:
        mask[start:end] = True
    return mask


def sum_mask(characters: ndarray, rng: Generator, columns: bool) -> ndarray:
    """Hide whole columns of both summands, or single digits.

    How many is uniform, from one to all of them. Which ones is random, too.
    """
    mask = np.zeros(len(characters), dtype=bool)  # (T,)
    summands = "".join(characters).partition("=")[0].split("+")
    digits = len(summands[0])
    if len(summands) != 2 or len(summands[1]) != digits:
        return mask  # it isn't a sum
    places = np.arange(digits) + [[0], [digits + 1]]  # (2,digits) of the two summands
    places = places.T if columns else places.ravel()
    hidden = rng.permutation(places)[: rng.integers(1, len(places) + 1)]
    mask[hidden] = True
    return mask


ANY, SHORT = range(1, 1000), range(2, 5)  # letters; a policy soon learns to spell short words

MASKINGS = {
    "random": random_mask,
    "word": partial(word_mask, lengths=ANY, most=1),
    "short": partial(word_mask, lengths=SHORT, most=1),
    "words": partial(word_mask, lengths=ANY, most=5),
    "shorts": partial(word_mask, lengths=SHORT, most=5),
    "columns": partial(sum_mask, columns=True),
    "digits": partial(sum_mask, columns=False),
}


@cache
def parse_masking(text: str) -> dict[str, float]:
    """Turn "random:1,word:1" into {"random": 0.5, "word": 0.5}: weights that add up to 1."""
    weights = parse_weights("masking", text)
    for name, weight in weights.items():
        if name not in MASKINGS or weight <= 0:
            raise Mistake(
                f"masking={text}: {name}:{weight:g} isn't allowed; use {', '.join(MASKINGS)}, with"
                " weights above 0"
            )
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def make_mask(characters: ndarray, masking: str, rng: Generator) -> ndarray:
    """Choose what to hide in each input: characters (B,T) -> mask (B,T) bool.

    Each input draws its masking by weight. Where that finds nothing to hide, the row stays empty,
    and `Dataset.batch` draws another input instead.
    """
    weights = parse_masking(masking)
    names = rng.choice(list(weights), p=list(weights.values()), size=len(characters))
    return np.stack([MASKINGS[name](row, rng) for name, row in zip(names, characters)])
