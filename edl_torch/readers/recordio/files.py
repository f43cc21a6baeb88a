"""Which files a path, a folder or a glob stands for.

It must not know what is in them, but for their first bytes.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from edl_torch.errors import DataFormatError
from edl_torch.readers.recordio.format import MAGIC_BYTES

Data = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_NOT_DATA = (".", "_")  # hidden files; marks such as _SUCCESS
_INDEX = ".edl-index"
_LOOKED_AT = 64  # files of a folder


def files_of(data: Data) -> list[str]:
    """The files in order: those of a folder and of a glob sorted by name, those of a list as they stand.

    A folder stands for all files in it and below, but for names that begin with `.` or `_`. Raises
    DataFormatError where there is none, or one twice.
    """
    several = [data] if isinstance(data, str | os.PathLike) else list(data)
    files = [file for each in several for file in _files_of(os.fspath(each))]
    if len(set(files)) != len(files):
        twice, _ = Counter(files).most_common(1)[0]
        raise DataFormatError(f"'{twice}' is listed twice: each file is one source of the dataset")
    if not files:
        raise DataFormatError(f"{several!r} names no file; check the path")
    return files


def _files_of(path: str) -> list[str]:
    if os.path.isdir(path):
        files = sorted(_below(path))
    elif os.path.lexists(path):
        return [path]
    else:
        files = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    if not files:
        what = "holds no file" if os.path.isdir(path) else "does not exist, and matches no file as a pattern"
        raise DataFormatError(f"'{path}' {what}; check the path")
    return files


def _below(top: str) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise DataFormatError(f"the folder '{error.filename}' cannot be listed: {error.strerror}") from error

    for folder, subfolders, names in os.walk(top, onerror=fail):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith(_NOT_DATA))
        for name in names:
            if not name.startswith(_NOT_DATA) and not name.endswith(_INDEX):
                yield os.path.join(folder, name)


def holds_recordio(path: str) -> bool:
    """Whether a path, or one of the first files of a folder or glob, starts with the magic number."""
    try:
        if os.path.isdir(path):
            return any(map(_has_magic, islice(_below(path), _LOOKED_AT)))
        return any(map(_has_magic, islice(_files_of(path), _LOOKED_AT)))
    except DataFormatError:
        return False


def _has_magic(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb", buffering=0) as file:
            start = file.read(len(MAGIC_BYTES))
    except OSError:
        return False
    return start == MAGIC_BYTES or (not start and path.endswith(".recordio"))
