"""Find the files that ship with the project, and write files that are whole or not there at all."""

import os
from pathlib import Path
from uuid import uuid4

from data.user_mistake import Mistake

PROJECT = Path(__file__).parents[1]
SHIPPED = ("config/", "data/", "model/")


def find(path: str | Path) -> Path:
    """Look for a path in the working directory, and if it's something that ships, in the project.

    So you can start from any folder and still get the shipped models. A path that's in neither
    place comes back as it is.
    """
    path = Path(path)
    ships = path.as_posix().startswith(SHIPPED) and (PROJECT / path).exists()
    return PROJECT / path if ships and not path.exists() else path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader finds the complete old one or the complete new one.

    This holds even after a power cut. If the write fails, nothing is left lying around.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_dataset(folder: str | Path, train: list[str], val: list[str]) -> None:
    """Write lines as train.txt and val.txt, so that a kill leaves both of them or no dataset.

    train goes last. A val without it is what a killed program left behind, and is replaced. Raises
    a Mistake if the folder holds a different dataset.
    """
    train_file, val_file = (Path(folder, f"{split}.txt") for split in ("train", "val"))
    files = {val_file: val, train_file: train}
    files = {file: "\n".join([*lines, ""]).encode() for file, lines in files.items()}
    for file, content in files.items():
        if train_file.exists() and file.exists() and file.read_bytes() != content:
            raise Mistake(f"{file} holds other data; remove it, or name another --out_dir")
    for file, content in files.items():
        write_whole(file, content)
