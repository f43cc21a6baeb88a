"""A COCO segmentation to a mask.

Polygons are drawn by pycocotools. Run lengths are expanded here, after the format of COCO's maskApi.c:
pycocotools leaves what too short run lengths do not cover as uninitialised memory. It must not know which
image the segmentation belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edl_torch.errors import BadRecord, ReaderUnavailable

Mask = npt.NDArray[np.uint8]


def decode_segmentation(segmentation: Any, height: int, width: int) -> Mask:
    """Polygons, or run lengths as a list or compressed, as one uint8 mask [height, width] of 0 and 1.

    Several polygons are united; one of fewer than three points covers nothing. Raises BadRecord for anything
    else, and for run lengths that do not cover exactly this size.
    """
    try:
        if isinstance(segmentation, list):
            return _polygons(segmentation, height, width)
        size, counts = segmentation["size"], segmentation["counts"]
        if list(size) != [height, width]:
            raise BadRecord(f"a run-length mask has the size {size}, its image {[height, width]}")
        return _expand(counts if isinstance(counts, list) else _decompress(counts), height, width)
    except (KeyError, TypeError, IndexError, ValueError) as exc:
        raise BadRecord(f"a segmentation is neither polygons nor a run-length mask: {exc!r}") from exc


def _polygons(polygons: list[list[float]], height: int, width: int) -> Mask:
    # pycocotools takes a polygon of four numbers for a box
    areas = [np.asarray(polygon, dtype=np.float64) for polygon in polygons if len(polygon) >= 6]
    if not areas:
        return np.zeros((height, width), dtype=np.uint8)
    mask_api = _mask_api()
    union = mask_api.merge(mask_api.frPyObjects(areas, height, width))
    return _expand(_decompress(union["counts"]), height, width)


def _expand(counts: Sequence[int], height: int, width: int) -> Mask:
    """Runs of 0 and 1 in turn, beginning with 0, down the columns."""
    runs = np.asarray(counts, dtype=np.int64)
    if (runs < 0).any() or runs.sum() != height * width:
        raise BadRecord(f"a run-length mask covers {int(runs.sum())} pixels, its image has {height * width}")
    values = np.arange(len(runs), dtype=np.int64).astype(np.uint8) & 1
    return np.ascontiguousarray(np.repeat(values, runs).reshape(width, height).T)


def _decompress(text: str | bytes) -> list[int]:
    """Six bits a character (offset 48): a continuation bit and five of a signed number, low ones first.

    From the fourth on, each number is the difference to the one before the last.
    """
    counts: list[int] = []
    value = shift = 0
    for code in text.encode("ascii") if isinstance(text, str) else text:
        bits = code - 48
        value |= (bits & 0x1F) << shift
        shift += 5
        if bits & 0x20:
            continue
        signed = value - (1 << shift) if bits & 0x10 else value
        counts.append(signed + (counts[-2] if len(counts) > 2 else 0))
        value = shift = 0
    return counts


def _mask_api() -> Any:
    try:
        from pycocotools import mask
    except ImportError as exc:
        raise ReaderUnavailable("COCO masks need pycocotools: pip install pycocotools") from exc
    return mask
