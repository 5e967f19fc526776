"""Turn texts into tokens and back. A token is an index into VOCABULARY.

A text needs only the characters up to the blank, TEXT_CHARACTERS of them. The characters of sums
stand behind the blank. A model that was made for texts does not know them.

Shapes: T characters.
"""

import string

import numpy as np
import torch

BLANK = "_"  # the mask token, so it is never a character of the text
VOCABULARY = " " + string.ascii_lowercase + BLANK + string.digits + "+="
MASK_ID = VOCABULARY.index(BLANK)
TEXT_CHARACTERS = MASK_ID + 1  # with the blank
PAD = -1  # fills the end of a prompt shorter than block_size; it is no character


def decode(tokens):
    """Turn tokens (...,T) into a flat list of strings. PAD becomes a blank."""
    table = np.frombuffer((VOCABULARY + BLANK).encode("ascii"), dtype=np.uint8)  # PAD is -1
    rows = tokens.reshape(-1, tokens.shape[-1]).cpu().numpy()
    return [row.tobytes().decode("ascii") for row in table[rows]]


def encode(text):
    """Turn a text whose characters are all in VOCABULARY into tokens (T,)."""
    token = np.zeros(128, dtype=np.int64)
    token[list(VOCABULARY.encode("ascii"))] = range(len(VOCABULARY))
    return torch.from_numpy(token[list(text.encode("ascii"))])


def highlight(text, mask):
    """Put the letters that stand in blanks into [brackets]: mask (T,) -> str."""
    pieces = [f"[{c}]" if blank else c for c, blank in zip(text, mask)]
    return "".join(pieces).replace("][", "")
