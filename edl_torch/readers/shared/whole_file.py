"""Files that appear whole or not at all: written under a hidden name, on the disk before they take their own.

It must not know what is in them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(target: Path, *, mtime_ns: int | None = None) -> Iterator[BinaryIO]:
    """A file to write, which becomes `target` when the `with` block ends well; else nothing of it is left.

    Who opens `target` finds the old file or the new one, after a power loss too. Its permissions are those
    that any new file has. Raises OSError of the file system (no space, no permission).
    """
    temporary = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}.part")
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
