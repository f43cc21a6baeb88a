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
from errno import EACCES, EAGAIN
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
    held = _acquire(place.with_name(f".{place.name}.lock"), patience_s, clock, sleep)
    try:
        yield
    finally:
        if held is not None:
            held.release()


class _Lock:
    """An open lock file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)

    def take(self) -> bool:
        """Whether it is ours now. Raises OSError where the file system has no locks."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            if exc.errno in (EACCES, EAGAIN):
                return False
            raise
        return True

    def is_current(self) -> bool:
        """Whether it is still the file of its name: the holder before us has removed it."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        return False

    def release(self) -> None:
        """First the name, then the lock: who comes later makes a file of its own.

        So it does not matter that a child which was forked meanwhile still has this one open.
        """
        with suppress(OSError):
            os.unlink(self._path)
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._descriptor)


def _acquire(
    path: Path, patience_s: float, clock: Callable[[], float], sleep: Callable[[float], object]
) -> _Lock | None:
    began, pause, told = clock(), _FIRST_PAUSE_S, False
    while True:
        try:
            lock = _Lock(path)
        except OSError:
            return None
        try:
            taken = lock.take()
        except OSError:
            lock.close()
            return None
        if taken and lock.is_current():
            return lock
        lock.close()
        if taken:
            continue
        if clock() - began > patience_s:
            log.warning("lock=%s is held for %.0f s already: not waiting any longer", path, patience_s)
            return None
        if not told and clock() - began > 1.0:
            log.info("lock=%s another process makes it: waiting", path)
            told = True
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
