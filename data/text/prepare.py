"""Turn a text into train.bin and val.bin, with a byte for each character.

The default text is the English documentation of numpy and torch, in the versions that
requirements.txt pins, so you have it installed already. We read it with `ast` and import nothing.
`--input=FILE` takes any other text. Only a to z and the space survive, as in text8.

    python -m data.text.prepare
    python -m data.text.prepare --input=my.txt --out_dir=data/mine
"""

import argparse
import ast
import hashlib
import re
import unicodedata
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from data.files import write_dataset
from data.user_mistake import Mistake, exit_on_mistake
from data.vocabulary import VOCABULARY

SHARED = 40  # characters; a paragraph of val that shares as many with train is left out
MIN_CHARACTERS = 1000  # the least that train.bin and val.bin may have
SOURCES = {  # folders to read; all of torch would take too long for what it adds
    "numpy": "_core lib linalg fft random polynomial ma matrixlib",
    "torch": "nn optim distributions utils autograd linalg fft special func cuda amp masked",
}
LEARNED = "b1fad3dd8d50"  # how the SHA-256 of the shipped models' train.bin starts
PLAIN_WORD = re.compile(r"[\"'(*`]*[A-Za-z][a-z'-]*[\"').,:;*`?!]*")


def documentation() -> Iterator[str]:
    """Yield every string of two lines or more in the code of SOURCES, in a fixed order.

    That's mostly docstrings. We don't read `__doc__`, because some versions of Python strip the
    indentation there, and the text must not depend on the version.
    """
    for package, folders in SOURCES.items():
        root = Path(find_spec(package).origin).parent
        paths = list(root.glob("*.py"))
        for folder in folders.split():
            paths += (root / folder).rglob("*.py")
        for path in sorted(paths, key=Path.as_posix):
            if "tests" in path.parts:
                continue
            with warnings.catch_warnings(action="ignore"):  # some strings have invalid escapes
                tree = ast.parse(path.read_bytes())
            for node in ast.walk(tree):
                value = getattr(node, "value", None)
                if isinstance(node, ast.Constant) and isinstance(value, str) and "\n" in value:
                    yield value


def cut(text: str) -> Iterator[str]:
    """Yield a text's paragraphs. Those of more than 1000 characters come in several pieces."""
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.findall(r"(?s).{1,1000}(?:\s|$)|.{1000}", paragraph)


def is_prose(paragraph: str) -> bool:
    """Tell sentences from code, tables and console sessions."""
    words = paragraph.split()
    in_prose = [word for word in words if PLAIN_WORD.fullmatch(word)]
    return len(words) >= 8 and len(in_prose) >= 0.7 * len(words) and ">>>" not in paragraph


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
    """Pick one paragraph in ten for val.bin, by a hash of its text."""
    return hashlib.sha256(paragraph.encode()).digest()[0] < 26


def windows(text: str) -> Iterator[str]:
    """Yield every piece of SHARED characters of a text."""
    return (text[start : start + SHARED] for start in range(len(text) - SHARED + 1))


def hold_out(train: dict[str, None], val: dict[str, None]) -> list[str]:
    """Return the paragraphs of val that share no long piece with any of train.

    The docs of two functions often have sentences in common. What's in train.bin too wouldn't be
    held out.
    """
    of_val = {window for paragraph in val for window in windows(paragraph)}
    shared = of_val.intersection(windows(" ".join(train)))
    return [paragraph for paragraph in val if shared.isdisjoint(windows(paragraph))]


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


def prepare(out_dir: str | Path, input_file: str | Path | None = None) -> None:
    """Write train.bin and val.bin into `out_dir`, from the user's text or the default one.

    Raises a Mistake, with nothing written, if the text isn't UTF-8 or too short, or if the folder
    holds another text.
    """
    if input_file:
        pieces = cut(read_input(input_file))
    else:
        # the shipped models learned `didn t`, so apostrophes become spaces before we normalize
        prose = filter(is_prose, cut("\n\n".join(documentation())))
        pieces = (re.sub("['’]", " ", piece) for piece in prose)
    splits = {"train": {}, "val": {}}  # {paragraph: None}, without duplicates, in order
    for paragraph in map(normalize, pieces):
        if paragraph:
            splits["val" if is_validation(paragraph) else "train"][paragraph] = None
    splits["val"] = hold_out(splits["train"], splits["val"])
    files = {}
    for split, paragraphs in splits.items():
        content = " ".join(paragraphs)
        if len(content) < MIN_CHARACTERS:
            raise Mistake(
                f"{input_file} has only {len(content)} letters and spaces for {split}.bin, but"
                f" {MIN_CHARACTERS} are needed; use a longer text, or one that repeats itself less"
            )
        files[split] = bytes(map(VOCABULARY.index, content))
    if not input_file and not hashlib.sha256(files["train"]).hexdigest().startswith(LEARNED):
        print(
            "this isn't the text that the shipped models learned, because your numpy or torch isn't"
            " the version in requirements.txt"
        )
    write_dataset(out_dir, ".bin", **files)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--input", help="a UTF-8 text file; default: the documentation of numpy and torch")
    out_help = "folder to write to; with --input you must name one, otherwise: this script's folder"
    add("--out_dir", help=out_help)
    args = parser.parse_args(argv)
    own = Path(__file__).parent.resolve()
    out = Path(args.out_dir or own).resolve()
    with exit_on_mistake("prepare"):
        if args.input and out == own:
            raise Mistake(
                "your text would replace the default text, which the shipped models were made for;"
                " name another folder, for example --out_dir=data/mine"
            )
        prepare(out, args.input)
        print(f"{out} holds train.bin and val.bin")


if __name__ == "__main__":
    main()
