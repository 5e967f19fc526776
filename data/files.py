"""Find the files that ship with the project, and write files that are whole or not there at all."""

import os
from pathlib import Path
from uuid import uuid4

PROJECT = Path(__file__).parents[1]
SHIPPED = ("config/", "data/", "model/", "grpo/")


def shipped_path(path: str | Path) -> Path:
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
