"""Read a prepared text or a file of lines, and draw batches of inputs with blanks from it.

A batch is a function of its seed alone, and the seed contains the number of the step. So a resumed
run draws what it would have drawn without the stop, and several processes draw the same inputs
before each process takes its share.

Shapes: B inputs, T characters.
"""

import json
import shlex
from pathlib import Path

import numpy as np
import torch

from data.masking import make_mask
from data.per_word import number_words, words_between_spaces
from data.text.prepare import normalise
from data.user_mistake import Mistake, refuse
from data.vocabulary import BLANK, MASK_ID, PAD, TEXT_CHARACTERS, VOCABULARY, encode


def typed_words(tokens):
    """Number the words with blanks of texts that a person typed: tokens (B,T) -> words (B,T)."""
    return words_between_spaces(tokens == VOCABULARY.index(" "), tokens == MASK_ID)


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


def read_dataset(folder, split, block_size):
    """Read the train or val part of a dataset: -> `Lines` if it is SPLIT.txt, or else `Dataset`."""
    file = Path(folder) / f"{split}.txt"
    return read_lines(file, block_size) if file.exists() else Dataset(folder, split, block_size)


class Dataset:
    """The train or val part of a prepared text. A token is an index into VOCABULARY."""

    def __init__(self, folder, split, block_size):
        """Read the part `split` of the dataset in `folder`.

        Raises a Mistake if it is missing, holds something else or is shorter than block_size.
        """
        file = Path(folder) / f"{split}.bin"
        out = shlex.quote(str(folder))
        make = f"make it with: python -m data.text.prepare --input=FILE --out_dir={out}"
        refuse(not file.exists(), f"there is no {file}; {make}")
        self.block_size = block_size
        self.tokens = np.fromfile(file, dtype=np.uint8)  # (characters,)
        refuse(
            len(self.tokens) < block_size,
            f"{file} has {len(self.tokens)} characters, fewer than block_size={block_size};"
            f" lower block_size, or use a longer text and {make}",
        )
        refuse(self.tokens.max() >= MASK_ID, f"{file} holds no text of a to z; {make}")
        self.vocab_size = TEXT_CHARACTERS

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
        tokens, mask = torch.from_numpy(text).long(), torch.from_numpy(mask)
        return tokens, mask, self.number_words(tokens, mask)

    def number_words(self, tokens, mask):
        """Number the hidden words: tokens, mask (B,T) -> (B,T). Each run of blanks is one."""
        return number_words(mask)


class Lines:
    """Inputs that are whole lines: the lines of a file, such as sums, or what a person typed.

    All blanks of a line between two spaces are one word. So a sum is one word, although its blanks
    are not adjacent. If the lines have blanks already, those are hidden, and not what the settings
    say. Nobody knows what they hide, so `batch` puts the letter `a` there.
    """

    def __init__(self, rows, tokens, vocab_size):
        """Keep the lines `rows` (lines,T), the tokens of the training text, and the vocabulary."""
        self.rows = rows
        self.has_blanks = bool((rows == MASK_ID).any())
        self.tokens = tokens
        self.vocab_size = vocab_size

    def batch(self, size, masking, mask_ratio, words, seed):
        """Draw lines, and decide what to hide: -> tokens, mask, words, each (B,T).

        The arguments are those of `Dataset.batch`.
        """
        rng = np.random.default_rng(seed)
        rows = self.rows[torch.from_numpy(rng.integers(len(self.rows), size=size))]  # (B,T)
        if self.has_blanks:
            mask = rows == MASK_ID  # (B,T)
            tokens = rows.masked_fill(mask, VOCABULARY.index("a"))  # (B,T)
        else:
            characters = np.array(list(VOCABULARY))[rows]  # (B,T)
            mask = torch.from_numpy(make_mask(characters, masking, mask_ratio, words, rng))
            tokens = rows
        return tokens, mask, self.number_words(tokens, mask)

    def number_words(self, tokens, mask):
        """Number the hidden words: tokens, mask (B,T) -> (B,T). Spaces separate them."""
        return words_between_spaces(tokens == VOCABULARY.index(" "), mask)


def read_lines(file, block_size):
    """Read a file of lines that all have block_size characters: -> `Lines`, or a Mistake."""
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
    rows = encode(text).view(-1, block_size)  # (lines,T)
    return Lines(rows, rows.flatten().numpy(), len(VOCABULARY))


def read_prompts(path, train, block_size):
    """Read the user's own inputs, which replace those of the dataset `train`: -> `Lines`.

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
    return Lines(rows, train.tokens, train.vocab_size)
