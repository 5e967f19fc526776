"""Turn a text into train.bin and val.bin, with a byte for each character.

The default text is the English documentation of numpy and torch, in the versions that
requirements.txt pins. So every reader has it installed already. We read it with `ast` and import no
module. `--input=FILE` takes any other text. We keep only a to z and the space, as in text8.

    python -m data.text.prepare
    python -m data.text.prepare --input=my.txt --out_dir=data/mine
"""

import argparse
import ast
import hashlib
import re
import unicodedata
import warnings
from importlib.util import find_spec
from pathlib import Path

from data.files import write_whole
from data.user_mistake import Mistake, exit_on_mistake, refuse
from data.vocabulary import VOCABULARY

SHARED = 40  # characters; a paragraph of val that shares as many with train is left out
MIN_CHARACTERS = 1000  # train.bin and val.bin must each have at least this many
SOURCES = {  # folders to read; all of torch would take too long for what it adds
    "numpy": "_core lib linalg fft random polynomial ma matrixlib",
    "torch": "nn optim distributions utils autograd linalg fft special func cuda amp masked",
}
LEARNED = "b1fad3dd8d50"  # the SHA-256 of the train.bin that the shipped models learned begins so
# What Unicode does not take apart into a letter and an accent.
PLAIN = {
    "ß": "ss",
    "æ": "ae",
    "œ": "oe",
    "ø": "o",
    "ł": "l",
    "đ": "d",
    "ð": "d",
    "þ": "th",
    "ı": "i",
}
PLAIN_WORD = re.compile(r"[\"'(*`]*[A-Za-z][a-z'-]*[\"').,:;*`?!]*")


def documentation():
    """Yield every string of two lines or more in the code of SOURCES, such as its docstrings.

    The order is fixed. We do not read `__doc__`, because some versions of Python remove the
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


def cut(text):
    """Yield a text's paragraphs. Those of more than 1000 characters are cut into several pieces."""
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.findall(r"(?s).{1,1000}(?:\s|$)|.{1000}", paragraph)


def is_prose(paragraph):
    """Tell whether a paragraph consists of sentences, not of code, a table or a console session."""
    words = paragraph.split()
    plain = [word for word in words if PLAIN_WORD.fullmatch(word)]
    return len(words) >= 8 and len(plain) >= 0.7 * len(words) and ">>>" not in paragraph


def plain(text):
    """Turn a text into small letters without accents, where a letter has such a form."""
    text = unicodedata.normalize("NFKD", text)
    text = "".join(c for c in text if not unicodedata.combining(c))
    return text.lower().translate(str.maketrans(PLAIN))


def normalise(text, more=""):
    """Turn a text into words of a to z, without accents, with one space between two words.

    A word may also have the characters in `more`.
    """
    return re.sub(f"[^a-z{re.escape(more)}]+", " ", plain(text)).strip()


def is_validation(paragraph):
    """Tell whether a paragraph goes into val.bin. One in ten does, picked by a hash of its text."""
    return hashlib.sha256(paragraph.encode()).digest()[0] < 26


def windows(text):
    """Yield every piece of SHARED characters of a text."""
    return (text[start : start + SHARED] for start in range(len(text) - SHARED + 1))


def hold_out(train, val):
    """Return the paragraphs of val that share no long piece with any of train.

    The documentation of two functions often has sentences in common. What stands in train.bin, too,
    would not be held out.
    """
    of_val = {window for paragraph in val for window in windows(paragraph)}
    shared = of_val.intersection(windows(" ".join(train)))
    return [paragraph for paragraph in val if shared.isdisjoint(windows(paragraph))]


def prepare(out_dir, input_file=None):
    """Write val.bin and train.bin into `out_dir`: -> {file: its size in bytes}.

    If the text is not UTF-8 or too short, this raises a Mistake before it writes anything. It also
    raises one if the folder cannot be written, or holds another text. It prints what share of the
    letters in your text is lost, if that is above a hundredth.
    """
    if input_file:
        try:
            text = Path(input_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Mistake(
                f"{input_file} cannot be read as UTF-8 text ({error}); name another file, or"
                " convert this one to UTF-8"
            ) from None
        text = re.sub(r"\b['’]\b", "", text)  # didn't becomes the word didnt
        letters = [c for c in plain(text) if c.isalpha()]
        lost = sum(c > "z" for c in letters) / max(1, len(letters))
        if lost > 0.01:
            print(f"{input_file}: {lost:.0%} of its letters are not a to z, and are left out")
    else:
        text = "\n\n".join(documentation())
    splits = {"val": {}, "train": {}}  # {paragraph: None}, without duplicates, in order
    for piece in cut(text):
        paragraph = normalise(piece) if input_file or is_prose(piece) else ""
        if paragraph:
            splits["val" if is_validation(paragraph) else "train"][paragraph] = None
    splits["val"] = hold_out(splits["train"], splits["val"])
    files = {}
    for split, paragraphs in splits.items():
        content = " ".join(paragraphs)
        refuse(
            len(content) < MIN_CHARACTERS,
            f"{input_file} has only {len(content)} letters and spaces for {split}.bin, but"
            f" {MIN_CHARACTERS} are needed; give a longer text, or one that repeats itself less",
        )
        files[f"{split}.bin"] = bytes(map(VOCABULARY.index, content))
    learned = hashlib.sha256(files["train.bin"]).hexdigest().startswith(LEARNED)
    if not input_file and not learned:
        print(
            "this is not the text that the shipped models learned, because numpy or torch is not of"
            " the version in requirements.txt"
        )

    train = Path(out_dir) / "train.bin"
    try:
        refuse(
            train.exists() and train.read_bytes() != files["train.bin"],
            f"{train} holds another text; remove it, or name another folder with --out_dir",
        )
        for name, content in files.items():
            write_whole(train.with_name(name), content)
    except OSError as error:
        raise Mistake(f"{out_dir} cannot be written ({error}); name another folder") from None
    return {name: len(content) for name, content in files.items()}


def main(argv=None):
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--input", help="a UTF-8 text file; default: the documentation of numpy and torch")
    out_help = "folder to write to; with --input you must name one, otherwise: this script's folder"
    add("--out_dir", help=out_help)
    args = parser.parse_args(argv)
    own = Path(__file__).parent.resolve()
    out = Path(args.out_dir or own).resolve()
    with exit_on_mistake("prepare"):
        refuse(
            args.input and out == own,
            "your text would replace the default text, for which the shipped models were made; name"
            " another folder, for example --out_dir=data/mine",
        )
        print(prepare(out, args.input))


if __name__ == "__main__":
    main()
