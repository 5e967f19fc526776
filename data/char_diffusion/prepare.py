"""Text -> train.bin, val.bin (one byte a character), meta.json (the vocabulary). No network needed.

The default text is English prose that every reader already owns: the language reference in
`pydoc_data.topics` and the docstrings of the standard library, read with `ast`, so that no module
is imported. `--input=FILE` takes any text.

    python data/char_diffusion/prepare.py                                # a-z and space, as text8
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
import sys
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
        try:
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a few files of the library are broken on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED):
                yield ast.get_docstring(node) or ""


def read_text(input_file):
    """The text of a file; without one, that of the standard library. ValueError if it is none."""
    if input_file is None:
        return "\n\n".join(standard_library_text())
    try:
        return Path(input_file).read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(
            f"input={input_file} cannot be read, or is not UTF-8 text ({error});"
            " name a text file, or convert it"
        ) from None


def cut(text):
    """The paragraphs, in pieces of about 1000 characters: a text need not have empty lines."""
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.findall(r"(?s).{1,1000}(?:\s|$)|.{1000}", paragraph)


def is_prose(paragraph):
    """A sentence or more of words: not code, not a table, not a console session."""
    words = paragraph.split()
    plain = [word for word in words if PLAIN_WORD.fullmatch(word)]
    return len(words) >= 8 and len(plain) >= 0.7 * len(words) and ">>>" not in paragraph


def normalise(text, alphabet):
    """Map text to an alphabet, without its accents; what is in neither becomes one space.

    text8 lower-cases, and keeps a-z.
    """
    text = unicodedata.normalize("NFKD", text)
    text = "".join(c for c in text if not unicodedata.combining(c))
    if alphabet == "text8":
        return re.sub("[^a-z]+", " ", text.lower()).strip()
    text = re.sub(f"[^{re.escape(ALPHABETS['ascii'])}]", " ", text)
    text = re.sub(" +", " ", text)  # first: the next line takes time only where a line ends
    return re.sub(" ?\n[ \n]*", "\n", text).strip()


def is_validation(paragraph):
    """One piece in ten, by a hash of its own letters: the same whatever else the corpus holds."""
    return hashlib.sha256(normalise(paragraph, "text8").encode()).digest()[0] < 26


def sync(folder):
    """A new name is on the disk when its folder is. Windows cannot sync one."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def write_all(folder, files):
    """Replace files of a folder by {name: bytes}. Each is on the disk before one is replaced.

    The last one goes first and comes back last: where it is, the others are complete.
    """
    *_, last = files
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(suffix=".tmp", dir=folder) as temporary:
        for name, content in files.items():
            with open(Path(temporary) / name, "wb") as f:
                f.write(content)
                f.flush()
                os.fsync(f.fileno())
        (folder / last).unlink(missing_ok=True)
        for name in files:
            os.replace(Path(temporary) / name, folder / name)
    sync(folder)


def prepare(out_dir, input_file=None, alphabet="text8"):
    """Write train.bin, val.bin and meta.json into `out_dir`; returns what meta.json holds.

    Raises ValueError, with nothing written, for a text that is not UTF-8 or too short to split.
    """
    splits = {"train": {}, "val": {}}  # dicts for their keys: without duplicates, in order
    for piece in cut(read_text(input_file)):
        if input_file is None and not is_prose(piece):
            continue
        split = "val" if is_validation(piece) else "train"
        splits[split][normalise(piece, alphabet)] = None
    vocabulary = ALPHABETS[alphabet] + BLANK
    token = bytes.maketrans(vocabulary.encode(), bytes(range(len(vocabulary))))
    meta = {"vocabulary": vocabulary, "alphabet": alphabet, "paragraphs": 0}
    files = {}
    for split, paragraphs in splits.items():
        paragraphs.pop("", None)
        joint = "\n" if alphabet == "ascii" else " "
        content = joint.join(paragraphs)
        if len(content) < MIN_CHARACTERS:
            raise ValueError(
                f"input={input_file or 'standard library'} leaves {len(content)} characters for"
                f" {split}.bin, at least {MIN_CHARACTERS} are needed; give a longer text"
            )
        meta["paragraphs"] += len(paragraphs)
        meta[f"{split}_characters"] = len(content)
        files[f"{split}.bin"] = content.encode().translate(token)
    write_all(Path(out_dir), files | {"meta.json": json.dumps(meta, indent=1).encode()})
    return meta


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise ValueError(f"{message}; --help tells more")


def main(argv=None):
    parser = Parser(description="Turn a text into train.bin, val.bin and meta.json.")
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
        "--out_dir", help="default, for the default text alone: this script's folder"
    )
    code = 2
    try:
        args = parser.parse_args(argv)
        is_default = args.input is None and args.alphabet == "text8"
        if args.out_dir is None and not is_default:
            raise ValueError(
                "this text would replace the default one, which the shipped models know;"
                " name a folder of its own, for example --out_dir=data/mine"
            )
        out_dir = args.out_dir or Path(__file__).parent
        print(json.dumps(prepare(out_dir, args.input, args.alphabet)))
        return
    except ValueError as error:
        message = error
    except OSError as error:
        message = f"{error}; name another --out_dir"
    except KeyboardInterrupt:
        message = "stopped before its end; run it again"
        code = 130
    print(f"prepare.py: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
