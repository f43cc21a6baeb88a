"""Files that a machine's processes share: whole or not at all, and made by one process while the others wait.

It must not know what is in them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger("edl_torch.readers")

_PATIENCE_S = 3600.0  # a file of some terabytes
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25


@contextmanager
def whole_file(target: Path, *, mtime_ns: int | None = None) -> Iterator[BinaryIO]:
    """A file to write, which becomes `target` when the `with` block ends well; else nothing of it is left.

    It has a hidden name until it is whole and on the disk. Who opens `target` finds the old file or the new
    one, after a power loss too. Its permissions are those that any new file has. Raises OSError of the file
    system (no space, no permission).
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


def read_range(descriptor: int, start: int, end: int) -> bytes:
    """Read a range whole; less comes back only where the file ends before."""
    data = os.pread(descriptor, end - start, start)
    if len(data) == end - start or not data:
        return data
    parts, position = [data], start + len(data)
    while position < end and (more := os.pread(descriptor, end - position, position)):
        parts.append(more)
        position += len(more)
    return b"".join(parts)


@contextmanager
def file_lock(
    place: Path,
    *,
    patience_s: float = _PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[None]:
    """Hold the lock on `place` while the `with` block runs, against all processes and threads.

    The lock is a hidden file beside it, which goes with the last holder, however that dies. Where there can
    be none (a folder that is read-only, a network file system without locks), and after `patience_s`, the
    block runs all the same: what is made gets its name when it is whole, so that costs work and harms
    nothing.
    """
    path = place.with_name(f".{place.name}.lock")
    began, pause, told, descriptor = clock(), _FIRST_PAUSE_S, False, None
    with suppress(OSError):  # no lock can be there
        while (descriptor := _taken(path)) is None and clock() - began <= patience_s:
            if not told and clock() - began > 1.0:
                log.info("lock=%s another process makes it: waiting", path)
                told = True
            sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if descriptor is None:
            log.warning("lock=%s is held for %.0f s already: not waiting any longer", path, patience_s)
    try:
        yield
    finally:
        if descriptor is not None:
            # First the name, then the lock: who comes later makes a file of its own. So it does not matter
            # that a child which was forked meanwhile still has this one open.
            with suppress(OSError):
                os.unlink(path)
            os.close(descriptor)


def _taken(path: Path) -> int | None:
    """The lock file, which is ours; None while another has it. Raises OSError where there can be no lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):  # the holder before us has removed it
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except (BlockingIOError, PermissionError):
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
