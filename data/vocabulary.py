"""Turn texts into tokens and back. A token is an index into VOCABULARY.

Shapes: T characters.
"""

import string

import numpy as np
import torch

BLANK = "_"  # the mask token, so it is never a character of the text
VOCABULARY = " " + string.ascii_lowercase + BLANK
MASK_ID = VOCABULARY.index(BLANK)
PAD = -1  # fills the end of a prompt shorter than block_size; it is no character


def decode(tokens):
    """Turn tokens (...,T) into a flat list of strings."""
    table = np.frombuffer(VOCABULARY.encode("ascii"), dtype=np.uint8)
    rows = tokens.reshape(-1, tokens.shape[-1]).cpu().numpy()
    return [row.tobytes().decode("ascii") for row in table[rows]]


def encode(text):
    """Turn a text whose characters are all in VOCABULARY into tokens (T,)."""
    return torch.tensor([VOCABULARY.index(c) for c in text])
