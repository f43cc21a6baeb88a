"""Whether the bytes of an image file reach its end, for the formats that say where they end.

Decoders differ: many fill the missing part of a cut-off JPEG with grey and report success. It must not
decode. Formats: ITU-T T.81 annex B (JPEG), PNG specification 5.3, RFC 9649 (WebP).
"""

from __future__ import annotations

import re

_JPEG_START = b"\xff\xd8\xff"
_JPEG_END = b"\xff\xd9"
_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
# In entropy-coded data 0xff is followed by 0 (stuffing), a restart marker or another 0xff (fill).
_NEXT_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_END_OF_IMAGE, _START_OF_IMAGE, _TEMPORARY = 0xD9, 0xD8, 0x01


def truncated_format(data: bytes) -> str | None:
    """The name of the format if `data` is cut off before its end, else None.

    Bytes after the end (thumbnails of cameras, padding) are allowed. Formats that do not say where they end
    are never called truncated here; their decoders decide.
    """
    if data.startswith(_JPEG_START):
        return None if data.endswith(_JPEG_END) or _jpeg_has_end(data) else "JPEG"
    if data.startswith(_PNG_START):
        return None if data.endswith(_PNG_END) or _png_has_end(data) else "PNG"
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return None if len(data) >= int.from_bytes(data[4:8], "little") + 8 else "WebP"
    return None


def _jpeg_has_end(data: bytes) -> bool:
    """Walk the segments, so that the end marker of an embedded thumbnail is not taken for the end."""
    position = 2
    while (marker := _NEXT_MARKER.search(data, position)) is not None:
        code = data[marker.start() + 1]
        position = marker.end()
        if code == _END_OF_IMAGE:
            return True
        if code not in (_START_OF_IMAGE, _TEMPORARY):
            position += int.from_bytes(data[position : position + 2], "big")
    return False


def _png_has_end(data: bytes) -> bool:
    position = len(_PNG_START)
    while position + 12 <= len(data):
        if data[position + 4 : position + 8] == b"IEND":
            return True
        position += 12 + int.from_bytes(data[position : position + 4], "big")
    return False
