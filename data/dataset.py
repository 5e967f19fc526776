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

from data.files import find
from data.masking import MASKINGS, make_mask, parse_masking
from data.per_word import number_words
from data.sums.prepare import prepare as prepare_sums
from data.sums.rule import correct_answers, is_correct
from data.user_mistake import Mistake
from data.vocabulary import (
    BLANK,
    MASK_ID,
    PAD,
    SPACE,
    TEXT_CHARACTERS,
    VOCABULARY,
    encode,
    normalize,
)

# the datasets that a run makes: digits of a number, and which held-out results val.txt has
MADE = {"sums": (3, "report"), "sums2": (2, "report"), "sums_choose": (3, "choose")}
SPLITS = ("train", "val")
KINDS = {"text": "a text", "sums": "sums", "lines": "lines that aren't all correct sums"}


@dataclass
class Dataset:
    """Inputs to draw from: all windows of a text, or whole lines, or a user's prompts.

    Prompts come with blanks of their own, and then those are what's hidden, whatever the masking.
    Nobody knows what was there, so `batch` puts an `a`.
    """

    inputs: Tensor  # (inputs,T)
    lines: list[str]  # the whole split; of a text, that's one line
    kind: str  # text, sums, or lines, which are anything else that comes line by line
    # If only spaces end words, a sum is one word. Otherwise each run of blanks is a word.
    spaces_end_words: bool = True

    @property
    def vocab_size(self) -> int:
        return TEXT_CHARACTERS if self.kind == "text" else len(VOCABULARY)

    def batch(self, size: int, masking: str, seed: tuple) -> tuple[Tensor, Tensor, Tensor]:
        """Draw inputs and what to hide of them: -> tokens, mask, words, each (B,T).

        mask is True at a blank, and words numbers the hidden words of each input 1, 2, 3, ...
        """
        rng = np.random.default_rng(seed)
        drawn = torch.from_numpy(rng.integers(len(self.inputs), size=size))  # (B,)
        tokens = self.inputs[drawn]  # (B,T)
        mask = tokens == MASK_ID  # (B,T)
        if mask.any():
            tokens = tokens.masked_fill(mask, VOCABULARY.index("a"))  # (B,T)
        else:
            characters = np.array(list(VOCABULARY))[tokens]  # (B,T)
            mask = torch.from_numpy(make_mask(characters, masking, rng))  # (B,T)
        ends = tokens == SPACE if self.spaces_end_words else ~mask  # (B,T)
        return tokens, mask, number_words(ends, mask)

    def check_masking(self, masking: str) -> None:
        """Raise a Mistake if a part of `masking` makes no sense for these inputs."""
        senseless = {"random", "word", "short"} if self.kind == "sums" else {"columns", "digits"}
        if not any(" " in line for line in self.lines):
            senseless |= {"word", "short"}
        if senseless & parse_masking(masking).keys():
            allowed = [name for name in MASKINGS if name not in senseless]
            raise Mistake(
                f"masking={masking} does not suit {KINDS[self.kind]}; use"
                f" {' or '.join(allowed)}, for example --masking={allowed[0]}"
            )


def make_if_missing(dataset: str) -> None:
    """Make the sums that ship, unless both of their parts are there already."""
    folder = find(Path("data", dataset))
    if dataset in MADE and not all((folder / f"{split}.txt").exists() for split in SPLITS):
        print(f"making {folder}", flush=True)
        prepare_sums(folder, *MADE[dataset])


def read_splits(dataset: str, block_size: int) -> tuple[Dataset, Dataset]:
    """Read train and val of a dataset: the name of a folder under data/, or an absolute path.

    Raises a Mistake if they're of different kinds, or if val has nothing that train doesn't have.
    """
    folder = find(Path("data", dataset))
    train, val = (read_dataset(folder / f"{split}.txt", block_size) for split in SPLITS)
    if train.kind != val.kind:
        raise Mistake(f"{folder}: train is {KINDS[train.kind]}, but val is {KINDS[val.kind]}")
    if set(val.lines) <= set(train.lines):
        raise Mistake(
            f"{folder}: all of val is in train, so nothing is held out; change one of them"
        )
    return train, val


def read_dataset(file: Path, block_size: int) -> Dataset:
    """Read train.txt or val.txt, or raise a Mistake that says what's wrong with it.

    If all lines have block_size characters, each is an input, and if all of them are correct sums,
    that's what they are. Any other file is a text, of which we keep the words of a to z. Every
    window of block_size characters is an input then, and each run of blanks a word.
    """
    if not file.exists():
        raise Mistake(f"there is no {file}; a dataset is a folder with train.txt and val.txt")
    try:
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Mistake(f"{file} isn't UTF-8 ({error.reason}); save it as UTF-8") from None
    lines = [line for line in content.splitlines() if line]
    others = [line for line in lines if len(line) != block_size]
    if 2 * len(others) >= len(lines):
        return text_dataset(file, content, block_size)
    if others:
        raise Mistake(
            f"{file} has the line {others[0]!r:.100}, but most have block_size={block_size}"
            " characters; change that line, or block_size"
        )
    allowed = VOCABULARY.replace(BLANK, "")
    unknown = "".join(sorted(set("".join(lines)) - set(allowed)))
    if unknown:
        raise Mistake(f"{file} has the characters {unknown!r:.100}; use only {allowed!r}")
    kind = "sums" if all(map(is_correct, lines)) else "lines"
    return Dataset(encode("".join(lines)).view(-1, block_size), lines, kind)


def text_dataset(file: Path, content: str, block_size: int) -> Dataset:
    """Make a dataset of a text's words. Raises a Mistake if most of it isn't a to z."""
    text = normalize(content)
    if len(text) < max(block_size, len(content) / 2):
        first = content.partition("\n")[0]
        raise Mistake(
            f"{file} isn't lines of block_size={block_size} characters each (the first has"
            f" {len(first)}), and as a text it has only {len(text)} letters and spaces; change"
            " block_size, or the file"
        )
    windows = encode(text).unfold(0, block_size, 1)  # (windows,T), which share memory
    return Dataset(windows, [text], "text", spaces_end_words=False)


def encode_prompt(
    text: str, longest: int, name: str, vocab_size: int = TEXT_CHARACTERS
) -> Tensor:  # (T,)
    """Turn a text with blanks into tokens (T,), with T <= longest.

    The model knows the first `vocab_size` characters of VOCABULARY. Raises a Mistake that starts
    with `name` if the text has others, is too long, or has no blank.
    """
    known = VOCABULARY[:vocab_size]
    for c in text:
        if c not in known:
            raise Mistake(f"{name} {text!r:.100} has {c!r}; this model only knows {known!r}")
    if len(text) > longest:
        raise Mistake(
            f"{name} {text!r:.100} has {len(text)} characters, more than {longest}; shorten it"
        )
    if BLANK not in text:
        raise Mistake(
            f"{name} {text!r:.100} has no blank; write {BLANK} for each character to fill in"
        )
    return encode(text)


def read_prompts(path: str, train: Dataset, block_size: int) -> Dataset:
    """Read the user's own inputs, which replace those of the dataset `train`.

    They come as JSON, {"prompts": ["th_ c_t", ...]}, with `_` for a blank. A prompt shorter than
    block_size ends in PAD.
    """
    setting = f"prompts_file={path}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise Mistake(f"{setting} can't be read as JSON ({error}); fix it") from None
    prompts = content.get("prompts") if isinstance(content, dict) and len(content) == 1 else None
    if not isinstance(prompts, list) or set(map(type, prompts)) != {str}:
        raise Mistake(f'{setting} has to hold {{"prompts": ["th_ c_t", ...]}} and nothing else')
    rows = torch.full((len(prompts), block_size), PAD)  # (prompts,T)
    for i, prompt in enumerate(prompts):
        tokens = encode_prompt(prompt, block_size, f"{setting}: prompt {i}", train.vocab_size)
        unknown = train.kind != "sums" or BLANK in prompt.rpartition("=")[2]  # the result
        if not unknown and not correct_answers(prompt):
            raise Mistake(f"{setting}: prompt {i} {prompt!r} has no correct answer; change it")
        rows[i, : len(tokens)] = tokens
    return replace(train, inputs=rows, spaces_end_words=True)
