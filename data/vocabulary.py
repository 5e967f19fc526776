"""Turn texts into tokens and back. A token is an index into VOCABULARY.

Text needs only the characters up to and including the blank, TEXT_CHARACTERS of them. The
characters used by sums come after the blank, and a model made for text doesn't know them.

Shapes: T characters.
"""

import re
import string
import unicodedata

import numpy as np
import torch
from torch import Tensor

BLANK = "_"  # the mask token, so it's never a character of the text
VOCABULARY = " " + string.ascii_lowercase + BLANK + string.digits + "+="
MASK_ID = VOCABULARY.index(BLANK)
TEXT_CHARACTERS = MASK_ID + 1  # with the blank
PAD = -1  # fills up a prompt shorter than block_size; not a character


# letters that aren't an a to z with an accent
LATIN = {"æ": "ae", "đ": "d", "ı": "i", "ł": "l", "ø": "o", "œ": "oe"}


def normalize(text: str) -> str:
    """Turn a text into words of a to z, with one space between two: `Didn't!` -> `didnt`."""
    text = unicodedata.normalize("NFKD", text)
    text = "".join(c for c in text if not unicodedata.combining(c)).casefold()
    text = text.translate(str.maketrans(LATIN))
    text = re.sub(r"\b['’]\b", "", text)
    return re.sub("[^a-z]+", " ", text).strip()


def decode(tokens: Tensor) -> list[str]:
    """Turn tokens (...,T) into a flat list of strings, without the padding at their ends."""
    table = np.frombuffer((VOCABULARY + "\0").encode("ascii"), dtype=np.uint8)  # PAD is -1
    joined = table[tokens.cpu().numpy()].tobytes().decode("ascii")
    T = tokens.shape[-1]
    return [joined[i : i + T].rstrip("\0") for i in range(0, len(joined), T)]


def encode(text: str) -> Tensor:
    """Turn a text whose characters are all in VOCABULARY into tokens (T,)."""
    token = np.zeros(128, dtype=np.int64)
    token[list(VOCABULARY.encode("ascii"))] = range(len(VOCABULARY))
    return torch.from_numpy(token[np.frombuffer(text.encode("ascii"), dtype=np.uint8)])


def highlight(text: str, mask: list[bool]) -> str:
    """Put what was filled into the blanks in [brackets]. mask (T,) is True at a blank."""
    pieces = [f"[{c}]" if blank else c for c, blank in zip(text, mask)]
    return "".join(pieces).replace("][", "")
