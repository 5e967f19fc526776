"""Batches of masked inputs. The batch of step i is a function of (seed, i) alone, so resuming needs no data state,
and any number of processes agree on the whole step's inputs before each takes its slice.
"""

import json
from pathlib import Path

import numpy as np
import torch

from data.char_diffusion.prepare import BLANK
from data.masking import make_mask

PAD = -1  # follows a prompt that is shorter than the others: no character


def is_vocabulary(text):
    """Different ASCII characters, two or more, of which the blank is the last."""
    return (
        isinstance(text, str)
        and text.isascii()
        and len(set(text)) == len(text)
        and text[1:].endswith(BLANK)
    )


def encode(text, vocabulary, longest, name):
    """A text with blanks -> (T,) tokens. ValueError for one that the models cannot read, or that has nothing to fill."""
    if (
        not isinstance(text, str)
        or set(text) - set(vocabulary)
        or BLANK not in text
        or len(text) > longest
    ):
        raise ValueError(
            f"{name} is {text!r:.100}; it takes up to {longest} characters, of {vocabulary!r}, with at least one blank {BLANK!r}"
        )
    return torch.tensor([vocabulary.index(c) for c in text])


class Dataset:
    """One split of a prepared text: `vocabulary` (str; index = token), `mask_id`, and `batch()`."""

    def __init__(self, folder, split):
        """Raises ValueError for a folder without a prepared text, or whose files do not belong together."""
        folder = Path(folder)
        try:
            self.vocabulary = json.loads((folder / "meta.json").read_text())["vocabulary"]
            self.tokens = np.fromfile(folder / f"{split}.bin", dtype=np.uint8)  # (N,)
            if not is_vocabulary(self.vocabulary):
                raise ValueError(
                    f"its vocabulary must be different ASCII characters, the last one {BLANK!r}"
                )
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f"dataset {folder} cannot be read ({error}); make it with: python data/char_diffusion/prepare.py --out_dir={folder}"
            ) from None
        self.mask_id = len(self.vocabulary) - 1
        self.spaces = np.array(
            [i for i, c in enumerate(self.vocabulary) if c.isspace()]
        )  # what separates words
        if not self.tokens.size or self.tokens.max() >= self.mask_id:
            raise ValueError(
                f"dataset {folder}/{split}.bin is empty or does not fit its meta.json; make both again with data/char_diffusion/prepare.py"
            )

    def decode(self, row):
        """(T,) tokens -> str; a blank reads `_`."""
        return "".join(self.vocabulary[t] for t in row)

    def batch(self, size, block_size, masking, mask_ratio, words, seed):
        """-> tokens (B,T) int64, mask (B,T) bool, on the CPU; `seed` is a tuple of whole numbers, `mask_ratio` and `words` one number or (B,)."""
        rng = np.random.default_rng(seed)
        starts = rng.integers(len(self.tokens) - block_size + 1, size=size)
        text = self.tokens[starts[:, None] + np.arange(block_size)].astype(np.int64)  # (B,T)
        mask = make_mask(np.isin(text, self.spaces), masking, mask_ratio, words, rng)  # (B,T)
        return torch.from_numpy(text), torch.from_numpy(mask)


class Prompts(Dataset):
    """The same text, but batches are drawn from the user's own inputs: JSON {"prompts": ["th_ c_t", ...]}, `_` for a blank.
    What the blanks hid is unknown: the tokens have the vocabulary's letter `a` there, or its first character. Prompts shorter than block_size end in PAD."""

    def __init__(self, folder, split, path, block_size):
        super().__init__(folder, split)
        try:
            prompts = json.loads(Path(path).read_text(encoding="utf-8-sig"))["prompts"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(
                f'prompts_file={path} cannot be read ({type(error).__name__}: {error}); it must hold JSON: {{"prompts": ["th_ c_t", ...]}}'
            ) from None
        if not isinstance(prompts, list) or not prompts:
            raise ValueError(
                f'prompts_file={path} holds no prompts; write {{"prompts": ["th_ c_t", ...]}}'
            )
        self.prompts = torch.full((len(prompts), block_size), PAD)  # (P,T)
        for i, prompt in enumerate(prompts):
            tokens = encode(prompt, self.vocabulary, block_size, f"prompts_file={path}: prompt {i}")
            self.prompts[i, : len(tokens)] = tokens

    def batch(self, size, block_size, masking, mask_ratio, words, seed):
        """As `Dataset.batch`; the prompts bring their own masks."""
        rows = self.prompts[
            torch.from_numpy(np.random.default_rng(seed).integers(len(self.prompts), size=size))
        ]  # (B,T)
        mask = rows == self.mask_id
        return rows.masked_fill(mask, max(0, self.vocabulary.find("a"))), mask
