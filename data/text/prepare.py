"""Turn a text of yours into a dataset: train.txt and val.txt, a paragraph of a to z in each line.

    python -m data.text.prepare --input=my.txt --out_dir=data/mine

One paragraph in ten is held out.
"""

import argparse
import hashlib
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from data.files import write_dataset
from data.user_mistake import Mistake, exit_on_mistake

MIN_CHARACTERS = 1000  # the least that train.txt and val.txt may have


def cut(text: str) -> Iterator[str]:
    """Yield a text's paragraphs. Those of more than 1000 characters come in several pieces."""
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.findall(r"(?s).{1,1000}(?:\s|$)|.{1000}", paragraph)


def plain(text: str) -> str:
    """Turn a text into small letters without accents."""
    text = unicodedata.normalize("NFKD", text)
    text = "".join(c for c in text if not unicodedata.combining(c))
    return text.casefold()  # also turns ß into ss


def normalize(text: str, more: str = "") -> str:
    """Turn a text or a prompt into words of a to z, with one space between two words.

    Accents go, and `didn't` becomes `didnt`. A word may also have the characters in `more`.
    """
    text = re.sub(r"\b['’]\b", "", plain(text))
    return re.sub(f"[^a-z{re.escape(more)}]+", " ", text).strip()


def is_validation(paragraph: str) -> bool:
    """Pick one paragraph in ten for val.txt, by a hash of its text."""
    return hashlib.sha256(paragraph.encode()).digest()[0] < 26


def read_input(file: str | Path) -> str:
    """Read a user's text. If more than one letter in a hundred isn't a to z, say so."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Mistake(
            f"{file} cannot be read as UTF-8 text ({error}); name another file, or convert this one"
        ) from None
    letters = [c for c in plain(text) if c.isalpha()]
    lost = sum(c > "z" for c in letters) / max(1, len(letters))
    if lost > 0.01:
        print(f"{file}: {lost:.0%} of its letters are not a to z, and are left out")
    return text


def prepare(out_dir: str | Path, input_file: str | Path) -> None:
    """Write train.txt and val.txt into `out_dir`. A paragraph that occurs twice counts once.

    Raises a Mistake, with nothing written, if the text isn't UTF-8 or too short, or if the folder
    holds another text.
    """
    splits = {"train": {}, "val": {}}  # {paragraph: None}, without duplicates, in order
    for paragraph in map(normalize, cut(read_input(input_file))):
        if paragraph:
            splits["val" if is_validation(paragraph) else "train"][paragraph] = None
    for split, paragraphs in splits.items():
        characters = sum(map(len, paragraphs))
        if characters < MIN_CHARACTERS:
            raise Mistake(
                f"{input_file} has only {characters} letters and spaces for {split}.txt, but"
                f" {MIN_CHARACTERS} are needed; use a longer text, or one that repeats itself less"
            )
    write_dataset(out_dir, list(splits["train"]), list(splits["val"]))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__.split("\n")[0])
    parser.add_argument("--input", required=True, help="a UTF-8 text file")
    parser.add_argument("--out_dir", required=True, help="the folder of the dataset")
    args = parser.parse_args(argv)
    with exit_on_mistake("prepare"):
        if not args.out_dir:
            raise Mistake("--out_dir is empty; write for example --out_dir=data/mine")
        prepare(args.out_dir, args.input)
        print(f"{args.out_dir} holds train.txt and val.txt")


if __name__ == "__main__":
    main()
