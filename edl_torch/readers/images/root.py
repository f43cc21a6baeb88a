"""The folder that the image files of a dataset lie in: whether it is there, and which names stay inside it.

It must not know what the files are.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import contextmanager

from edl_torch.errors import BadRecord, DataFormatError, SourceUnavailable

# Whatever does not match is a plain relative path: the check costs one regex for each ordinary entry.
_SUSPICIOUS = re.compile(r"^$|^/|^[A-Za-z]:|\\|\x00|(?:^|/)\.{0,2}(?:/|$)")


@contextmanager
def within(folder: str) -> Iterator[None]:
    """Around the reading of a record from files in `folder`, the dataset's.

    Raises SourceUnavailable where a file is missing because the folder is gone or empty, as one is whose
    volume is not mounted.
    """
    try:
        yield
    except BadRecord as exc:
        if isinstance(exc.__cause__, FileNotFoundError) and _is_gone(folder):
            raise SourceUnavailable(
                f"the folder '{folder}' is gone or empty ({exc}): is its volume still mounted?"
            ) from exc
        raise


def require_folder(folder: str) -> None:
    """Raise DataFormatError for an image folder that is none, before each of its records is missed."""
    if not os.path.isdir(folder or os.curdir):
        why = "is no folder" if os.path.lexists(folder) else "does not exist"
        raise DataFormatError(f"the image folder '{folder}' {why}; check the path")


def _is_gone(folder: str) -> bool:
    try:
        with os.scandir(folder or os.curdir) as entries:
            return next(entries, None) is None
    except OSError:
        return True


def safe_relative_path(entry: str, described_in: str) -> str:
    """Return `entry`, a file name of an annotation file, as a path with forward slashes below the folder.

    Only the name is looked at: a symbolic link in the folder is the owner's own arrangement and is followed.
    Backslashes are separators (manifests made on Windows); `.` and inner `..` are resolved in the name.
    Raises DataFormatError, naming the place `described_in` (as in "'list.csv' line 3") and the entry, for an
    empty name, an absolute path, a drive letter, a NUL byte and for every `..` that leads out of the folder.
    """
    if not _SUSPICIOUS.search(entry):
        return entry
    path = entry.replace("\\", "/")
    if not path or "\x00" in path or path.startswith("/") or re.match(r"[A-Za-z]:", path):
        raise _outside(entry, described_in)
    path = posixpath.normpath(path)
    if path in (".", "..") or path.startswith("../"):
        raise _outside(entry, described_in)
    return path


def _outside(entry: str, described_in: str) -> DataFormatError:
    return DataFormatError(
        f"{described_in} names the file {entry!r}, which is not a path inside the image folder: "
        "write file names relative to the image folder, without a drive and without leading '..'"
    )
