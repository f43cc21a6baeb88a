"""A folder for this user's files in a place like `/tmp`, into which nobody else can have put a file.

It must not know what is kept in it.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("edl_torch.readers")

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def own_folder(folder: Path) -> Path:
    """`folder`; or, where others could have put files there, a new one of this process, and a warning.

    A folder that has no folder above it to which everybody can write is taken as it is. Else it is made, with
    permissions for its owner alone. One that is there is taken when it, what is in it and all above it belong
    to this user or to root, nobody else can write to it or replace a folder above it, and no link leads there
    but root's. The new one is removed when the process ends.
    """
    folder = Path(os.path.abspath(folder))
    if not any(_mode(above) & stat.S_IWOTH for above in folder.parents):
        return folder
    try:
        _make(folder)
    except FileExistsError:
        pass  # no folder, which the look at it finds out
    except OSError:
        return folder  # nothing can be kept there, which who wants to keep something says
    fault = next(_faults(folder), "")
    return _new_folder(folder, fault) if fault else folder


def _make(folder: Path) -> None:
    """Also what is missing above it."""
    for part in (*reversed(folder.parents), folder):
        with suppress(FileExistsError):
            os.mkdir(part, 0o700)


def _faults(folder: Path) -> Iterator[str]:
    public = False
    for part in (*reversed(folder.parents), folder):
        found = os.lstat(part)
        if public and stat.S_ISLNK(found.st_mode) and found.st_uid != 0:
            yield f"'{part}' is a link"
        public = public or bool(_mode(part) & stat.S_IWOTH)
    real = Path(os.path.realpath(folder))
    for part in (real, *real.parents):
        found = os.stat(part)
        if found.st_uid not in _trusted():
            yield f"'{part}' belongs to user {found.st_uid}"
        if not stat.S_ISDIR(found.st_mode):
            yield f"'{part}' is no folder"
        if found.st_mode & _OTHERS_WRITE and (part == real or not found.st_mode & stat.S_ISVTX):
            yield f"others than its owner can write to '{part}'"
    yield from _foreign_files(real, os.stat(real).st_ino)


@functools.cache  # nobody else can put a file there any more
def _foreign_files(folder: Path, inode: int) -> tuple[str, ...]:
    entries = ((entry, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder))
    return tuple(
        f"'{entry.path}' belongs to user {found.st_uid}"
        for entry, found in entries
        if found.st_uid not in _trusted()
    )


def _trusted() -> tuple[int, int]:
    return 0, os.geteuid()


def _mode(path: Path) -> int:
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0


@functools.cache
def _new_folder(instead_of: Path, fault: str) -> Path:
    made = Path(tempfile.mkdtemp(prefix="edl_torch-"))
    log.warning(
        "%s: nothing is read from '%s', as others may have written it, and this process keeps its indexes in "
        "'%s' until it ends; EDL_INDEX_DIR names a folder of your own",
        *(fault, instead_of, made),
    )
    atexit.register(_remove, made, os.getpid())
    return made


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
