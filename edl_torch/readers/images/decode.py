"""One image file to one array: RGB, uint8, height × width × 3, whatever the file holds.

And the folder that a dataset's files lie in: whether it is there, and which names stay inside it.

| file | array |
| --- | --- |
| grayscale, palette | replicated, looked up: three channels |
| RGBA | alpha is dropped, the colour below it stays as stored |
| CMYK JPEG | converted to RGB by OpenCV (no colour profile) |
| 16 bits a channel | scaled to 8 bits |
| EXIF orientation | applied: the array is upright |
| missing, empty, truncated, no image | `BadRecord` with path, reason and remedy |

A JPEG that is complete but damaged in the middle decodes as OpenCV decodes it. With `min_side` one is decoded
at a half, a quarter or an eighth of its size, where that is large enough.
"""

from __future__ import annotations

import multiprocessing
import os
import posixpath
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument, SourceUnavailable
from edl_torch.readers.shared.packages import required
from edl_torch.readers.storage import Data, is_url

Image = npt.NDArray[np.uint8]

EXTENSIONS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_JPEG_START = b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"
_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
# In entropy-coded data 0xff is followed by 0 (stuffing), a restart marker or another 0xff (fill).
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_END_OF_IMAGE, _START_OF_IMAGE, _TEMPORARY = 0xD9, 0xD8, 0x01
# Frame headers, which have the size, are all markers from 0xc0 to 0xcf but tables and extensions.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCALES = (8, 4, 2)
# Whatever does not match is a plain relative path: the check costs one regex for each ordinary entry.
_SUSPICIOUS = re.compile(r"^$|^/|^[A-Za-z]:|\\|\x00|(?:^|/)\.{0,2}(?:/|$)")


def read_image(path: str, min_side: int | None = None) -> Image:
    """Read and decode one file: C-contiguous uint8 array [height, width, 3], RGB.

    With `min_side` a JPEG is decoded at the smallest of 1, 1/2, 1/4, 1/8 of its size whose shorter side is
    not below it: in the JPEG's own blocks, which is faster than to decode all pixels. Raises BadRecord that
    names the path, the reason and the remedy.
    """
    return decode_image(read_file(path, "image"), path, min_side)


def read_file(path: str, what: str, within: str | None = None) -> bytes:
    """Read a file of a record, which is `what` it says in messages.

    Raises BadRecord; SourceUnavailable where the file is missing because the folder of the dataset that it is
    `within` is gone or empty, as one is whose volume is not mounted.
    """
    try:
        with open(path, "rb", buffering=0) as file:  # it is read whole
            return file.read()
    except FileNotFoundError as exc:
        if within is not None and _is_gone(within):
            raise SourceUnavailable(
                f"the folder '{within}' is gone or empty ({missing_file(path, what)}): is its volume still "
                "mounted?"
            ) from exc
        raise missing_file(path, what) from exc
    except (OSError, ValueError) as exc:
        reason = f"{type(exc).__name__}: {exc}"
        raise _bad(path, reason, "check the path and its permissions", what) from exc


def checked_min_side(min_side: int | None) -> int | None:
    """The argument of a reader. Raises InvalidArgument."""
    if min_side is None or (isinstance(min_side, int) and not isinstance(min_side, bool) and min_side > 0):
        return min_side
    raise InvalidArgument(
        f"min_side is {min_side!r}: it must be the least number of pixels that the shorter side may have"
    )


def decode_image(data: Data, path: str, min_side: int | None = None) -> Image:
    """Decode the bytes of an image file; `path` is for messages only. See `read_image`."""
    if not data:
        raise _bad(path, "the file is empty (0 bytes)", "copy it again, or take it out of the dataset")
    if (kind := truncated_format(data)) is not None:
        reason = f"the {kind} is truncated after {len(data)} bytes"
        raise _bad(path, reason, "copy it again, or take it out of the dataset")
    cv2 = _opencv(os.getpid())
    try:
        scale = 1 if min_side is None else _jpeg_scale(data, min_side)
        image = _decode_rgb(cv2, np.frombuffer(data, np.uint8), scale)
    except cv2.error as exc:
        raise _bad(path, f"OpenCV refuses it: {exc}", "save it again as JPEG or PNG") from exc
    if image is None:
        raise _bad(
            path, "OpenCV finds no image in it", "save it again as JPEG or PNG, or take it out of the dataset"
        )
    return np.ascontiguousarray(image)


def _decode_rgb(cv2: Any, data: Image, scale: int) -> Any:
    to_rgb = getattr(cv2, "IMREAD_COLOR_RGB", None)  # since 4.11: saves one pass over the pixels
    if scale == 1 and to_rgb is not None:
        return cv2.imdecode(data, to_rgb)
    # No flag makes smaller ones RGB.
    flag = cv2.IMREAD_COLOR if scale == 1 else getattr(cv2, f"IMREAD_REDUCED_COLOR_{scale}")
    image = cv2.imdecode(data, flag)
    return None if image is None else cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


@lru_cache(maxsize=1)
def _opencv(pid: int) -> Any:
    """OpenCV, set up once a process: by its id, because a forked loader worker inherits the cache.

    Loader workers are daemonic processes and trainers are not: only in the former OpenCV's threads are
    turned off (many workers would fight for the cores, and a forked thread pool hangs) and its log is
    silenced (a corrupt file raises BadRecord). In the main process the user's settings stay.
    """
    cv2 = required("cv2", "reading images needs OpenCV: pip install opencv-python-headless")
    if multiprocessing.current_process().daemon:
        cv2.setNumThreads(0)
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    return cv2


def _bad(path: str, reason: str, remedy: str, what: str = "image") -> BadRecord:
    return BadRecord(f"{what} '{path}' cannot be read: {reason}; {remedy}")


def missing_file(path: str, what: str) -> BadRecord:
    """Return the error for a file of a record that is not there."""
    return _bad(path, "the file is missing", "restore it, or take it out of the dataset", what)


def truncated_format(data: Data) -> str | None:
    """The name of the format if `data` is cut off before its end, else None; nothing is decoded.

    Decoders differ: many fill the missing part of a cut-off JPEG with grey and report success. Formats: ITU-T
    T.81 annex B (JPEG), PNG specification 5.3, RFC 9649 (WebP). Bytes after the end (thumbnails of cameras,
    padding) are allowed. Formats that do not say where they end are never called truncated here; their
    decoders decide.
    """
    if data[:3] == _JPEG_START:
        # By its segments: the end marker of an embedded thumbnail is not the end.
        has_end = data[-2:] == _JPEG_END or any(code == _END_OF_IMAGE for code, _ in _jpeg_markers(data))
        return None if has_end else "JPEG"
    if data[:8] == _PNG_START:
        return None if data[-12:] == _PNG_END or _png_has_end(data) else "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return None if len(data) >= int.from_bytes(data[4:8], "little") + 8 else "WebP"
    return None


def _jpeg_scale(data: Data, min_side: int) -> int:
    """By how much libjpeg may divide both sides; 1 for other formats."""
    if data[:3] == _JPEG_START:
        for code, position in _jpeg_markers(data):
            if code in _FRAMES:  # length, precision, height, width: two, one, two and two bytes
                height, width = (
                    int.from_bytes(data[at : at + 2], "big") for at in (position + 3, position + 5)
                )
                shorter = min(height, width)
                return next((scale for scale in _SCALES if -(-shorter // scale) >= min_side), 1)
    return 1


def _jpeg_markers(data: Data) -> Iterator[tuple[int, int]]:
    """Yield each marker's code, and where what it announces begins."""
    position = 2
    while (marker := _NEXT_MARKER.search(data, position)) is not None:
        code = data[marker.start() + 1]
        position = marker.end()
        yield code, position
        if code not in (_START_OF_IMAGE, _TEMPORARY):
            position += int.from_bytes(data[position : position + 2], "big")


def _png_has_end(data: Data) -> bool:
    position = len(_PNG_START)
    while position + 12 <= len(data):
        if data[position + 4 : position + 8] == b"IEND":
            return True
        position += 12 + int.from_bytes(data[position : position + 4], "big")
    return False


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
    empty name, an absolute path, a drive letter, a NUL byte, a URL and for every `..` that leads out of the
    folder.
    """
    if not _SUSPICIOUS.search(entry):
        return entry
    if is_url(entry):
        raise DataFormatError(  # what follows a "?" may be a signature
            f"{described_in} names the URL '{entry.partition('?')[0]}': write file names relative to the "
            "image folder, which may be a URL itself (root=)"
        )
    path = entry.replace("\\", "/")
    is_rooted = path.startswith("/") or re.match(r"[A-Za-z]:", path)
    resolved = posixpath.normpath(path)
    if not path or "\x00" in path or is_rooted or resolved in (".", "..") or resolved.startswith("../"):
        raise DataFormatError(
            f"{described_in} names the file {entry!r}, which is not a path inside the image folder: "
            "write file names relative to the image folder, without a drive and without leading '..'"
        )
    return resolved
