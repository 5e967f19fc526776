"""Read a prepared text, and draw batches of inputs with blanks from it.

A batch is a function of its seed alone, and the seed contains the number of the step. So a resumed
run draws what it would have drawn without the stop, and several processes draw the same inputs
before each process takes its share.

Shapes: B inputs, T characters.
"""

import json
from pathlib import Path

import numpy as np
import torch

from data.masking import make_mask
from data.per_word import number_words, words_between_spaces
from data.text.prepare import normalise
from data.user_mistake import Mistake, refuse
from data.vocabulary import BLANK, MASK_ID, PAD, VOCABULARY, encode


def typed_words(tokens):
    """Number the words with blanks of texts that a person typed: tokens (B,T) -> words (B,T)."""
    return words_between_spaces(tokens == VOCABULARY.index(" "), tokens == MASK_ID)


def encode_prompt(text, longest, name):
    """Normalise a text with blanks, and turn it into tokens (T,), with T <= longest.

    Raises a Mistake if the text is too long or has no blank. The message begins with `name`.
    """
    # `normalise` strips the spaces at both ends of a text. To keep the spaces at the ends of a
    # piece, we put an x at each end, and cut both off afterwards.
    pieces = [normalise(f"x{piece}x")[1:-1] for piece in text.split(BLANK)]
    text = BLANK.join(pieces).strip()
    refuse(
        len(text) > longest,
        f"{name} {text!r:.100} has {len(text)} characters, more than {longest}; shorten it",
    )
    refuse(
        BLANK not in text,
        f"{name} {text!r:.100} has no blank; write {BLANK} for each character to fill in",
    )
    return encode(text)


class Dataset:
    """The train or val part of a prepared text. A token is an index into VOCABULARY."""

    def __init__(self, folder, split, block_size):
        """Read the part `split` of the dataset in `folder`.

        Raises a Mistake if it is missing, holds something else or is shorter than block_size.
        """
        file = Path(folder) / f"{split}.bin"
        make = f"make it with: python -m data.text.prepare --input=FILE --out_dir={folder}"
        refuse(not file.exists(), f"there is no {file}; {make}")
        self.block_size = block_size
        self.tokens = np.fromfile(file, dtype=np.uint8)  # (characters,)
        refuse(
            len(self.tokens) < block_size,
            f"{file} has {len(self.tokens)} characters, fewer than block_size={block_size};"
            f" lower block_size, or use a longer text and {make}",
        )
        refuse(self.tokens.max() >= MASK_ID, f"{file} holds no text of a to z; {make}")

    def batch(self, size, masking, mask_ratio, words, seed):
        """Draw windows of the text, and decide what to hide: -> tokens, mask, words, each (B,T).

        `make_mask` explains masking, mask_ratio and words, and `seed` is a tuple of whole numbers.
        Of the result, mask is True at a blank, and words numbers the hidden words of an input.
        """
        rng = np.random.default_rng(seed)
        starts = rng.integers(len(self.tokens) - self.block_size + 1, size=size)  # (B,)
        text = self.tokens[starts[:, None] + np.arange(self.block_size)]  # (B,T)
        characters = np.array(list(VOCABULARY))[text]  # (B,T)
        mask = make_mask(characters, masking, mask_ratio, words, rng)  # (B,T)
        mask = torch.from_numpy(mask)
        return torch.from_numpy(text).long(), mask, number_words(mask)


class Prompts(Dataset):
    """A `Dataset` that draws its batches from the user's own inputs, and not from the text.

    The inputs are JSON, {"prompts": ["th_ c_t", ...]}, with `_` for a blank. A prompt shorter than
    block_size ends in PAD. Nobody knows what a blank hides, so `batch` puts the letter `a` there.
    """

    def __init__(self, folder, path, block_size):
        super().__init__(folder, "train", block_size)
        try:
            prompts = json.loads(Path(path).read_text(encoding="utf-8-sig"))["prompts"]
            if type(prompts) is not list or set(map(type, prompts)) != {str}:
                raise TypeError("no list of texts")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Mistake(
                f"prompts_file={path} does not hold prompts ({type(error).__name__}: {error});"
                ' write JSON: {"prompts": ["th_ c_t", ...]}'
            ) from None
        self.prompts = torch.full((len(prompts), block_size), PAD)  # (prompts,T)
        for i, prompt in enumerate(prompts):
            tokens = encode_prompt(prompt, block_size, f"prompts_file={path}: prompt {i}")
            self.prompts[i, : len(tokens)] = tokens

    def batch(self, size, masking, mask_ratio, words, seed):
        """Draw `size` of the user's prompts: -> tokens, mask, words, each (B,T).

        The prompts say what is hidden, so only `size` and `seed` matter here.
        """
        rng = np.random.default_rng(seed)
        chosen = torch.from_numpy(rng.integers(len(self.prompts), size=size))  # (B,)
        rows = self.prompts[chosen]  # (B,T)
        mask = rows == MASK_ID  # (B,T)
        return rows.masked_fill(mask, VOCABULARY.index("a")), mask, typed_words(rows)
