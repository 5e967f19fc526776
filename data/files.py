"""Find the files that ship with the project, and write files whole."""

import os
from pathlib import Path
from uuid import uuid4

PROJECT = Path(__file__).parents[1]
SHIPPED = ("config/", "data/", "model/")


def find(path):
    """Look for a path in the working directory, and what ships also in the project: -> Path.

    So what ships is found from everywhere, and a run only in the working directory. A path that is
    in neither comes back as it is.
    """
    path = Path(path)
    ships = path.as_posix().startswith(SHIPPED) and (PROJECT / path).exists()
    return PROJECT / path if ships and not path.exists() else path


def write_whole(path, content):
    """Write bytes to a file, so that a reader finds the complete old file or the complete new one.

    This holds even after a power cut. Nothing is left beside the file if it cannot be written.
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
