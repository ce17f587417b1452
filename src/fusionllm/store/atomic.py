"""Files that are either the old one or the new one, never half of each.

Knows nothing of what is in them. A small file is written beside its place and renamed over it; a folder is
renamed into place once all of it is on the disk.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file in one step: whoever reads it sees all of the old or all of the new."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut. Windows has no such call and needs none."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
