"""Files that are there whole or not at all, after a power loss too."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def part_name(name: str) -> str:
    """A name for what is not finished, which no reader of the folder takes for data."""
    return f".{name[:100]}.{uuid.uuid4().hex}.part"


@contextmanager
def whole_file(target: Path, *, mtime_ns: int | None = None) -> Iterator[BinaryIO]:
    """A file to write, which becomes `target` when the `with` block ends well; else nothing of it is left.

    It has a hidden name until it is whole and on the disk. Who opens `target` finds the old file or the new
    one, after a power loss too. Its permissions are those that any new file has. Raises OSError of the file
    system (no space, no permission).
    """
    temporary = target.with_name(part_name(target.name))
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mtime_ns is not None:
            os.utime(temporary, ns=(mtime_ns, mtime_ns))
        os.replace(temporary, target)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync(path: str | os.PathLike[str]) -> None:
    """Bring a file, or the names in a folder, to the disk. Raises OSError."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
