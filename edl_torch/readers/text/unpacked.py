"""Gzip files as plain copies beside their indexes: packed data cannot be read from the middle.

A copy is made once, by one process of the machine, streamed and checked (length and CRC of each member, as
gzip has them), and takes its name only when it is whole and on the disk. It has the packed file's
modification time, so that every process that makes one makes the same. A newer packed file's copy replaces
the old one. It must not know what the data is.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import zlib
from pathlib import Path

import numpy as np

from edl_torch.errors import DataFormatError, ReaderError
from edl_torch.readers.shared.files import file_lock, whole_file
from edl_torch.readers.shared.index_cache import FileStamp, index_place
from edl_torch.readers.shared.mapped import MappedArrays, write_arrays

log = logging.getLogger("edl_torch.readers")

_KIND = "unpacked1"
_BLOCK = 1 << 20


def is_packed(path: str) -> bool:
    """Whether a file begins as gzip does, whatever its name. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(3) == b"\x1f\x8b\x08"


def unpacked_copy(packed: FileStamp, index_dir: str | os.PathLike[str] | None = None) -> FileStamp:
    """The plain copy of a gzip file, made now if it is not there.

    Raises DataFormatError for a file that is cut short or damaged, and ReaderError where there is no room.
    """
    place = index_place(packed, _KIND, "", index_dir).with_suffix(".data")
    note = place.with_suffix(".note")
    header = {"size": packed.size, "mtime_ns": packed.mtime_ns, "path": packed.path}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(place):
            if not _is_there(place, note, header):
                _unpack(packed, place)
                made = FileStamp.of(place)  # not every file system keeps a time to the nanosecond
                arrays = {"size": np.array([made.size]), "mtime_ns": np.array([made.mtime_ns])}
                write_arrays(note, arrays, header)
        return FileStamp.of(place)
    except (EOFError, zlib.error, gzip.BadGzipFile) as exc:
        raise DataFormatError(f"'{packed.path}' is no whole gzip file: {exc}; copy it again") from exc
    except OSError as exc:
        raise ReaderError(
            f"'{packed.path}' cannot be unpacked into '{place.parent}': {exc.strerror}; index_dir= or "
            "EDL_INDEX_DIR name another folder with room for the plain data"
        ) from exc


def _is_there(place: Path, note: Path, header: dict[str, object]) -> bool:
    try:
        noted = MappedArrays(note)
        found = FileStamp.of(place)
        made = int(noted["size"][0]), int(noted["mtime_ns"][0])
        return noted.header == header and (found.size, found.mtime_ns) == made
    except (OSError, DataFormatError, KeyError):
        return False


def _unpack(packed: FileStamp, place: Path) -> None:
    log.info("path=%s is unpacked once to '%s'", packed.path, place)
    with whole_file(place, mtime_ns=packed.mtime_ns) as target:
        with gzip.open(packed.path, "rb") as source:
            shutil.copyfileobj(source, target, _BLOCK)
        packed.check()
