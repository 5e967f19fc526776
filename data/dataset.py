"""Read a prepared text or a file of lines, and draw batches of inputs with blanks from it.

A batch is a function of its seed alone, and the seed contains the number of the step. So a resumed
run draws what it would have drawn without the stop, and several processes draw the same inputs
before each process takes its share.

Shapes: B inputs, T characters.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from data.masking import make_mask
from data.per_word import number_words, words_between
from data.text.prepare import normalise
from data.user_mistake import Mistake, refuse
from data.vocabulary import BLANK, MASK_ID, PAD, TEXT_CHARACTERS, VOCABULARY, encode


def typed_words(tokens, mask):
    """Number the words of sums, or of what a person typed: tokens, mask (B,T) -> words (B,T).

    All blanks between two spaces belong to one word. So a sum is one word, although its blanks are
    not adjacent.
    """
    return words_between(tokens == VOCABULARY.index(" "), mask)


def encode_prompt(text, longest, name, vocab_size=TEXT_CHARACTERS):
    """Normalise a text with blanks, and turn it into tokens (T,), with T <= longest.

    Characters beyond the first `vocab_size` of VOCABULARY become spaces. Raises a Mistake if the
    text is too long or has no blank. The message begins with `name`.
    """
    of_sums = VOCABULARY[TEXT_CHARACTERS:vocab_size]
    # `normalise` strips the spaces at both ends of a text. To keep the spaces at the ends of a
    # piece, we put an x at each end, and cut both off afterwards.
    pieces = [normalise(f"x{piece}x", of_sums)[1:-1] for piece in text.split(BLANK)]
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


@dataclass
class Dataset:
    """Inputs to draw from: all windows of a text, or whole lines, such as sums or a user's prompts.

    If the inputs have blanks already, those are hidden, and not what the settings say. Nobody knows
    what they hide, so `batch` puts the letter `a` there.
    """

    inputs: torch.Tensor  # (inputs,T)
    text: torch.Tensor  # (characters,) the tokens of the whole training text
    vocab_size: int
    number_words: Callable  # numbers the hidden words: tokens, mask (B,T) -> (B,T)

    def batch(self, size, masking, mask_ratio, words, seed):
        """Draw inputs, and decide what to hide: -> tokens, mask, words, each (B,T).

        `make_mask` explains masking, mask_ratio and words, and `seed` is a tuple of whole numbers.
        Of the result, mask is True at a blank, and words numbers the hidden words of an input.
        """
        rng = np.random.default_rng(seed)
        drawn = torch.from_numpy(rng.integers(len(self.inputs), size=size))  # (B,)
        tokens = self.inputs[drawn].long()  # (B,T)
        mask = tokens == MASK_ID  # (B,T)
        if mask.any():
            tokens = tokens.masked_fill(mask, VOCABULARY.index("a"))  # (B,T)
        else:
            characters = np.array(list(VOCABULARY))[tokens]  # (B,T)
            mask = torch.from_numpy(make_mask(characters, masking, mask_ratio, words, rng))
        return tokens, mask, self.number_words(tokens, mask)


def read_dataset(folder, split, block_size):
    """Read the train or val part of a dataset: SPLIT.txt, or else SPLIT.bin."""
    file = Path(folder) / f"{split}.txt"
    if file.exists():
        return read_lines(file, block_size)
    return read_windows(file.with_suffix(".bin"), block_size)


def read_windows(file, block_size):
    """Read a prepared text: -> `Dataset`, or a Mistake.

    An input is a window of block_size characters, and each run of blanks is a word.
    """
    out = shlex.quote(str(file.parent))
    make = f"make it with: python -m data.text.prepare --input=FILE --out_dir={out}"
    refuse(not file.exists(), f"there is no {file}; {make}")
    text = torch.from_numpy(np.fromfile(file, dtype=np.uint8))  # (characters,)
    refuse(
        len(text) < block_size,
        f"{file} has {len(text)} characters, fewer than block_size={block_size};"
        f" lower block_size, or use a longer text and {make}",
    )
    refuse(text.max() >= MASK_ID, f"{file} holds no text of a to z; {make}")
    windows = text.unfold(0, block_size, 1)  # (windows,T), which share the memory of `text`
    return Dataset(windows, text, TEXT_CHARACTERS, lambda _, mask: number_words(mask))


def read_lines(file, block_size):
    """Read a file of lines that all have block_size characters: -> `Dataset`, or a Mistake."""
    lines = file.read_text(encoding="utf-8-sig").splitlines()
    lengths = sorted(set(map(len, lines)))
    refuse(
        lengths != [block_size],
        f"the lines of {file} have {lengths[:3]} characters, but block_size={block_size}; all lines"
        " need the same length, and block_size has to be this length",
    )
    text = "".join(lines)
    unknown = "".join(sorted(set(text) - set(VOCABULARY) | set(text) & {BLANK}))
    allowed = VOCABULARY.replace(BLANK, "")
    refuse(unknown, f"{file} has the characters {unknown!r:.100}; use only {allowed!r}")
    tokens = encode(text)  # (characters,)
    return Dataset(tokens.view(-1, block_size), tokens, len(VOCABULARY), typed_words)


def read_prompts(path, train, block_size):
    """Read the user's own inputs, which replace those of the dataset `train`: -> `Dataset`.

    The inputs are JSON, {"prompts": ["th_ c_t", ...]}, with `_` for a blank. A prompt shorter than
    block_size ends in PAD.
    """
    try:
        prompts = json.loads(Path(path).read_text(encoding="utf-8-sig"))["prompts"]
        if type(prompts) is not list or set(map(type, prompts)) != {str}:
            raise TypeError("no list of texts")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Mistake(
            f"prompts_file={path} does not hold prompts ({type(error).__name__}: {error});"
            ' write JSON: {"prompts": ["th_ c_t", ...]}'
        ) from None
    rows = torch.full((len(prompts), block_size), PAD)  # (prompts,T)
    for i, prompt in enumerate(prompts):
        name = f"prompts_file={path}: prompt {i}"
        tokens = encode_prompt(prompt, block_size, name, train.vocab_size)  # (at most T,)
        rows[i, : len(tokens)] = tokens
    return replace(train, inputs=rows, number_words=typed_words)
