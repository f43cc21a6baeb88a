"""A COCO segmentation to a mask, through pycocotools.

It must not know which image the segmentation belongs to.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from edl_torch.errors import BadRecord, ReaderUnavailable

Mask = npt.NDArray[np.uint8]


def decode_segmentation(segmentation: Any, height: int, width: int) -> Mask:
    """Polygons, run lengths of a crowd or a compressed RLE as one uint8 mask [height, width] of 0 and 1.

    Several polygons are united; one of fewer than three points covers nothing. Raises BadRecord for anything
    else, and for an RLE of another size.
    """
    mask_api = _mask_api()
    try:
        if isinstance(segmentation, list):
            return _polygons(mask_api, segmentation, height, width)
        if list(segmentation["size"]) != [height, width]:
            raise BadRecord(
                f"a run-length mask has the size {segmentation['size']}, its image {[height, width]}"
            )
        counts = segmentation["counts"]
        rle = mask_api.frPyObjects(segmentation, height, width) if isinstance(counts, list) else segmentation
        return np.asarray(mask_api.decode(rle), dtype=np.uint8)
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise BadRecord(f"a segmentation is neither polygons nor a run-length mask: {exc!r}") from exc


def _polygons(mask_api: Any, polygons: list[list[float]], height: int, width: int) -> Mask:
    # pycocotools takes a polygon of four numbers for a box
    areas = [np.asarray(polygon, dtype=np.float64) for polygon in polygons if len(polygon) >= 6]
    if not areas:
        return np.zeros((height, width), dtype=np.uint8)
    rles = mask_api.frPyObjects(areas, height, width)
    return np.asarray(mask_api.decode(mask_api.merge(rles)), dtype=np.uint8)


def _mask_api() -> Any:
    try:
        from pycocotools import mask
    except ImportError as exc:
        raise ReaderUnavailable("COCO masks need pycocotools: pip install pycocotools") from exc
    return mask
