"""Files: read as they were when they were looked at, and made whole, by one process for all.

A file that is written to while a job reads it is another file, whatever its times say: size and time of
modification are compared after each read, and where only the time of the inode's last change differs (rights
and links change that too, and a writer may put the other time back), what is in the file decides. It must not
know what that is.
"""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from edl_torch.errors import (
    BadRecord,
    DataFormatError,
    ReaderError,
    SourceChanged,
    SourceUnavailable,
)
from edl_torch.system.backoff import backoff

log = logging.getLogger("edl_torch.readers")

_PATIENCE_S = 3600.0  # a file of some terabytes
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.25
# What the kernel writes down as times of files; it goes on every 1 to 10 ms.
_FILE_CLOCK = getattr(time, "CLOCK_REALTIME_COARSE", time.CLOCK_REALTIME)
_PART_OF_A_TICK_S, _MOST_PARTS = 0.0005, 100  # a file may be written to all the time
_LEAST_FILES, _MOST_FILES = 64, 4096  # open at once

Read = Callable[[int, int], bytes]  # the bytes from … to before …


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """A file as it was when it was looked at."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int = field(compare=False)  # of the inode's last change: no program can put it back

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> FileStamp:
        """Look at a file now, or as soon as a write that comes later has a later time. Raises OSError."""
        for _ in range(_MOST_PARTS):
            found = os.stat(path)
            if found.st_ctime_ns != time.clock_gettime_ns(_FILE_CLOCK):
                break
            time.sleep(_PART_OF_A_TICK_S)
        return cls._of(os.path.realpath(path), found)

    @classmethod
    def _of(cls, path: str, found: os.stat_result) -> FileStamp:
        return cls(path=path, size=found.st_size, mtime_ns=found.st_mtime_ns, ctime_ns=found.st_ctime_ns)

    @property
    def is_told_by_size(self) -> bool:
        """Whether a read of it sees no other one of the same size."""
        return False

    def check(self) -> None:
        """Raise SourceChanged if the file is another one now, or may be."""
        if self.check_content().ctime_ns != self.ctime_ns:
            raise self.changed(self)

    def check_content(self) -> FileStamp:
        """Raise SourceChanged if the file has another size or time of modification; return how it is now."""
        try:
            now = self._of(self.path, os.stat(self.path))
        except OSError as exc:
            raise SourceChanged(f"'{self.path}' was there and is gone: {exc.strerror}") from exc
        if now != self:
            raise self.changed(now)
        return now

    def changed(self, now: FileStamp) -> SourceChanged:
        """Return the error for a file that is as `now`."""
        sizes = f"{self.size:,} bytes then, {now.size:,} now"
        return SourceChanged(
            f"'{self.path}' has changed since it was looked at ({sizes}): data must stay as it is while a "
            "job uses it; start the job again"
        )


class OpenFile:
    """A file as it was when it was indexed, for reading at any place; closed when nobody has it any more.

    Args:
        stamp: How it was.
        is_same: Whether what can be read is what was indexed; asked where the inode was changed, and neither
            size nor time of modification differ.

    Raises SourceChanged where there is no file any more.
    """

    __slots__ = ("__weakref__", "_descriptor", "_is_same", "_known_ns", "stamp")

    def __init__(self, stamp: FileStamp, is_same: Callable[[Read], bool]) -> None:
        try:
            self._descriptor = os.open(stamp.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            raise SourceChanged(f"'{stamp.path}' was there and is gone: {exc.strerror}") from exc
        except OSError as exc:
            raise SourceUnavailable(f"'{stamp.path}' cannot be opened: {exc.strerror}") from exc
        weakref.finalize(self, os.close, self._descriptor)
        self.stamp, self._is_same, self._known_ns = stamp, is_same, stamp.ctime_ns

    def read(self, start: int, end: int) -> bytes:
        """Bytes `start … end - 1`. Raises SourceChanged for another file, and SourceUnavailable."""
        try:
            data = read_range(self._descriptor, start, end)
            found = os.fstat(self._descriptor)
        except OSError as exc:
            raise SourceUnavailable(
                f"'{self.stamp.path}' cannot be read at byte {start:,}: {exc.strerror}"
            ) from exc
        same = found.st_size == self.stamp.size and found.st_mtime_ns == self.stamp.mtime_ns
        if not same or found.st_ctime_ns != self._known_ns:
            now = FileStamp._of(self.stamp.path, found)
            if not same or not self._is_same(partial(read_range, self._descriptor)):
                raise self.stamp.changed(now)
            self._known_ns = now.ctime_ns
        return data


T = TypeVar("T")


class OpenFiles:
    """Files of several owners, opened when they are first read, of which those that were read last stay open.

    One put away stays open for whoever reads from it. Threads may share it, and a process has one: by default
    it keeps half as many as the process may have descriptors.
    """

    def __init__(self, limit: int | None = None) -> None:
        half = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # negative: there is no limit
        usual = min(max(half, _LEAST_FILES), _MOST_FILES) if half >= 0 else _MOST_FILES
        self.limit = usual if limit is None else limit
        self._open: OrderedDict[tuple[object, Hashable], Any] = OrderedDict()

    def get(self, owner: object, name: Hashable, opening: Callable[[], T], most: int = _MOST_FILES) -> T:
        """Return an open file of the owner, who is to have `most` at once. Raises what opening it raises."""
        key = owner, name
        file: T | None = self._open.get(key)
        if file is None:
            file = self._open[key] = opening()
            own = [other for other in list(self._open) if other[0] is owner]
            for other in (*own[:-most], *list(self._open)[: -self.limit]):
                self._open.pop(other, None)
        else:
            with suppress(KeyError):  # another thread has put it away
                self._open.move_to_end(key)
        return file

    def put_away(self, owner: object, name: Hashable | None = None) -> None:
        """Let go of a file of the owner, or of all."""
        for key in list(self._open):
            if key[0] is owner and name in (None, key[1]):
                self._open.pop(key, None)


OPEN_FILES = OpenFiles()


@contextmanager
def readable(what: str, remedy: str = "check the path") -> Iterator[None]:
    """Around the reading of a file as a reader is made: that it cannot be read is a DataFormatError."""
    try:
        yield
    except OSError as exc:
        raise DataFormatError(f"{what} cannot be read: {exc.strerror}; {remedy}") from exc
    except UnicodeDecodeError as exc:
        raise DataFormatError(f"{what} is not UTF-8: {exc.reason} at byte {exc.start}") from exc


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
    began, told, descriptor = clock(), False, None
    pauses = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    with suppress(OSError):  # no lock can be there
        while (descriptor := _taken(path)) is None and clock() - began <= patience_s:
            if not told and clock() - began > 1.0:
                log.info("lock=%s another process makes it: waiting", path)
                told = True
            sleep(next(pauses))
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


B = TypeVar("B")


class BlockCache(Generic[B]):
    """Blocks by key; the last one and those that are expected are kept whatever their size.

    A damaged block is remembered too: when bad records are set aside each of its records is asked for, and it
    is read once. There is no lock that a forked process could find held: threads that share a cache may at
    worst read a block twice.

    Args:
        limit_bytes: How much is kept, but for those; each block says its `nbytes`.
        dropped: Told of each block that is let go.
    """

    def __init__(self, limit_bytes: int, dropped: Callable[[B], Any] = lambda _: None) -> None:
        self.limit = limit_bytes
        self._dropped = dropped
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._expected: frozenset[Hashable] = frozenset()
        self._damaged: dict[Hashable, tuple[type[ReaderError], str]] = {}
        self._latest: Hashable = None
        self.nbytes = 0

    def get(self, key: Hashable) -> B | None:
        """Return the block, if it is kept."""
        block: B | None = self._kept.get(key)
        if block is not None and key != self._latest:
            self._latest = key
            try:
                self._kept.move_to_end(key)
            except KeyError:  # another thread has just thrown it out
                return block
        return block

    def put(self, key: Hashable, read: Callable[[], B]) -> B:
        """Return `read()`, kept. Raises what it raises: of a damaged block again, without reading again."""
        if key in self._damaged:
            kind, said = self._damaged[key]
            raise kind(said)
        try:
            block: Any = read()
        except (BadRecord, DataFormatError) as exc:
            self._damaged[key] = type(exc), str(exc)
            raise
        before = self._kept.pop(key, None)
        self.nbytes += block.nbytes - (0 if before is None else before.nbytes)
        self._kept[key] = block
        self._latest = key
        if self.nbytes > self.limit:
            self._drop_oldest()
        return block  # type: ignore[no-any-return]

    def _drop_oldest(self) -> None:
        for key in [key for key in list(self._kept) if key != self._latest and key not in self._expected]:
            if self.nbytes <= self.limit:
                break
            oldest = self._kept.pop(key, None)
            if oldest is not None:
                self.nbytes -= oldest.nbytes
                self._dropped(oldest)

    def expect(self, keys: Iterable[Hashable]) -> None:
        """Keep these, once they are read, until others are expected."""
        self._expected = frozenset(keys)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)
