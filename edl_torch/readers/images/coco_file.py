"""A COCO annotation file (https://cocodataset.org/#format-data) as compact arrays, and its masks.

It parses and checks once; afterwards no dictionary of the file is kept. It must not open an image. Polygons
are drawn by pycocotools. Run lengths are expanded here, after the format of COCO's maskApi.c: pycocotools
leaves what too short run lengths do not cover as uninitialised memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edl_torch.errors import BadRecord, DataFormatError, ReaderUnavailable
from edl_torch.readers.images.decode import safe_relative_path
from edl_torch.readers.shared.mapped import StringTable, shared
from edl_torch.shard import IndexArray

Entry = Mapping[str, Any]
Mask = npt.NDArray[np.uint8]


class CocoFile(NamedTuple):
    """The lists of one annotation file, checked only for being lists of objects."""

    path: str
    images: Sequence[Entry]
    annotations: Sequence[Entry]
    categories: Sequence[Entry] | None


def load_coco(path: str) -> CocoFile:
    """Read the file. Raises DataFormatError if it is missing, not JSON, or not of COCO's shape."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            content = json.load(file)
    except OSError as exc:
        raise DataFormatError(
            f"the annotation file '{path}' cannot be read: {exc.strerror}; check the path"
        ) from exc
    except (ValueError, RecursionError) as exc:
        raise DataFormatError(
            f"'{path}' is not valid JSON ({exc}): it may be truncated; copy it again"
        ) from exc
    if not isinstance(content, dict):
        raise DataFormatError(
            f"'{path}' is no COCO file: the top level is {_kind(content)}, expected an object"
        )
    images, annotations = (_entries(content, key, path) for key in ("images", "annotations"))
    categories = _entries(content, "categories", path) if "categories" in content else None
    return CocoFile(path, images, annotations, categories)


def _entries(content: dict[str, Any], key: str, path: str) -> Sequence[Entry]:
    if key not in content:
        raise DataFormatError(
            f"'{path}' is no COCO file: it has no '{key}' (it has {', '.join(content) or 'nothing'})"
        )
    entries = content[key]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataFormatError(f"'{path}': '{key}' is not a list of objects")
    return entries


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else repr(value)[:40]


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoImages:
    """The images in the file's order.

    arrays: `ids` int64 [n], `sizes` int64 [n, 2], height and width, 0 where the file does not say; files:
    paths below the image folder.
    """

    arrays: Mapping[str, IndexArray]
    files: StringTable

    @property
    def ids(self) -> IndexArray:
        """The ids, int64 [n]."""
        return self.arrays["ids"]

    def paths(self, folder: str) -> Iterator[str]:
        """The files in `folder`, in the file's order."""
        return (os.path.join(folder, file) for file in self.files)

    def __len__(self) -> int:
        return len(self.ids)


def index_images(coco: CocoFile) -> CocoImages:
    """Check and compact the images. Raises DataFormatError that names file and entry."""
    where = f"'{coco.path}' images"
    if not coco.images:
        raise DataFormatError(f"'{coco.path}' lists no image")
    ids = unique_ids(coco.images, where)
    pairs = [(entry.get("height") or 0, entry.get("width") or 0) for entry in coco.images]
    sizes = numbers(pairs, np.int64, (2,), where, "height and width")
    arrays = shared({"ids": ids, "sizes": sizes}, "coco-images")
    return CocoImages(arrays=arrays, files=StringTable(_files(coco.images, where)))


def _files(images: Sequence[Entry], where: str) -> Iterator[str]:
    for position, name in enumerate(field(images, "file_name", str, where)):
        yield safe_relative_path(name, f"{where}[{position}]")


def index_rows(coco: CocoFile, images: CocoImages) -> IndexArray:
    """The row of each annotation's image. Raises DataFormatError for an image that is not in the file."""
    row_of = {image_id: row for row, image_id in enumerate(images.ids.tolist())}
    where = f"'{coco.path}' annotations"
    rows = np.empty(len(coco.annotations), dtype=np.int64)
    for position, image_id in enumerate(field(coco.annotations, "image_id", int, where)):
        row = row_of.get(image_id)
        if row is None:
            raise DataFormatError(
                f"{where}[{position}] has image_id {image_id}, which 'images' does not list"
            )
        rows[position] = row
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Annotations by image: those of image `r` are `order[bounds[r]:bounds[r + 1]]`, in the file's order.

    arrays: `order` and `bounds`, int64.
    """

    arrays: Mapping[str, IndexArray]

    @classmethod
    def of(cls, rows: IndexArray, n_images: int) -> Groups:
        """Group by row."""
        order = np.argsort(rows, kind="stable")
        bounds = np.searchsorted(rows[order], np.arange(n_images + 1))
        return cls(arrays=shared({"order": order, "bounds": bounds}, "coco-groups"))

    @property
    def order(self) -> IndexArray:
        """All annotations, one image's after the other's."""
        return self.arrays["order"]

    def span(self, row: int) -> slice:
        """Where in `order` the annotations of image `row` stand."""
        first, after = self.arrays["bounds"][row : row + 2].tolist()
        return slice(first, after)

    def __getitem__(self, row: int) -> IndexArray:
        return self.order[self.span(row)]


def field(entries: Sequence[Entry], key: str, kind: type, where: str) -> Iterator[Any]:
    """The value of `key` in every entry, of exactly this type. Raises DataFormatError naming the entry."""
    for position, entry in enumerate(entries):
        value = entry.get(key)
        if type(value) is not kind:
            what = f"has no '{key}'" if key not in entry else f"has {key}={value!r}, expected {kind.__name__}"
            raise DataFormatError(f"{where}[{position}] {what}")
        yield value


def unique_ids(entries: Sequence[Entry], where: str) -> IndexArray:
    """The `id` of every entry, int64. Raises DataFormatError for one that occurs twice."""
    seen: set[int] = set()
    for position, number in enumerate(field(entries, "id", int, where)):
        if number in seen:
            raise DataFormatError(f"{where}[{position}] has id {number}, which an earlier entry has already")
        seen.add(number)
    return integers((entry["id"] for entry in entries), len(entries), where, "id")


def integers(values: Iterable[int], count: int, where: str, key: str) -> IndexArray:
    """`count` values as int64 [count]. Raises DataFormatError for one that is larger."""
    try:
        return np.fromiter(values, np.int64, count)
    except OverflowError as exc:
        raise DataFormatError(f"{where}: a number under '{key}' is too large for 64 bits") from exc


def numbers(
    rows: Sequence[Any], dtype: type[np.generic], shape: tuple[int, ...], where: str, key: str
) -> npt.NDArray[Any]:
    """`rows` as an array [len(rows), *shape]. Raises DataFormatError naming the first other row."""
    try:
        table = np.asarray(rows, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        table = np.empty(0, dtype=dtype)
    if not len(rows):
        return np.zeros((0, *shape), dtype=dtype)
    fits = table.shape == (len(rows), *shape)
    if not fits or not np.isfinite(table).all():
        position = next(p for p, row in enumerate(rows) if not _is_numbers(row, dtype, shape))
        raise DataFormatError(
            f"{where}[{position}] has {key}={rows[position]!r}, expected "
            + (f"numbers {list(shape)}" if shape else "a number")
        )
    return table


def _is_numbers(row: object, dtype: type[np.generic], shape: tuple[int, ...]) -> bool:
    try:
        value = np.asarray(row, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        return False
    return value.shape == shape and bool(np.isfinite(value).all())


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
