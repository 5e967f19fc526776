"""Read a text, a file of lines, or prompts, and draw batches of inputs with blanks.

A batch is a function of its seed alone, and the number of the step is part of that seed. So a
resumed run draws what it would have drawn anyway, and several processes draw the same inputs before
each of them takes its share.

Shapes: B inputs, T characters.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.masking import MASKINGS, make_mask
from data.rules import LINE_RULES, Rule, WordRule
from data.sums.prepare import prepare as prepare_sums
from data.user_mistake import Mistake
from data.vocabulary import (
    BLANK,
    MASK_ID,
    PAD,
    TEXT_CHARACTERS,
    VOCABULARY,
    encode,
    normalize,
)

DIGITS = {"sums": 3, "sums2": 2}  # the datasets that a run makes, and the digits of a number
TRIES = 200  # how often an input with nothing to hide is drawn again


@dataclass
class Dataset:
    """Inputs to draw from: all windows of a text, or whole lines, or a user's prompts.

    Prompts come with blanks of their own, and then those are what's hidden, whatever the masking.
    Nobody knows what was there, so `batch` puts an `a`.
    """

    inputs: Tensor  # (inputs,T)
    lines: list[str]  # the whole split; of a text, that's one line
    rule: Rule | None  # says which completions are good (data/rules.py)
    vocab_size: int  # the inputs need this many characters of VOCABULARY

    def batch(self, size: int, masking: str, seed: tuple) -> tuple[Tensor, Tensor]:
        """Draw inputs and what to hide of them: -> tokens, mask, each (B,T).

        Raises a Mistake if hardly any input has what `masking` hides.
        """
        rng = np.random.default_rng(seed)
        tokens, mask = self.draw(size, masking, rng)
        for _ in range(TRIES):
            empty = ~mask.any(dim=1)  # (B,) these have nothing to hide, so draw others
            if not empty.any():
                return tokens, mask
            tokens[empty], mask[empty] = self.draw(int(empty.sum()), masking, rng)
        raise Mistake(
            f"masking={masking} finds nothing to hide in this dataset; use another of"
            f" {', '.join(MASKINGS)}"
        )

    def draw(self, size: int, masking: str, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Draw inputs: -> tokens, mask, each (B,T). A row of the mask may be empty."""
        drawn = torch.from_numpy(rng.integers(len(self.inputs), size=size))  # (B,)
        tokens = self.inputs[drawn]  # (B,T)
        mask = tokens == MASK_ID  # (B,T)
        if mask.any():
            return tokens.masked_fill(mask, VOCABULARY.index("a")), mask
        characters = np.array(list(VOCABULARY))[tokens]  # (B,T)
        return tokens, torch.from_numpy(make_mask(characters, masking, rng))


def files_of(dataset: str, held_out: str = "val") -> tuple[Path, Path]:
    """Name the files to train on and to measure on: data/NAME/train.txt and data/NAME/val.txt.

    NAME may be an absolute path. What's held out of our own datasets has another half, choose.txt:
    settings are chosen on that, and results reported on val.txt.
    """
    folder = Path("data", dataset)
    return folder / "train.txt", folder / f"{held_out}.txt"


def make_if_missing(dataset: str) -> None:
    """Make the sums that ship, unless they're there already.

    Several processes may do so at once, because they write the same bytes.
    """
    train, _ = files_of(dataset)  # the last file to be written
    if dataset in DIGITS and not train.exists():
        prepare_sums(train.parent, DIGITS[dataset])


def read_splits(dataset: str, held_out: str, block_size: int) -> tuple[Dataset, Dataset]:
    """Read what to train on, and what to measure on. Raises a Mistake if nothing is held out."""
    files = files_of(dataset, held_out)
    train, other = (read_dataset(file, block_size) for file in files)
    if {*other.lines} <= {*train.lines}:
        raise Mistake(f"{files[1]} has nothing that isn't in train.txt, too; hold something out")
    return train, other


def read_dataset(file: Path, block_size: int) -> Dataset:
    """Read train.txt or val.txt, or raise a Mistake that says what's wrong with it.

    If most lines have block_size characters, each line is an input. Any other file is a text, of
    which we keep the words of a to z, and every window of block_size characters is an input.
    """
    try:
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise Mistake(f"{file} isn't UTF-8; save it as UTF-8") from None
    lines = [line for line in content.splitlines() if line]
    fitting = sum(len(line) == block_size for line in lines)
    if 2 * fitting > len(lines):
        return lines_dataset(file, lines, block_size)
    return text_dataset(file, content, block_size)


def lines_dataset(file: Path, lines: list[str], block_size: int) -> Dataset:
    """Make a dataset of lines. It has the first rule that finds all of them good, if there's one.

    Raises a Mistake if a line has another length, or characters that aren't in the vocabulary.
    """
    allowed = set(VOCABULARY) - {BLANK}
    for line in lines:
        if len(line) != block_size or not allowed.issuperset(line):
            raise Mistake(
                f"{file} has the line {line!r:.100}, but most have block_size={block_size}"
                " characters; change it, or block_size, and use only a to z, digits, +, = and space"
            )
    fitting = (rule for rule in LINE_RULES if all(rule.is_good(line, line) for line in lines))
    return Dataset(
        inputs=encode("".join(lines)).view(-1, block_size),
        lines=lines,
        rule=next(fitting, None),
        vocab_size=len(VOCABULARY),
    )


def text_dataset(file: Path, content: str, block_size: int) -> Dataset:
    """Make a dataset of a text's words. Raises a Mistake if most of it isn't a to z."""
    text = normalize(content)
    if len(text) < max(block_size, len(content) / 2):
        raise Mistake(
            f"{file} is neither lines of block_size={block_size} characters each, nor a text"
            " that's mostly a to z; change block_size, or the file"
        )
    return Dataset(
        inputs=encode(text).unfold(0, block_size, 1),  # (windows,T), which share memory
        lines=[text],
        rule=WordRule(text),
        vocab_size=TEXT_CHARACTERS,
    )


def encode_prompt(
    text: str, longest: int, name: str, vocab_size: int = TEXT_CHARACTERS
) -> Tensor:  # (T,)
    """Turn a text with blanks into tokens (T,), with T <= longest.

    The model knows the first `vocab_size` characters of VOCABULARY. Raises a Mistake that starts
    with `name` if the text has others, is too long, or has no blank.
    """
    known = VOCABULARY[:vocab_size]
    if not set(text) <= set(known) or len(text) > longest or BLANK not in text:
        raise Mistake(
            f"{name} {text!r:.100} can't be filled; write at most {longest} of the characters"
            f" {known!r}, with {BLANK} for each one to fill in"
        )
    return encode(text)


def read_prompts(path: str, train: Dataset, block_size: int) -> Dataset:
    """Read the user's own inputs, which replace those of the dataset `train`.

    They come as JSON, {"prompts": ["th_ c_t", ...]}, with `_` for a blank. A prompt shorter than
    block_size ends in PAD.
    """
    setting = f"prompts_file={path}"
    try:
        prompts = json.loads(Path(path).read_text(encoding="utf-8-sig"))["prompts"]
        if not isinstance(prompts, list) or not prompts:
            raise TypeError("no list of prompts")
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise TypeError("a prompt isn't a text")
    except (ValueError, TypeError, KeyError) as error:
        raise Mistake(
            f'{setting} has to hold {{"prompts": ["th_ c_t", ...]}} as JSON ({error!r}); fix it'
        ) from None
    rows = torch.full((len(prompts), block_size), PAD)  # (prompts,T)
    for i, prompt in enumerate(prompts):
        tokens = encode_prompt(prompt, block_size, f"{setting}: prompt {i}", train.vocab_size)
        rows[i, : len(tokens)] = tokens
    return replace(train, inputs=rows)
