"""Indexes of data files, built once and kept: beside the data, in a folder, or in the user's cache.

An index is good for a file of one size that was not written to, nor changed in any other way, since it was
made. It must not know what is indexed, or how.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from edl_torch.errors import DataFormatError
from edl_torch.readers.shared.files import FileStamp, file_lock
from edl_torch.readers.shared.mapped import Array, MappedArrays, write_arrays

log = logging.getLogger("edl_torch.readers")

BESIDE = "beside"


def cached_index(
    stamp: FileStamp,
    kind: str,
    build: Callable[[], Mapping[str, Array]],
    *,
    options: str = "",
    index_dir: str | os.PathLike[str] | None = None,
) -> MappedArrays:
    """The index of a file: the kept one if it was made of this very file, else `build()`, which is kept.

    Args:
        stamp: The file.
        kind: What sort of index, with the version of its meaning: "recordio2".
        build: Makes the arrays. What it raises goes to the caller.
        options: What else the index depends on, such as a dialect.
        index_dir: A folder, or `BESIDE` for `<file>.<kind>.edl-index` beside the data. Default:
            `EDL_INDEX_DIR`, else `edl_torch/` in the user's cache (`XDG_CACHE_HOME`, `~/.cache`), for a user
            without a home `edl_torch-<uid>` in the folder for temporary files; where that is not his alone,
            a folder of this process.

    Of several processes that start at once one builds, and the others take what it kept. Where it cannot be
    kept (a read-only folder, a full disk) a warning says so and the index lives in a temporary file. Raises
    SourceChanged when the data changes while its index is built.
    """
    place = index_place(stamp, kind, options, index_dir)
    header = {
        "path": stamp.path,
        "size": stamp.size,
        "mtime_ns": stamp.mtime_ns,
        "ctime_ns": stamp.ctime_ns,
        "kind": kind,
        "options": options,
    }
    kept = _kept(place, header)
    if kept is not None:
        return kept
    with suppress(OSError):  # without the folder there is no lock, and a warning when the index is written
        place.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(place):
        kept = _kept(place, header)
        return _built(stamp, place, header, build) if kept is None else kept


def _built(
    stamp: FileStamp, place: Path, header: Mapping[str, Any], build: Callable[[], Mapping[str, Array]]
) -> MappedArrays:
    arrays = build()
    stamp.check()
    try:
        write_arrays(place, arrays, header)
    except OSError as exc:
        log.warning(
            "path=%s its index cannot be kept at '%s' (%s) and is built again by the next process; "
            "EDL_INDEX_DIR or index_dir= name another folder",
            *(stamp.path, place, exc.strerror),
        )
        return MappedArrays.spill(arrays, label=str(header["kind"]))
    return MappedArrays(place, header)


def index_place(
    stamp: FileStamp, kind: str, options: str = "", index_dir: str | os.PathLike[str] | None = None
) -> Path:
    """The path at which `cached_index` keeps an index; it, or its folder, may not be there."""
    if index_dir is not None and os.fspath(index_dir) == BESIDE:
        tail = f".{_digest(options)[:8]}" if options else ""
        return Path(f"{stamp.path}.{kind}{tail}.edl-index")
    folder = Path(index_dir) if index_dir is not None else _chosen_folder() or _default_folder()
    return folder / f"{Path(stamp.path).name[:100]}.{kind}.{_digest(stamp.path, options)}.edl-index"


def _chosen_folder() -> Path | None:
    chosen = os.environ.get("EDL_INDEX_DIR")
    return Path(chosen) if chosen else None


def _default_folder() -> Path:
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "edl_torch"
    try:
        return Path.home() / ".cache" / "edl_torch"
    except RuntimeError:  # a container's user may have none
        return _own_folder(Path(tempfile.gettempdir()) / f"edl_torch-{os.getuid()}")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _kept(place: Path, header: Mapping[str, Any]) -> MappedArrays | None:
    found = MappedArrays(place)
    try:
        return MappedArrays(place, header) if found.header == header else None
    except FileNotFoundError:
        return None
    except (DataFormatError, OSError) as exc:
        log.warning("index=%s cannot be used and is built again: %s", place, exc)
        return None


def _own_folder(folder: Path) -> Path:
    """`folder`, where everybody may make one, if it is this user's alone; else a new one, and a warning."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(0o700)
        found = os.lstat(folder)
    except OSError:
        return folder  # nothing can be kept there, which who wants to keep something says
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return folder if mine and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else _new_folder(folder)


@functools.cache
def _new_folder(instead_of: Path) -> Path:
    made = Path(tempfile.mkdtemp(prefix="edl_torch-"))
    log.warning(
        "'%s' is not this user's alone: nothing is read from it, as others may have written it, and this "
        "process keeps its indexes in '%s' until it ends; EDL_INDEX_DIR names a folder of your own",
        *(instead_of, made),
    )
    atexit.register(_remove, made, os.getpid())
    return made


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
