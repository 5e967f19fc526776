"""Text -> train.bin, val.bin (one byte a character), meta.json (the vocabulary). No network needed.

The default text is English prose that every reader already owns: the language reference in
`pydoc_data.topics` and the docstrings of the standard library, read with `ast`, so that no module
is imported. `--input=FILE` takes any text. Kept are a to z and space, as in text8.

    python data/text/prepare.py
    python data/text/prepare.py --input=my.txt --out_dir=data/mine
"""

import argparse
import ast
import hashlib
import json
import re
import string
import sysconfig
import unicodedata
from pathlib import Path

BLANK = "_"  # stands for the mask token in every vocabulary, hence never a character of the text
VOCABULARY = " " + string.ascii_lowercase + BLANK
MIN_CHARACTERS = 1000  # in each of the two files: less than that is no text to learn from
# Folders of the standard library without prose of its own.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
PLAIN_WORD = re.compile(r"[\"'(*`]*[A-Za-z][a-z'-]*[\"').,:;*`?!]*")


def standard_library_text():
    """Every topic of `help()` and every docstring of the standard library, in a fixed order."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, DOCUMENTED):
                yield ast.get_docstring(node) or ""


def cut(text):
    """The paragraphs, in pieces of about 1000 characters: a text need not have empty lines."""
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.findall(r"(?s).{1,1000}(?:\s|$)|.{1000}", paragraph)


def is_prose(paragraph):
    """A sentence or more of words: not code, not a table, not a console session."""
    words = paragraph.split()
    plain = [word for word in words if PLAIN_WORD.fullmatch(word)]
    return len(words) >= 8 and len(plain) >= 0.7 * len(words) and ">>>" not in paragraph


def normalise(text):
    """Lower case, without accents; whatever is no letter becomes one space."""
    text = unicodedata.normalize("NFKD", text)
    text = "".join(c for c in text if not unicodedata.combining(c))
    return re.sub("[^a-z]+", " ", text.lower()).strip()


def is_validation(paragraph):
    """One piece in ten, by a hash of its letters: the same whatever else the corpus holds."""
    return hashlib.sha256(paragraph.encode()).digest()[0] < 26


def prepare(out_dir, input_file=None):
    """Write train.bin, val.bin and meta.json into `out_dir` -> {file: bytes}.

    Raises ValueError, with nothing written, for a text that is not UTF-8 or too short to split.
    """
    if input_file:
        text = Path(input_file).read_text(encoding="utf-8")
    else:
        text = "\n\n".join(standard_library_text())
    splits = {"train": {}, "val": {}}  # dicts for their keys: without duplicates, in order
    for piece in cut(text):
        paragraph = normalise(piece)
        if paragraph and (input_file or is_prose(piece)):
            splits["val" if is_validation(paragraph) else "train"][paragraph] = None
    files = {}
    for split, paragraphs in splits.items():
        content = " ".join(paragraphs)
        if len(content) < MIN_CHARACTERS:
            raise ValueError(
                f"the text leaves {len(content)} characters for {split}.bin, at least"
                f" {MIN_CHARACTERS} are needed; give a longer one"
            )
        files[f"{split}.bin"] = bytes(map(VOCABULARY.index, content))
    # Last: where it is, the others are whole.
    files["meta.json"] = json.dumps({"vocabulary": VOCABULARY}).encode()

    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        beside = out_dir / f"{name}.tmp"
        beside.write_bytes(content)
        beside.replace(out_dir / name)
    return {name: len(content) for name, content in files.items()}


def main(argv=None):
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--input", help="a UTF-8 text file; default: the docstrings of your own Python")
    add("--out_dir", help="default, for the default text alone: this script's folder")
    args = parser.parse_args(argv)
    if args.input and not args.out_dir:
        parser.error(
            "the shipped models know the default text, which this one would replace;"
            " name a folder of its own, for example --out_dir=data/mine"
        )
    try:
        print(prepare(args.out_dir or Path(__file__).parent, args.input))
    except (ValueError, OSError) as error:
        parser.error(f"{error} (with --input={args.input} --out_dir={args.out_dir})")


if __name__ == "__main__":
    main()
