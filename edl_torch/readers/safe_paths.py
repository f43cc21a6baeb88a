"""File names that come from somebody's annotation file, kept inside the folder that they belong to.

It must not touch the file system: a symbolic link below the root is the owner's own arrangement and is
followed, but a *name* can never lead out.
"""

from __future__ import annotations

import posixpath
import re

from edl_torch.errors import DataFormatError

# Whatever does not match is a plain relative path: the check costs one regex for each ordinary entry.
_SUSPICIOUS = re.compile(r"^$|^/|^[A-Za-z]:|\\|\x00|(?:^|/)\.{0,2}(?:/|$)")


def safe_relative_path(entry: str, described_in: str) -> str:
    """`entry` as a relative path with forward slashes that stays below its root.

    Backslashes are separators (manifests made on Windows); `.` and inner `..` are resolved in the name.
    Raises DataFormatError, naming the place `described_in` (as in "'list.csv' line 3") and the entry, for an
    empty name, an absolute path, a drive letter, a NUL byte and for every `..` that leads out of the root.
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
