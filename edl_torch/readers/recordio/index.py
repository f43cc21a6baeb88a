"""The index of many RecordIO files: where each chunk is, and which records it has, in a few arrays.

It must not know records or how they are read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import numpy as np

from edl_torch.errors import DataFormatError
from edl_torch.readers.recordio.scan import DataFile, scan
from edl_torch.readers.shared.index_cache import FileStamp, cached_index
from edl_torch.readers.shared.mapped import Array, MappedArrays

_KIND = "recordio1"
_WORTH_KEEPING = 1 << 18  # bytes: the headers of a smaller file are read as soon as an index is opened
_THREADS = 16
_INLINE = 1 << 16  # bytes: loader workers share a larger index as a mapped file
_CODEC = "utf-8", "surrogatepass"

Arrays = Mapping[str, Array]


def build_index(
    files: Sequence[str], dialect: str | None = None, index_dir: str | os.PathLike[str] | None = None
) -> Arrays:
    """Index all files, in parallel: reading headers waits for disks.

    Returns the arrays `names` (UTF-8) with `name_bounds`; `rows`, where in the two next the part of each
    file begins; `offsets` and `firsts` of `recordio_scan.Chain`, file after file; and `dialects`, `sizes` and
    `times` of each file. Raises DataFormatError for the first file, in order, that is not as it should be.
    """
    parts = _index_all(files, dialect, index_dir)
    names = [file.encode(*_CODEC) for file in files]
    arrays = {
        "names": np.frombuffer(b"".join(names), dtype=np.uint8),
        "name_bounds": _bounds(map(len, names)),
        "rows": _bounds(len(part["offsets"]) for _, part in parts),
        "offsets": np.concatenate([part["offsets"] for _, part in parts]),
        "firsts": np.concatenate([part["firsts"] for _, part in parts]),
        "dialects": np.array([part["dialect"] for _, part in parts], dtype=np.uint8),
        "sizes": np.array([stamp.size for stamp, _ in parts], dtype=np.int64),
        "times": np.array([stamp.mtime_ns for stamp, _ in parts], dtype=np.int64),
    }
    if sum(array.nbytes for array in arrays.values()) <= _INLINE:
        return arrays
    return MappedArrays.spill(arrays, label="recordio")


def names_of(arrays: Arrays) -> Iterator[str]:
    """The files' names, in order."""
    blob, bounds = arrays["names"].tobytes(), arrays["name_bounds"].tolist()
    return (blob[start:end].decode(*_CODEC) for start, end in pairwise(bounds))


def _index_all(
    files: Sequence[str], dialect: str | None, index_dir: str | os.PathLike[str] | None
) -> list[tuple[FileStamp, Arrays]]:
    if len(files) == 1:
        return [_index_one(files[0], dialect, index_dir)]
    with ThreadPoolExecutor(min(_THREADS, len(files)), thread_name_prefix="recordio-index") as pool:
        found = [pool.submit(_index_one, file, dialect, index_dir) for file in files]
        try:
            return [each.result() for each in found]
        finally:
            pool.shutdown(cancel_futures=True)


def _index_one(
    path: str, dialect: str | None, index_dir: str | os.PathLike[str] | None
) -> tuple[FileStamp, Arrays]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise DataFormatError(f"'{path}' is no regular file")
        stamp = FileStamp.of(path)
        file = DataFile(path)
    except OSError as exc:
        raise DataFormatError(f"'{path}' cannot be opened: {exc.strerror}; check the path") from exc
    build = partial(_arrays_of, file, stamp.size, dialect)
    if stamp.size < _WORTH_KEEPING:
        arrays = build()
        stamp.check()
        return stamp, arrays
    return stamp, cached_index(stamp, _KIND, build, options=dialect or "", index_dir=index_dir)


def _arrays_of(file: DataFile, size: int, dialect: str | None) -> Arrays:
    chain = scan(file, size, dialect)
    return {
        "offsets": np.array(chain.offsets, dtype=np.int64),
        "firsts": np.array(chain.firsts, dtype=np.int64),
        "dialect": np.array(chain.dialect.number, dtype=np.uint8),
    }


def _bounds(lengths: Iterator[int] | map[int]) -> Array:
    return np.cumsum([0, *lengths], dtype=np.int64)
