"""Find which hidden word each blank belongs to, average over words, and find equal texts.

`mask` is True at a blank. `words` numbers the hidden words of each input 1, 2, 3, ... in the order
of their first blanks, and is 0 where there's no blank. In a text a word is a run of adjacent
blanks, but nothing here needs them to be adjacent. Once blanks are filled in, numbers may be
missing.

Shapes: B inputs, T characters, G completions of each input, M blanks of all inputs,
D different texts.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def number_words(ends: Tensor, mask: Tensor) -> Tensor:
    """Number the words that `ends` separate: ends, mask (B,T) bool -> words (B,T) int64.

    All blanks between two ends are one word. With spaces as the ends, `to h_l_ _t` has the words
    0000101020. With everything visible as an end, a word is a run of adjacent blanks: 0000102030.
    """
    segment = (ends.cumsum(dim=1) + 1) * mask  # (B,T) such as 0000202030: numbered with gaps
    return begins_word(segment).cumsum(dim=1) * mask


def begins_word(words: Tensor) -> Tensor:
    """Tell which positions are the first blank of a word: (B,T) -> (B,T) bool."""
    # (B,T) the largest word number to the left of each position
    seen = F.pad(words, (1, 0))[:, :-1].cummax(dim=1).values
    return words > seen


def same_word(words: Tensor) -> Tensor:
    """Tell whether two positions are blanks of the same word: (B,T) -> (B,T,T) bool."""
    return (words[:, :, None] == words[:, None]) & (words > 0)[:, None]


def mean_over_words(x: Tensor, words: Tensor) -> Tensor:
    """Give each blank the mean of x over its word, and 0 to the rest: (B,G,T) -> (B,G,T)."""
    same = same_word(words).to(x.dtype)  # (B,T,T)
    letters = same.sum(dim=1).clamp(min=1)  # (B,T) the length of each blank's word
    return x @ same / letters[:, None]


def all_of_word(x: Tensor, words: Tensor) -> Tensor:
    """Tell each blank whether x is True in its whole word: (B,G,T) bool -> (B,G,T) bool."""
    return mean_over_words(x.float(), words) == 1


def mean_over_blanks(x: Tensor, mask: Tensor) -> Tensor:
    """Average x over the blanks of each input: (B,G,T), (B,T) -> (B,G)."""
    return (x * mask[:, None]).sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)[:, None]


def spread(values: Tensor, mask: Tensor) -> Tensor:
    """Put one value into each blank and zeros elsewhere: (M,...), (B,T) -> (B,T,...)."""
    everywhere = values.new_zeros(*mask.shape, *values.shape[1:])  # (B,T,...)
    everywhere[mask] = values
    return everywhere


def lay_out_words(words: Tensor) -> tuple[Tensor, Tensor]:
    """Return each blank's word number and its place in the word: words (B,T) -> (M,), (M,).

    Both count from 0. Words are numbered over all inputs, in the order of their first blanks. An
    input with the words 0101022 comes out as the words 0011 and the places 0101.
    """
    blank = words > 0  # (B,T)
    same = same_word(words)  # (B,T,T)
    begun = begins_word(words).flatten().cumsum(dim=0).view_as(words)  # (B,T) words up to here
    first = same.int().argmax(dim=-1)  # (B,T) where the word of each blank begins
    word = begun.gather(1, first) - 1  # (B,T)
    place = same.tril(diagonal=-1).sum(dim=-1)  # (B,T) how many of the word's blanks come before
    return word[blank], place[blank]


def distinct(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Find the different texts among tokens (...,T): -> (D,T), and which of them each is, (...).

    So texts[which] are the tokens again. A GPU has to wait for this.
    """
    T = tokens.shape[-1]
    rows = tokens.reshape(-1, T).to(torch.int8).cpu().contiguous().numpy()  # a byte per character
    # NumPy sorts whole rows of bytes, up to ten times as fast as torch.unique sorts numbers.
    _, first, which = np.unique(rows.view(f"V{T}"), return_index=True, return_inverse=True)
    texts = torch.from_numpy(rows[first]).to(tokens)  # (D,T)
    return texts, torch.from_numpy(which).view(tokens.shape[:-1]).to(tokens.device)
