"""Text -> train.bin, val.bin (one byte a character) and meta.json (the vocabulary). Needs no network.

The default text is English prose that every reader already owns: the language reference in `pydoc_data.topics` and
the docstrings of the standard library, read with `ast`, so that no module is imported. `--input=FILE` takes any text.

    python data/char_diffusion/prepare.py                                   # a-z and space, as text8
    python data/char_diffusion/prepare.py --alphabet=ascii --out_dir=data/ascii
    python data/char_diffusion/prepare.py --input=my.txt --out_dir=data/mine
"""

import argparse
import ast
import hashlib
import json
import os
import re
import string
import sysconfig
import tempfile
import unicodedata
import warnings
from pathlib import Path

BLANK = "_"  # stands for the mask token in every vocabulary, hence never a character of the text
ALPHABETS = {
    "text8": " " + string.ascii_lowercase,
    "ascii": "\n" + "".join(map(chr, range(32, 127))).replace(BLANK, ""),
}
MIN_CHARACTERS = 1000  # in each of the two files: less than that is no text to learn from


def standard_library_text():
    """Every topic of `help()` and every docstring of the standard library, as strings in a fixed order."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"} & set(
            path.relative_to(root).parts
        ):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a few files of the library are broken on purpose
            continue
        yield from (
            ast.get_docstring(node) or ""
            for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        )


def is_prose(paragraph):
    """A sentence or more of words: not code, not a table, not a console session."""
    words = paragraph.split()
    plain = sum(
        bool(re.fullmatch(r"[\"'(*`]*[A-Za-z][a-z'-]*[\"').,:;*`?!]*", word)) for word in words
    )
    return len(words) >= 8 and plain >= 0.7 * len(words) and ">>>" not in paragraph


def normalise(text, alphabet):
    """Map text to an alphabet, without its accents: text8 lower-cases and keeps a-z; everything else becomes one space."""
    text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    if alphabet == "text8":
        return re.sub("[^a-z]+", " ", text.lower()).strip()
    text = re.sub(f"[^{re.escape(ALPHABETS['ascii'])}]", " ", text)
    return re.sub(" {2,}", " ", re.sub(r"\s*\n\s*", "\n", text)).strip()


def is_validation(paragraph):
    """One piece in ten, chosen by a hash of its own letters: the same ones whatever else the corpus holds."""
    return hashlib.sha256(normalise(paragraph, "text8").encode()).digest()[0] < 26


def prepare(out_dir, input_file=None, alphabet="text8"):
    """Write train.bin, val.bin and meta.json into `out_dir`; returns what meta.json holds.
    Raises ValueError, with nothing written, for a text that is not UTF-8 or too short to split in two."""
    try:
        text = (
            Path(input_file).read_text(encoding="utf-8")
            if input_file is not None
            else "\n\n".join(standard_library_text())
        )
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(
            f"input={input_file} cannot be read, or is not UTF-8 text ({error}); name a text file, or convert it"
        ) from None
    pieces = (
        piece
        for block in re.split(r"\n\s*\n", text)
        for piece in re.findall(r"(?s).{1,1000}(?:\s|$)|.{1000}", block)
    )  # a text need not have empty lines
    paragraphs = {
        normalise(piece, alphabet): is_validation(piece)
        for piece in pieces
        if input_file is not None or is_prose(piece)
    }  # without duplicates, in order
    paragraphs.pop("", None)
    joint = "\n" if alphabet == "ascii" else " "
    splits = {
        name: joint.join(p for p, validation in paragraphs.items() if validation == (name == "val"))
        for name in ("train", "val")
    }
    for name, content in splits.items():
        if len(content) < MIN_CHARACTERS:
            raise ValueError(
                f"input={input_file or 'standard library'} leaves {len(content)} characters for {name}.bin, at least {MIN_CHARACTERS} are needed; give a longer text"
            )
    vocabulary = ALPHABETS[alphabet] + BLANK
    meta = {
        "vocabulary": vocabulary,
        "alphabet": alphabet,
        "paragraphs": len(paragraphs),
        **{f"{name}_characters": len(content) for name, content in splits.items()},
    }
    token = bytes.maketrans(vocabulary.encode(), bytes(range(len(vocabulary))))
    files = {
        f"{name}.bin": content.encode().translate(token) for name, content in splits.items()
    } | {"meta.json": json.dumps(meta, indent=1).encode()}
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=out_dir
    ) as folder:  # each is written whole before one is replaced
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        (out_dir / "meta.json").unlink(
            missing_ok=True
        )  # gone first and back last: its presence says that the others are complete
        for name in files:
            os.replace(Path(folder) / name, out_dir / name)
    return meta


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="Turn a text into train.bin, val.bin and meta.json."
    )
    parser.add_argument(
        "--input", help="a UTF-8 text file; default: the prose of your own Python's documentation"
    )
    parser.add_argument(
        "--alphabet",
        choices=sorted(ALPHABETS),
        default="text8",
        help="text8: a-z and space (default); ascii: printable ASCII",
    )
    parser.add_argument(
        "--out_dir", default=Path(__file__).parent, help="default: this script's folder"
    )
    parser.error = lambda message: parser.exit(
        2, f"prepare.py: {message}; --help tells more\n"
    )  # one line
    args = parser.parse_args(argv)
    try:
        print(json.dumps(prepare(args.out_dir, args.input, args.alphabet)))
    except (ValueError, OSError) as error:
        parser.error(f"{error}; name another --out_dir" if isinstance(error, OSError) else error)


if __name__ == "__main__":
    main()
