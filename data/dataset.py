"""Batches of masked inputs. The batch of step i is a function of (seed, i) alone.

So resuming needs no data state, and any number of processes agree on the whole step's inputs
before each takes its slice. Letters: B inputs, T characters.
"""

import json
from pathlib import Path

import numpy as np
import torch

from data.char_diffusion.prepare import BLANK
from data.masking import make_mask

PAD = -1  # follows a prompt that is shorter than the others: no character
UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)  # what a JSON file may do


def is_vocabulary(text):
    """Different ASCII characters, two or more, of which the blank is the last."""
    if not isinstance(text, str) or not text.isascii():
        return False
    return len(set(text)) == len(text) and text[1:].endswith(BLANK)


def encode(text, vocabulary, longest, name):
    """A text with blanks -> (T,) tokens.

    Raises ValueError for one that the models cannot read, or that has nothing to fill.
    """
    readable = isinstance(text, str) and set(text) <= set(vocabulary)
    if not readable or BLANK not in text or len(text) > longest:
        raise ValueError(
            f"{name} is {text!r:.100}; it takes up to {longest} characters, of {vocabulary!r},"
            f" with at least one blank {BLANK!r}"
        )
    return torch.tensor([vocabulary.index(c) for c in text])  # (T,)


class Dataset:
    """One split of a prepared text: `vocabulary` (str; index = token), `mask_id`, `batch()`."""

    cuts_words = True  # an input is a window: its first and its last word may be parts of words

    def __init__(self, folder, split):
        """Raises ValueError for a folder without a prepared text, or whose files do not fit."""
        folder = Path(folder)
        mend = f"with: python data/char_diffusion/prepare.py --out_dir={folder}"
        mend += " (and --input=FILE for a text of your own)"
        try:
            self.vocabulary = json.loads((folder / "meta.json").read_text())["vocabulary"]
            self.tokens = np.fromfile(folder / f"{split}.bin", dtype=np.uint8)  # (characters,)
        except UNREADABLE as error:
            raise ValueError(f"dataset {folder} cannot be read ({error}); make it {mend}") from None
        if not is_vocabulary(self.vocabulary):
            raise ValueError(
                f"dataset {folder} cannot be read (its vocabulary must be different ASCII"
                f" characters, the last one {BLANK!r}); make it {mend}"
            )
        self.mask_id = len(self.vocabulary) - 1
        # What separates words.
        self.spaces = np.array([i for i, c in enumerate(self.vocabulary) if c.isspace()])
        if not self.tokens.size or self.tokens.max() >= self.mask_id:
            raise ValueError(
                f"dataset {folder}/{split}.bin is empty or does not fit its meta.json;"
                f" make both again {mend}"
            )

    def decode(self, row):
        """(T,) tokens -> str; a blank reads `_`."""
        return "".join(self.vocabulary[t] for t in row)

    def batch(self, size, block_size, masking, mask_ratio, words, seed):
        """-> tokens (B,T) int64, mask (B,T) bool, on the CPU.

        `seed` is a tuple of whole numbers, `mask_ratio` and `words` are one number or (B,).
        """
        rng = np.random.default_rng(seed)
        starts = rng.integers(len(self.tokens) - block_size + 1, size=size)  # (B,)
        text = self.tokens[starts[:, None] + np.arange(block_size)]  # (B,T)
        is_space = np.isin(text, self.spaces)  # (B,T)
        mask = make_mask(is_space, masking, mask_ratio, words, rng)  # (B,T)
        return torch.from_numpy(text).long(), torch.from_numpy(mask)


class Prompts(Dataset):
    """The same text, but batches are drawn from the user's own inputs.

    They are JSON, {"prompts": ["th_ c_t", ...]}, `_` for a blank; those shorter than block_size
    end in PAD. What the blanks hid is unknown: the tokens have the vocabulary's letter `a` there,
    or its first character.
    """

    cuts_words = False

    def __init__(self, folder, split, path, block_size):
        super().__init__(folder, split)
        example = '{"prompts": ["th_ c_t", ...]}'
        try:
            prompts = json.loads(Path(path).read_text(encoding="utf-8-sig"))["prompts"]
        except UNREADABLE as error:
            raise ValueError(
                f"prompts_file={path} cannot be read ({type(error).__name__}: {error});"
                f" it must hold JSON: {example}"
            ) from None
        if not isinstance(prompts, list) or not prompts:
            raise ValueError(f"prompts_file={path} holds no prompts; write {example}")
        self.prompts = torch.full((len(prompts), block_size), PAD)  # (prompts,T)
        for i, prompt in enumerate(prompts):
            tokens = encode(prompt, self.vocabulary, block_size, f"prompts_file={path}: prompt {i}")
            self.prompts[i, : len(tokens)] = tokens

    def batch(self, size, block_size, masking, mask_ratio, words, seed):
        """As `Dataset.batch`; the prompts bring their own masks."""
        rng = np.random.default_rng(seed)
        chosen = torch.from_numpy(rng.integers(len(self.prompts), size=size))  # (B,)
        rows = self.prompts[chosen]  # (B,T)
        mask = rows == self.mask_id  # (B,T)
        some_letter = max(0, self.vocabulary.find("a"))
        return rows.masked_fill(mask, some_letter), mask
