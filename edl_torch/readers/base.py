"""What a reader is: it knows data, never the master; and what its errors mean.

A reader names the dataset's sources and their sizes, and yields records by index range. It must not know
who asks, in which epoch, or what happens to a record afterwards. Only bad records may be put in quarantine:
while a network is down its records are as good as ever.
"""

from __future__ import annotations

import errno
import importlib
import inspect
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from operator import index
from typing import Any, Protocol

from edl_torch.errors import (
    BadRecord,
    DataFormatError,
    EdlError,
    InvalidArgument,
    ReaderError,
    ReaderUnavailable,
    SourceChanged,
    SourceUnavailable,
)
from edl_torch.fingerprint import UNKNOWN, Fingerprint, describe_change, differ, lacks, strength_of
from edl_torch.shard import IndexArray, Source, Task, TaskType
from edl_torch.system.termination import is_of_a_handler

Range = tuple[str, int, int]  # of records: name of the source, first, and the one after the last
Shards = Mapping[str, int | tuple[int, int]] | Sequence[tuple[str, int, int]]


class AbstractDataReader(ABC):
    """The base of all readers: two methods to write, two more for speed.

    A subclass that can reach any record overrides `read_record`; one that can read many at once into arrays
    overrides `read_batch`. `yields_images` and `reads_blocks` tell a loader how to transform and shuffle its
    records, `thread_safe` whether its threads may read at once, `imports` what else they need. Readers are
    pickled to loader workers: keep paths and numbers in them, open files on first use.
    """

    yields_images = False  # whether a record is an image, or an image and its target
    reads_blocks = False  # whether one record costs as much as the many that lie with it
    looks_again = False  # whether `fingerprint` looks at the data anew, and may while records are read
    thread_safe = False  # whether several threads may call `read_record` at once, and `expect` meanwhile
    imports: tuple[str, ...] = ()  # modules that reading imports: a trainer does so before it forks workers

    def __init__(self, **kwargs: Any) -> None:
        self._kwargs = kwargs

    @abstractmethod
    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> Shards:
        """The sources: `{name: count}`, `{name: (start, count)}` or `[(name, start, count), …]`."""

    @abstractmethod
    def read_records(self, task: Task) -> Iterable[Any]:
        """Yield the records `task.start … task.end - 1` of `task.shard_name`, in that order."""

    def read_record(self, name: str, index: int) -> Any:
        """Optional: record `index` of the source `name`. With it, shuffled shards are read lazily.

        Without it a shuffled shard is read whole and permuted in memory.
        """
        raise AttributeError(f"{type(self).__name__} has no random access")

    def read_batch(self, name: str, indices: IndexArray) -> Any:
        """Optional: the records `indices` (int64 array) of the source `name` as one columnar batch."""
        raise AttributeError(f"{type(self).__name__} has no columnar reads")

    def fingerprint(self, *, whole: bool = False) -> Fingerprint | str | None:
        """Optional: what tells this data from other data under the same names, on any host; a version does.

        Asked once, before the dataset is registered; where a reader `looks_again`, at checkpoints and ends of
        passes too, so that data which are changed under a running job are seen. It should cost a small part
        of what making the reader does, unless the `whole` is to be looked at; `readers.shared.looks` has what
        the package's readers do.
        """
        return None

    def listed_files(self) -> Iterable[str]:
        """Optional: the path of the file behind each entry of the reader's list, for `edl-torch check`."""
        return ()

    def expect(  # noqa: B027  nothing is a good answer
        self, ranges: Sequence[Range], *, in_order: bool = False
    ) -> None:
        """Optional: the records of these `(name, start, end)` are asked for next, one by one or in batches.

        A reader that fetches ahead then knows how far. Unless they come `in_order`, they come in any: one
        that reads whole blocks then keeps those until other ranges are expected.
        """

    def requests_of(self, ranges: Sequence[Range]) -> Sequence[tuple[Any, int, int]] | None:
        """Optional: what a store is asked for to read these `(name, start, end)`, each from its first record
        to its last: object, first byte, bytes; None where no store has them, or nobody can say."""
        return None


def has_random_access(reader: AbstractDataReader) -> bool:
    """Whether the reader has a `read_record` of its own."""
    return _overrides(reader, "read_record")


def has_batch_reads(reader: AbstractDataReader) -> bool:
    """Whether the reader has a `read_batch` of its own."""
    return _overrides(reader, "read_batch")


def has_expectations(reader: AbstractDataReader) -> bool:
    """Whether the reader has an `expect` of its own."""
    return _overrides(reader, "expect")


def _overrides(reader: AbstractDataReader, method: str) -> bool:
    own = getattr(type(reader), method, None)
    return own is not None and own is not getattr(AbstractDataReader, method)


def reader_sources(reader: AbstractDataReader, mode: TaskType = TaskType.TRAINING) -> tuple[Source, ...]:
    """Ask a reader for its sources; both signatures of `create_shards` are understood."""
    parameters = inspect.signature(reader.create_shards).parameters.values()
    keyword_alone = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)
    takes_mode = any(parameter.kind not in keyword_alone for parameter in parameters)
    shards = reader.create_shards(mode) if takes_mode else reader.create_shards()
    return sources_of(shards, type(reader).__name__)


def reader_fingerprint(reader: AbstractDataReader, *, whole: bool = False) -> str:
    """Ask a reader for its fingerprint, as text; '' where it has none.

    Raises ReaderError, and InvalidArgument for what is neither a Fingerprint nor a version."""
    ask = getattr(reader, "fingerprint", None)
    try:
        if callable(ask):
            # Compiled code may not tell what it takes.
            ask = ask(whole=True) if whole and "whole" in inspect.signature(ask).parameters else ask()
        found: Fingerprint | str | None = ask
    except OSError as exc:
        raise ReaderError(f"{type(reader).__name__}: its data cannot be looked at: {exc}") from exc
    if found is None:
        return UNKNOWN
    if not isinstance(found, Fingerprint):
        return Fingerprint.given(found).encode()
    if found.strength != "given" and _makes_other_records(type(reader)):
        found = found.known("partly")
    return found.encode()


_OF_NO_RECORD = {"expect", "listed_files"}  # methods that make none


def _makes_other_records(kind: type) -> bool:
    """Whether a class, which is none of the package's, makes other records of what another one looks at: it
    has methods of its own in the place of those of its base, or looks at nothing and passes on another's."""
    own = set[str]()
    for base in kind.__mro__:
        is_ours = base.__module__.startswith("edl_torch.")
        if "fingerprint" in vars(base):
            return is_ours and any(hasattr(base, name) for name in own)
        if not is_ours:
            own |= {
                name
                for name, member in vars(base).items()
                if hasattr(type(member), "__get__") and not (name.startswith("__") or name in _OF_NO_RECORD)
            }
    return True


def changed_since(reader: AbstractDataReader, then: str, *, is_own: bool = False) -> str:
    """Say what of a reader's data differs from when it had the fingerprint `then`; "" where no difference is
    seen, or the reader does not look again. Where that `is_own`, and not that of another trainer or session,
    all that was looked at then must still be there."""
    if not then or strength_of(then) == "given" or not getattr(reader, "looks_again", False):
        return ""
    try:
        now = reader_fingerprint(reader)
    except ReaderError as exc:
        return str(exc)
    if now == UNKNOWN:
        return "nothing of what was looked at then is there now" if is_own else ""
    return describe_change(then, now) if differ(then, now) or (is_own and lacks(now, then)) else ""


def sources_of(shards: Shards, reader: str) -> tuple[Source, ...]:
    """Normalise what `create_shards` returned. Raises DataFormatError that names the reader and the entry."""
    rows: list[tuple[Any, Any, Any]]
    try:
        if isinstance(shards, Mapping):
            rows = [
                (name, *(value if isinstance(value, tuple | list) else (0, value)))
                for name, value in shards.items()
            ]
        else:
            rows = [(name, start, count) for name, start, count in shards]
        sources = tuple(Source(name=str(n), start=index(s), count=index(c)) for n, s, c in rows)
    except (TypeError, ValueError) as exc:
        raise DataFormatError(
            f"{reader}.create_shards() returned {type(shards).__name__}: expected {{name: count}}, "
            f"{{name: (start, count)}} or [(name, start, count), …]"
        ) from exc
    for source in sources:
        if source.start < 0 or source.count < 0:
            raise DataFormatError(
                f"{reader}.create_shards(): source {source.name!r} has a negative start or count"
            )
    return sources


def no_source(name: str, known: Iterable[str], reader: object) -> ReaderError:
    """Return the error of a reader that is asked for a source that is not among its own."""
    first = list(islice(known, 4))
    reads = ", ".join(map(repr, first[:3])) + (", …" if first[3:] else "")
    return ReaderError(
        f"{type(reader).__name__} reads {reads}, not {name!r}: make the reader with the same arguments "
        "in every trainer as where the dataset was registered"
    )


def check_range(start: int, end: int, first: int, last: int, name: str) -> None:
    """Raise ReaderError unless `start … end - 1` lies within the records `first … last - 1` of a source."""
    if not first <= start <= end <= last:
        asked = f"record {start}" if end == start + 1 else f"records {start} to {end}"
        raise ReaderError(
            f"source {name!r} has the records {first} to {last} here, but {asked} was asked for: "
            "the data on this machine differs from what the dataset was registered with"
        )


def imported(target: str, what: str, kind: str, known: Iterable[str]) -> Callable[..., Any]:
    """The function or class, as `kind` says, that `target` names as `module:name`, for messages `what`.

    Raises InvalidArgument for another text, naming those that are `known` beside it,
    and ReaderUnavailable for a module that cannot be imported.
    """
    module_name, _, name = target.partition(":")
    if not (module_name and name):
        raise InvalidArgument(f"{what}: expected module:{kind} or one of {', '.join(known)}")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as exc:
        raise ReaderUnavailable(
            f"{what}: cannot import {module_name!r}: {exc}; is it on PYTHONPATH?"
        ) from exc
    if not callable(found):
        raise InvalidArgument(f"{what}: the module {module_name} has no {kind.lower()} {name}")
    return found  # type: ignore[no-any-return]


def import_for_reading(reader: AbstractDataReader) -> None:
    """Import what reading imports, so that forked loader workers need not. What is not there is said when it
    is needed."""
    for module in getattr(reader, "imports", ()):
        with suppress(ImportError):
            importlib.import_module(module)


class Asked(Protocol):
    """Bytes that were asked for; let go of, it asks for nothing more."""

    @property
    def is_all_asked(self) -> bool:
        """Whether the last ones have been asked for too: others' may be."""


class Begun:
    """Records whose bytes have been asked for. Threads may share it.

    Args:
        asked: Their bytes, by one who asks for all of them, or several.
        record: Makes the record at a place among those that were asked for. Raises what `load` does.
    """

    def __init__(self, *asked: Asked, record: Callable[[int], Any]) -> None:
        self._asked = asked
        self.record = record

    @property
    def is_all_asked(self) -> bool:
        """Whether the bytes of the last record have been asked for too: others' may be."""
        return all(one.is_all_asked for one in self._asked)


class IndexedReader(AbstractDataReader):
    """A reader of one source `name`; a subclass sets `count`, and loads one record by its number.

    One that is faster at many records overrides `load_each`.
    """

    count: int  # of records

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def load(self, index: int) -> Any:
        """Record `index`, which lies in `[0, count)`."""

    def begin(self, indices: Sequence[int]) -> Begun | None:
        """Optional: ask for the bytes of these records, of which the first are needed soon.

        Returns what makes the records of them; None where nothing is gained by asking before.
        """
        return None

    def requests(self, indices: Sequence[int]) -> Sequence[tuple[Any, int, int]] | None:
        """Optional: what `begin` asks a store for, for these records: object, first byte, bytes; None where
        no store has them, or nobody can say before they are read."""
        return None

    def load_each(self, indices: Sequence[int]) -> Iterator[Any]:
        """Yield the records `indices`, which lie in `[0, count)`, in this order."""
        begun = self.begin(indices)
        return map(self.load, indices) if begun is None else map(begun.record, range(len(indices)))

    @property
    def load_alone(self) -> Callable[[int], Any] | None:
        """What loads a record, where many at once cost as much as each by itself; else None."""
        kind = type(self)
        together = kind.begin is not IndexedReader.begin or kind.load_each is not IndexedReader.load_each
        return None if together else self.load

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """One source, the same for every mode."""
        return {self.name: self.count}

    def read_records(self, task: Task) -> Iterator[Any]:
        """Yield the records one by one. Raises ReaderError for another source or a range outside of it."""
        shard = task.shard
        self._check(shard.name, shard.start, shard.end)
        return self.load_each(range(shard.start, shard.end))

    def read_record(self, name: str, index: int) -> Any:
        """Record `index`. Raises ReaderError for another source or a number outside of it."""
        self._check(name, index, index + 1)
        return self.load(int(index))

    def read_each(self, name: str, indices: IndexArray) -> Iterator[Any]:
        """Yield what `read_record` returns for each of `indices`; names and numbers are checked at once."""
        numbers: list[int] = indices.tolist()
        inside = bool(numbers) and indices.min() >= 0 and indices.max() < self.count
        if inside and self.reads_by_load(name):
            return self.load_each(numbers)
        return map(partial(self.read_record, name), numbers)

    def reads_by_load(self, name: str) -> bool:
        """Whether `read_record` of this source is `load`: not where a subclass does something else."""
        return name == self.name and type(self).read_record is IndexedReader.read_record

    def _check(self, name: str, start: int, end: int) -> None:
        if name != self.name:
            raise no_source(name, [self.name], self)
        check_range(start, end, 0, self.count, name)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} records={self.count}>"


def can_begin(reader: AbstractDataReader) -> bool:
    """Whether a reader asks for the bytes of records before they are read."""
    if not isinstance(reader, IndexedReader) or type(reader).begin is IndexedReader.begin:
        return False
    kind = type(reader)  # where a subclass changes these, they are called
    return kind.read_record is IndexedReader.read_record and kind.read_records is IndexedReader.read_records


# The network, a server behind a file system, a device, or this machine's own limits. Not EPIPE: a decoder in
# a process of its own hangs up on a record that it cannot read.
_OUTAGES = frozenset(
    getattr(errno, name)
    for name in (
        *("ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN"),
        *("ENETRESET", "ENETUNREACH", "ENOTCONN", "ETIMEDOUT", "ESTALE", "EREMOTEIO", "EIO"),
        *("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM"),
    )
    if hasattr(errno, name)
)
_LONGEST_CHAIN = 16


def name_record(error: Exception, name: str, index: int) -> ReaderError:
    """Return the error with the record's name in front: a BadRecord where the record is bad, else another.

    Raises the error itself where `is_source_error` does.
    """
    own = isinstance(error, BadRecord | ReaderUnavailable | SourceChanged)
    said = f"record {index} of {name!r}: {error if own else f'{type(error).__name__}: {error}'}"
    named: ReaderError
    if not is_source_error(error):
        named = BadRecord(said)
    elif isinstance(error, ReaderUnavailable | SourceChanged):
        named = type(error)(said)
    else:
        named = SourceUnavailable(f"{said}. The record is not to blame: its source cannot be read now")
    named.__cause__ = error
    return named


def is_source_error(error: Exception) -> bool:
    """Return whether any other record would have failed as well.

    Raises the error itself where a signal's handler has raised it: no record is to blame, and no source,
    unless somebody has looked at the record, and says BadRecord.
    """
    if not isinstance(error, BadRecord) and is_of_a_handler(error):
        raise error
    if isinstance(error, EdlError) and not isinstance(error, BadRecord | DataFormatError):
        return True
    # Who raises BadRecord has looked at it: then only the system's own word for an outage counts.
    judged = isinstance(error, BadRecord)
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):  # drivers wrap the system's errors in some of their own
        if link is None:
            return False
        is_cut = isinstance(link, ConnectionError | TimeoutError) and not isinstance(link, BrokenPipeError)
        is_outage = isinstance(link, OSError) and link.errno in _OUTAGES
        if isinstance(link, socket.gaierror) or is_outage or (is_cut and not judged):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False
