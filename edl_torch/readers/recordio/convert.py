"""Any reader's records as RecordIO: one file, or a folder of files, whole or not at all.

It must not know command lines, or how records become bytes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from edl_torch.errors import BadRecord, InvalidArgument, OutputError, ReaderError
from edl_torch.readers.base import AbstractDataReader, reader_sources
from edl_torch.readers.error_classification import name_record
from edl_torch.readers.recordio.writer import RecordIOWriter, part_name, sync_folder
from edl_torch.shard import Shard, Source, Task, TaskType

_TASK = 4096  # records: readers are made for ranges of about a shard


def convert(
    reader: AbstractDataReader,
    target: str | os.PathLike[str],
    encode: Callable[[Any], Any],
    *,
    mode: TaskType = TaskType.TRAINING,
    records_per_file: int | None = None,
    writer: Callable[[str], RecordIOWriter] = RecordIOWriter,
    progress: Callable[[int], object] = lambda count: None,
) -> list[str]:
    """Write all records, in the order of the reader's sources; returns the files.

    With `records_per_file` the target is a folder of `part-00000-of-00003.recordio` and so on, which appears
    under its name when all is in it; else it is one file. `writer` makes the writer of a path. `progress` is
    told the number of records so far.

    Raises OutputError for a target that exists or cannot be written, BadRecord, with its name, for a record
    that cannot be read or encoded, SourceUnavailable where its source is to blame, ReaderError for a reader
    that gives too few or too many. Then, and when it is interrupted, nothing is left.
    """
    path = os.fspath(target).rstrip("/") or "/"
    if records_per_file is not None and records_per_file < 1:
        raise InvalidArgument(f"records_per_file={records_per_file}: expected a positive number")
    if os.path.lexists(path):
        raise OutputError(f"'{path}' exists: remove it, or choose another target")
    sources = reader_sources(reader, mode)
    records = _noting(_encoded(reader, sources, mode, encode), progress)
    if records_per_file is None:
        _fill(writer(path), records)
        return [path]
    total = sum(source.count for source in sources)
    names = _part_names(total, records_per_file)
    with _folder(path) as folder:
        for name in names:
            _fill(writer(os.path.join(folder, name)), islice(records, records_per_file))
    return [os.path.join(path, name) for name in names]


def _fill(writer: RecordIOWriter, records: Iterable[bytes]) -> None:
    with writer:
        for record in records:
            writer.write(record)


def _encoded(
    reader: AbstractDataReader, sources: Iterable[Source], mode: TaskType, encode: Callable[[Any], Any]
) -> Iterator[bytes]:
    for source in sources:
        for index, record in _records(reader, source, mode):
            try:
                encoded = encode(record)
            except Exception as exc:
                what = str(exc) if isinstance(exc, BadRecord) else f"{type(exc).__name__}: {exc}"
                raise BadRecord(f"record {index} of {source.name!r}: {what}") from exc
            if not isinstance(encoded, bytes | bytearray | memoryview):
                what = f"the encoder made {type(encoded).__name__} of it, expected bytes"
                raise BadRecord(f"record {index} of {source.name!r}: {what}")
            yield bytes(encoded)


def _records(reader: AbstractDataReader, source: Source, mode: TaskType) -> Iterator[tuple[int, Any]]:
    """Number and record. A reader that ends early, or does not end, is not taken at its word."""
    last = source.start + source.count
    for start in range(source.start, last, _TASK):
        end, index = min(start + _TASK, last), start
        try:
            for record in reader.read_records(_task(source.name, start, end, mode)):
                if index == end:
                    index += 1
                    break
                yield index, record
                index += 1
        except Exception as exc:
            raise name_record(exc, source.name, index) from exc
        if index > end:
            raise ReaderError(f"{type(reader).__name__} gave more records than were asked for")
        if index < end:
            raise ReaderError(
                f"{type(reader).__name__} ended {end - index} record(s) early, at record {index} of "
                f"{source.name!r}: create_shards() promised them"
            )


def _task(name: str, start: int, end: int, mode: TaskType) -> Task:
    return Task(shard=Shard(name=name, start=start, end=end), type=mode)


def _noting(records: Iterator[bytes], progress: Callable[[int], object]) -> Iterator[bytes]:
    for count, record in enumerate(records, 1):
        yield record
        progress(count)


def _part_names(total: int, records_per_file: int) -> list[str]:
    parts = max(1, -(-total // records_per_file))
    return [f"part-{number:05d}-of-{parts:05d}.recordio" for number in range(parts)]


@contextmanager
def _folder(path: str) -> Iterator[str]:
    """A folder that becomes `path` at the end, or goes with all that is in it."""
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, part_name(name))
    try:
        os.mkdir(temporary)
        yield temporary
        sync_folder(temporary)
        os.rename(temporary, path)
        sync_folder(parent or ".")
    except OSError as exc:
        raise OutputError(f"'{path}' cannot be written: {exc.strerror}; nothing of it was left") from exc
    except OutputError as exc:  # of a file in it, by the folder's name of now
        raise OutputError(str(exc).replace(temporary, path)) from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
