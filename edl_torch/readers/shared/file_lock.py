"""File lock: one process at a time makes a file that a machine shares; the others wait, and find it made.

A lock belongs to an open file, so it ends with its holder, however that dies. The file that is made gets its
name when it is whole, so a lock that cannot be had costs work and harms nothing.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EACCES, EAGAIN
from pathlib import Path

log = logging.getLogger("edl_torch.readers")

_PATIENCE_S = 3600.0  # a file of some terabytes
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25


@contextmanager
def file_lock(
    place: Path,
    *,
    patience_s: float = _PATIENCE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[None]:
    """Hold the lock on `place` while the `with` block runs, against all processes and threads.

    The lock is a hidden file beside it, which goes with the last holder. Where there can be none (a folder
    that is read-only, a network file system without locks), and after `patience_s`, the block runs all the
    same.
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
