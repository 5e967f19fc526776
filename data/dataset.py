"""Read a text, a file of lines, or prompts, and draw batches of inputs with blanks.

A batch is a function of its seed alone, and the number of the step is part of that seed. So a
resumed run draws what it would have drawn anyway, and several processes draw the same inputs before
each of them takes its share.

Shapes: B inputs, T characters.
"""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.files import PROJECT, find
from data.masking import MASKINGS, make_mask, parse_masking
from data.per_word import number_words, words_between
from data.sums.prepare import prepare as prepare_sums
from data.sums.rule import is_right, right_answers
from data.text.prepare import normalize, plain
from data.user_mistake import Mistake
from data.vocabulary import BLANK, MASK_ID, PAD, TEXT_CHARACTERS, VOCABULARY, decode, encode

DIGITS = {"sums": 3, "sums2": 2}  # of the datasets that a first run makes
SPLITS = ("train", "val")
KINDS = {"text": "a text", "sums": "sums", "lines": "lines that aren't all right sums"}


@dataclass
class Dataset:
    """Inputs to draw from: all windows of a text, or whole lines, or a user's prompts.

    Prompts come with blanks of their own, and then those are what's hidden, whatever the masking.
    Nobody knows what was there, so `batch` puts an `a`.
    """

    inputs: Tensor  # (inputs,T)
    lines: list[str]  # the whole split; of a text, that's one line
    kind: str  # text, sums, or lines, which are anything else that comes line by line
    spaces_end_words: bool = True  # or is each run of blanks a word?

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
        return tokens, mask, self.number_words(tokens, mask)

    def number_words(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Number the hidden words of each input: tokens, mask (B,T) -> words (B,T)."""
        return typed_words(tokens, mask) if self.spaces_end_words else number_words(mask)

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


def typed_words(tokens: Tensor, mask: Tensor) -> Tensor:
    """Number the words of lines, or of what a person typed: tokens, mask (B,T) -> words (B,T).

    All blanks between two spaces are one word. So a sum is one word, although its blanks aren't
    adjacent.
    """
    return words_between(tokens == VOCABULARY.index(" "), mask)


def make_if_missing(dataset: str) -> None:
    """Make the sums that ship, unless both of their parts are there already."""
    folder = find(Path("data", dataset))
    if dataset not in DIGITS or all((folder / f"{split}.txt").exists() for split in SPLITS):
        return
    print(f"making {folder}", flush=True)
    try:
        prepare_sums(folder, DIGITS[dataset])
    except OSError as error:
        project, other = shlex.quote(str(PROJECT)), shlex.quote(str(Path.home() / dataset))
        raise Mistake(
            f"{folder} can't be written ({error.strerror}); run `PYTHONPATH={project} python -m"
            f" data.sums.prepare --digits={DIGITS[dataset]} --out_dir={other}` and add"
            f" --dataset={other} to your command"
        ) from None


def read_splits(dataset: str, block_size: int) -> tuple[Dataset, Dataset]:
    """Read train and val of a dataset, a folder under data/ or any other path.

    Raises a Mistake if there's nothing in val that train doesn't have.
    """
    folder = find(Path("data", dataset))
    train, val = (read_dataset(folder / f"{split}.txt", block_size) for split in SPLITS)
    if set(val.lines) <= set(train.lines):
        raise Mistake(
            f"{folder}: all of val is in train, so nothing is held out; change one of them"
        )
    return train, val


def read_dataset(file: Path, block_size: int) -> Dataset:
    """Read train.txt or val.txt, or raise a Mistake that says what's wrong with it.

    If all lines have block_size characters, each is an input, and if all of them are right sums,
    that's what they are. Any other file is a text: every window of block_size characters is an
    input, and each run of blanks a word.
    """
    if not file.exists():
        out = shlex.quote(str(file.parent))
        make = f"python -m data.text.prepare --input=FILE --out_dir={out}"
        raise Mistake(f"there is no {file}; write lines to it, or make it from a text: {make}")
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise Mistake(f"{file} isn't UTF-8 ({error.reason}); save it as UTF-8") from None
    is_text = set(map(len, lines)) != {block_size}
    if is_text:
        lines = [" ".join(lines)]
    text = "".join(lines)
    allowed = VOCABULARY[:MASK_ID] if is_text else VOCABULARY.replace(BLANK, "")
    unknown = "".join(sorted(set(text) - set(allowed)))
    if unknown:
        raise Mistake(
            f"{file} has the characters {unknown!r:.100}; use only a to z and spaces, or lines of"
            f" exactly block_size={block_size} characters from {VOCABULARY!r}"
        )
    if len(text) < block_size:
        raise Mistake(
            f"{file} has {len(text)} characters, fewer than block_size={block_size}; lower"
            " block_size, or use a longer text"
        )
    tokens = encode(text)  # (characters,)
    if is_text:  # (windows,T), which share the memory of `tokens`
        windows = tokens.unfold(0, block_size, 1)
        return Dataset(windows, lines, "text", spaces_end_words=False)
    kind = "sums" if all(map(is_right, lines)) else "lines"
    return Dataset(tokens.view(-1, block_size), lines, kind)


def encode_prompt(
    text: str, longest: int, name: str, vocab_size: int = TEXT_CHARACTERS
) -> Tensor:  # (T,)
    """Normalize a text with blanks and turn it into tokens (T,), with T <= longest.

    The model knows the first `vocab_size` characters of VOCABULARY. Raises a Mistake that starts
    with `name` if the text is too long, has no blank, or means something the model can't read:
    accents and commas may go, but "room 101" isn't "room".
    """
    known = VOCABULARY[:vocab_size]
    lost = [c for c in plain(text) if (c.isalnum() or c in "+=") and c not in known]
    if lost:
        raise Mistake(
            f"{name} {text!r:.100} has {lost[0]!r}, which this model doesn't know; rewrite it with"
            f" only {known!r}"
        )
    text = normalize(text, VOCABULARY[MASK_ID:vocab_size])
    if len(text) > longest:
        raise Mistake(
            f"{name} {text!r:.100} has {len(text)} characters, more than {longest}; shorten it"
        )
    if BLANK not in text:
        raise Mistake(
            f"{name} {text!r:.100} has no blank; write {BLANK} for each character to fill in"
        )
    return encode(text)


def read_prompts(path: str, train: Dataset, block_size: int, say: Callable = print) -> Dataset:
    """Read the user's own inputs, which replace those of the dataset `train`.

    They come as JSON, {"prompts": ["th_ c_t", ...]}, with `_` for a blank. A prompt shorter than
    block_size ends in PAD. `say` gets a line about what the model reads differently, and one about
    results that no summands of that form have.
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
    changed, impossible = [], []
    for i, prompt in enumerate(prompts):
        tokens = encode_prompt(prompt, block_size, f"{setting}: prompt {i}", train.vocab_size)
        rows[i, : len(tokens)] = tokens
        (known,) = decode(tokens[None])
        if known != prompt:
            changed.append(f"prompt {i} {prompt!r:.100} as {known!r}")
        fixed = train.kind == "sums" and BLANK not in known.partition("=")[2]
        if fixed and not right_answers(known):
            impossible.append(f"prompt {i} {known!r}")
    if len(impossible) == len(prompts):
        raise Mistake(
            f"{setting}: none of the prompts has a right answer, first {impossible[0]}; change them"
        )
    of = f"of {len(prompts)} prompts"
    if changed:
        say(f"{setting}: the model reads {len(changed)} {of} differently, first {changed[0]}")
    if impossible:
        say(f"{setting}: no digits can make {len(impossible)} {of} right, first {impossible[0]}")
    return replace(train, inputs=rows, spaces_end_words=True)
