"""Write files that are whole or not there at all."""

import os
from pathlib import Path
from uuid import uuid4

PROJECT = Path(__file__).parents[1]


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
