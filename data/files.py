"""Write files that are whole or not there at all."""

import os
from pathlib import Path
from uuid import uuid4

from data.user_mistake import Mistake

PROJECT = Path(__file__).parents[1]


def check_new(folder: Path) -> None:
    """Raise a Mistake if a folder exists, or is inside a file."""
    if folder.exists():
        raise Mistake(f"{folder} exists; name another folder")
    above = next(path for path in folder.absolute().parents if path.exists())
    if not above.is_dir():
        raise Mistake(f"{folder} is inside a file, {above}; name another folder")


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
