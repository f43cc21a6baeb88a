"""COCO annotation files with their folder of images: captions, and detection with keypoints and masks.

Format: https://cocodataset.org/#format-data. The annotation file is parsed and checked once, when the reader
is made, and kept as a few arrays; it must not open an image before its record is asked for. Polygons are
drawn by pycocotools. Run lengths are expanded here, after the format of COCO's maskApi.c: pycocotools leaves
what too short run lengths do not cover as uninitialised memory.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from edl_torch.errors import BadRecord, DataFormatError, InvalidArgument
from edl_torch.fingerprint import Part
from edl_torch.readers.images.decode import (
    Image,
    checked_min_side,
    require_folder,
    safe_relative_path,
)
from edl_torch.readers.images.files import FolderFiles, ImageFilesReader, described_by
from edl_torch.readers.shared.files import readable
from edl_torch.readers.shared.looks import arguments
from edl_torch.readers.shared.mapped import StringTable, shared
from edl_torch.readers.shared.packages import required
from edl_torch.readers.storage import Data, Storage, StorageOptions, is_url
from edl_torch.shard import IndexArray, TaskType

Path = str | os.PathLike[str]
_FIRST_FILE = re.compile(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")')


class _CocoReader(ImageFilesReader):
    """A reader of an annotation file; a subclass has one kind of them."""

    min_side: int | None = None

    def _parse(
        self, images: Path, key: str, kind: str, other: str, storage: Storage
    ) -> tuple[CocoFile, IndexArray, str]:
        """The file of this `kind`, the image row of each annotation, and how errors name an annotation."""
        self.images = os.fspath(images)
        if not is_url(self.images):
            require_folder(self.images)
        coco, where = load_coco(self.name, storage), f"'{self.name}' annotations"
        self.described = [coco.part, *self.described]
        if coco.annotations and key not in coco.annotations[0]:  # the rest is checked one by one
            has = ", ".join(coco.annotations[0])
            raise DataFormatError(
                f"'{coco.path}' is no file of {kind}: its annotations have {has or 'no keys'}, but no "
                f"'{key}'; use the {kind} file, or {other} for this one"
            )
        unique_ids(coco.annotations, where)
        ids, self._files = index_images(coco)
        self.image_files = FolderFiles.named(self.images, self._files, self.min_side, storage)
        self._ids = shared({"ids": ids}, "coco-images")
        return coco, index_rows(coco, ids), where


class CocoCaptionsReader(_CocoReader):
    """Captions of images: one record per annotation, or one per image.

    With `per="annotation"` a record is `(image, caption)`, in the order of the file's `annotations`; with
    `per="image"` it is `(image, [captions])`, in the order of the file's `images`, with an empty list where
    an image has none. The source's name is the annotation file's path as given.

    Args:
        images: The folder that `file_name` is relative to.
        annotations: The JSON file.
        per: What a record is.
        min_side: Decode JPEGs at the smallest of 1, 1/2, 1/4, 1/8 of their size whose shorter side is not
            below this, for photographs that `transform` makes far smaller.
        store: Options of the store, and where indexes are kept: see `StorageOptions`.

    Raises DataFormatError, naming the file and the entry, for a file of another kind, missing keys, ids that
    occur twice, annotations of images that are not listed, file names that lead out of the folder and a
    folder that is none.
    """

    def __init__(
        self,
        images: Path,
        annotations: Path,
        per: Literal["annotation", "image"] = "annotation",
        *,
        min_side: int | None = None,
        **store: Unpack[StorageOptions],
    ) -> None:
        super().__init__(os.fspath(annotations))
        self.min_side = checked_min_side(min_side)
        if per not in ("annotation", "image"):
            raise InvalidArgument(
                f"per={per!r}: use 'annotation' (one caption a record) or 'image' (all of an image)"
            )
        self.per = per
        self.described = arguments("per", per)
        storage = Storage.of(self, store)
        coco, rows, where = self._parse(images, "caption", "captions", "CocoDetectionReader", storage)
        self._captions = StringTable(field(coco.annotations, "caption", str, where))
        self._groups = grouped(rows, len(self._files)) if per == "image" else None
        self._rows = shared({} if per == "image" else {"rows": rows}, "coco-rows")
        self.count = len(self._captions) if self._groups is None else len(self._files)

    def file_of(self, index: int) -> int:
        """The number of a record's image file."""
        return int(self._rows["rows"][index]) if self._groups is None else index

    def with_image(
        self, index: int, image: Image, *beside: Data
    ) -> tuple[Image, str] | tuple[Image, list[str]]:
        """`(image, caption)` or `(image, [captions])`; image: uint8 [height, width, 3], RGB."""
        if self._groups is None:
            return image, self._captions[index]
        own = self._groups["order"][_of_image(self._groups, index)]
        return image, [self._captions[number] for number in own.tolist()]

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for a captions file, or the only one in `data/annotations/`; else None."""
        return _arguments(find_annotations(data, "caption"), given)


class CocoDetectionReader(_CocoReader):
    """Objects of images: instances, person keypoints and crowds; one record per image of the file.

    A record is `(image, target)` in the order of the file's `images`; `target` is a dict of new arrays, with
    n objects in the file's order (n may be 0):

    - `image_id`: int
    - `boxes`: float32 [n, 4], x1 y1 x2 y2 in pixels
    - `labels`: int64 [n], the file's category ids as they are (`reader.categories` has the names)
    - `area`: float32 [n], the box's where the file has none
    - `iscrowd`: int64 [n]
    - `keypoints`: float32 [n, k, 3], x y visibility, where the file has any; zeros for objects without
    - `masks`: uint8 [n, height, width], with `masks=True` only

    Args:
        images: The folder that `file_name` is relative to.
        annotations: The JSON file; its path as given is the source's name.
        masks: Whether to decode the segmentations (polygons and run lengths).
        store: Options of the store, and where indexes are kept: see `StorageOptions`.

    Raises DataFormatError as `CocoCaptionsReader` does.
    """

    def __init__(
        self,
        images: Path,
        annotations: Path,
        masks: bool = False,
        **store: Unpack[StorageOptions],
    ) -> None:
        super().__init__(os.fspath(annotations))
        self.described = arguments("masks", masks) if masks else ()
        kind = "instances or keypoints"
        storage = Storage.of(self, store)
        coco, rows, where = self._parse(images, "bbox", kind, "CocoCaptionsReader", storage)
        self.count = len(self._files)
        self._groups = grouped(rows, self.count)
        order = self._groups["order"]
        self.categories = _categories(coco)
        ids = field(coco.annotations, "category_id", int, where)
        labels = integers(ids, len(coco.annotations), where, "category_id")
        self._check_labels(labels, where)
        columns = _columns(coco.annotations, where) | {"labels": labels}
        self._columns = shared({key: column[order] for key, column in columns.items()}, "coco")
        ordered = (coco.annotations[n].get("segmentation", []) for n in order.tolist())
        # As text a polygon takes less room than as float64, and an RLE stays as short as it is.
        compact = partial(json.dumps, separators=(",", ":"))
        self._segmentations = StringTable(map(compact, ordered)) if masks else None

    def with_image(self, index: int, image: Image, *beside: Data) -> tuple[Image, dict[str, Any]]:
        """`(image, target)`; image: uint8 [height, width, 3], RGB. Raises BadRecord for a broken mask."""
        own = _of_image(self._groups, index)
        target: dict[str, Any] = {"image_id": int(self._ids["ids"][index])}
        target |= {key: column[own].copy() for key, column in self._columns.items()}
        if self._segmentations is not None:
            path = self.image_files.path(index)
            target["masks"] = self._decode_masks(image, path, own, self._segmentations)
        return image, target

    def _decode_masks(self, image: Image, path: str, own: slice, table: StringTable) -> npt.NDArray[np.uint8]:
        height, width = image.shape[:2]
        masks = np.zeros((own.stop - own.start, height, width), dtype=np.uint8)
        for place, number in enumerate(range(own.start, own.stop)):
            try:
                masks[place] = decode_segmentation(json.loads(table[number]), height, width)
            except BadRecord as exc:
                raise BadRecord(f"object {place} of '{path}' in '{self.name}': {exc}") from exc
        return masks

    def _check_labels(self, labels: npt.NDArray[np.int64], where: str) -> None:
        unknown = np.flatnonzero(
            ~np.isin(labels, np.fromiter(self.categories, np.int64, len(self.categories)))
        )
        if len(unknown):
            position = int(unknown[0])
            raise DataFormatError(
                f"{where}[{position}] has category_id {labels[position]}, which 'categories' lacks"
            )

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for a detection file, or the only one in `data/annotations/`; else None.

        A file that lists images and nothing of them (of a test set, or cut off) is taken for one, too.
        """
        return _arguments(find_annotations(data, "bbox") or find_annotations(data, "images"), given)


def _arguments(annotations: str | None, given: Mapping[str, Any]) -> dict[str, Any] | None:
    if annotations is None:
        return None
    return {"annotations": annotations, "images": given.get("images") or find_image_folder(annotations)}


def _categories(coco: CocoFile) -> dict[int, str]:
    if coco.categories is None:
        raise DataFormatError(f"'{coco.path}' has no 'categories'")
    where = f"'{coco.path}' categories"
    ids = unique_ids(coco.categories, where).tolist()
    return dict(zip(ids, field(coco.categories, "name", str, where), strict=True))


def _columns(annotations: Any, where: str) -> dict[str, npt.NDArray[Any]]:
    boxes = numbers([entry.get("bbox") for entry in annotations], np.float64, (4,), where, "bbox")
    sizes = boxes[:, 2:]
    given = [entry.get("area") for entry in annotations]
    areas = [
        box if area is None else area for area, box in zip(given, sizes.prod(axis=1).tolist(), strict=True)
    ]
    columns = {
        "boxes": np.concatenate([boxes[:, :2], boxes[:, :2] + sizes], axis=1).astype(np.float32),
        "area": numbers(areas, np.float32, (), where, "area"),
        "iscrowd": numbers(
            [entry.get("iscrowd", 0) for entry in annotations], np.int64, (), where, "iscrowd"
        ),
    }
    keypoints = _keypoints(annotations, where)
    return columns if keypoints is None else columns | {"keypoints": keypoints}


def _keypoints(annotations: Any, where: str) -> npt.NDArray[np.float32] | None:
    first = next((entry["keypoints"] for entry in annotations if entry.get("keypoints")), None)
    if first is None:
        return None
    length = len(first) if isinstance(first, list) else 0
    if not length:
        raise DataFormatError(f"{where}: keypoints={first!r}, expected a list of numbers")
    if length % 3:
        raise DataFormatError(f"{where}: {length} keypoint numbers, expected x, y, visibility for each")
    nothing = [0.0] * length
    flat = [entry.get("keypoints") or nothing for entry in annotations]
    return numbers(flat, np.float32, (length,), where, "keypoints").reshape(len(flat), -1, 3)


def find_annotations(data: str, key: str) -> str | None:
    """The JSON file that `data` is, or the one in `data/annotations/`, if its entries have `key`; else None.

    Raises DataFormatError if the folder holds several.
    """
    if os.path.isfile(data):
        return data if data.lower().endswith(".json") and _mentions(data, key) else None
    folder = os.path.join(data, "annotations")
    if not os.path.isdir(folder):
        return None
    files = sorted(
        os.path.join(folder, name) for name in os.listdir(folder) if name.lower().endswith(".json")
    )
    if len(files) > 1:
        raise DataFormatError(f"'{folder}' holds several annotation files: name one of {', '.join(files)}")
    return files[0] if files and _mentions(files[0], key) else None


def find_image_folder(annotations: str) -> str:
    """The folder beside the annotation file that holds its first image: as COCO and its copies lay them out.

    Raises DataFormatError that lists the folders which were tried.
    """
    here = os.path.dirname(annotations)
    first = _first_file(annotations)
    if first is None:
        return here  # it names no image: whoever parses it says what is wrong
    above = os.path.join(here, os.pardir)
    split = os.path.splitext(os.path.basename(annotations))[0].rpartition("_")[2]
    places = [
        (here, "images"),
        (above, "images"),
        (above, split),
        (above, "images", split),
        (here, split),
        (here,),
    ]
    folders = [os.path.normpath(os.path.join(*place)) for place in places]
    for folder in folders:
        if os.path.isfile(os.path.join(folder, first)):
            return folder
    raise DataFormatError(
        f"the images of '{annotations}' are not found: no {first!r} in {', '.join(folders)}; "
        "pass images=<folder>"
    )


def _mentions(path: str, key: str) -> bool:
    return _search(path, re.compile(rb'"' + key.encode() + rb'"\s*:')) is not None


def _first_file(path: str) -> str | None:
    found = _search(path, _FIRST_FILE)
    try:
        return None if found is None else str(json.loads(found))
    except ValueError:
        return None


def _search(path: str, pattern: re.Pattern[bytes]) -> bytes | None:
    """The pattern's last group in the file, mapped rather than read: annotation files have hundreds of MB."""
    if not os.path.getsize(path):
        return None
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        match = pattern.search(content)
        return None if match is None else bytes(match.group(match.lastindex or 0))


Entry = Mapping[str, Any]
Mask = npt.NDArray[np.uint8]


class CocoFile(NamedTuple):
    """The lists of one annotation file, checked only for being lists of objects."""

    path: str
    images: Sequence[Entry]
    annotations: Sequence[Entry]
    categories: Sequence[Entry] | None
    part: Part  # of the fingerprint


def load_coco(path: str, storage: Storage) -> CocoFile:
    """Read the file. Raises DataFormatError if it is missing, not JSON, or not of COCO's shape."""
    with readable(f"the annotation file '{path}'"):
        data, part = described_by(path, storage)
        text = data.decode("utf-8-sig")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise DataFormatError(
            f"'{path}' is not valid JSON ({exc}): it may be truncated; copy it again"
        ) from exc
    if not isinstance(content, dict):
        kind = "a list" if isinstance(content, list) else repr(content)[:40]
        raise DataFormatError(f"'{path}' is no COCO file: the top level is {kind}, expected an object")
    images, annotations = (_entries(content, key, path) for key in ("images", "annotations"))
    categories = _entries(content, "categories", path) if "categories" in content else None
    return CocoFile(path, images, annotations, categories, part)


def _entries(content: dict[str, Any], key: str, path: str) -> Sequence[Entry]:
    if key not in content:
        raise DataFormatError(
            f"'{path}' is no COCO file: it has no '{key}' (it has {', '.join(content) or 'nothing'})"
        )
    entries = content[key]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataFormatError(f"'{path}': '{key}' is not a list of objects")
    return entries


def index_images(coco: CocoFile) -> tuple[IndexArray, StringTable]:
    """The images' ids and paths below their folder. Raises DataFormatError that names file and entry."""
    where = f"'{coco.path}' images"
    if not coco.images:
        raise DataFormatError(f"'{coco.path}' lists no image")
    ids = unique_ids(coco.images, where)
    pairs = [(entry.get("height") or 0, entry.get("width") or 0) for entry in coco.images]
    numbers(pairs, np.int64, (2,), where, "height and width")
    names = enumerate(field(coco.images, "file_name", str, where))
    return ids, StringTable(safe_relative_path(name, f"{where}[{position}]") for position, name in names)


def index_rows(coco: CocoFile, ids: IndexArray) -> IndexArray:
    """The row of each annotation's image. Raises DataFormatError for an image that is not in the file."""
    row_of = {image_id: row for row, image_id in enumerate(ids.tolist())}
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


def grouped(rows: IndexArray, n_images: int) -> Mapping[str, IndexArray]:
    """Annotations by image: those of image `r` are `order[bounds[r]:bounds[r + 1]]`, in the file's order."""
    order = np.argsort(rows, kind="stable")
    bounds = np.searchsorted(rows[order], np.arange(n_images + 1))
    return shared({"order": order, "bounds": bounds}, "coco-groups")


def _of_image(groups: Mapping[str, IndexArray], row: int) -> slice:
    """Where in `order` the annotations of image `row` stand."""
    first, after = groups["bounds"][row : row + 2].tolist()
    return slice(first, after)


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
    if not len(rows):
        return np.zeros((0, *shape), dtype=dtype)
    table = _finite(rows, dtype, (len(rows), *shape))
    if table is None:
        position = next(place for place, row in enumerate(rows) if _finite(row, dtype, shape) is None)
        raise DataFormatError(
            f"{where}[{position}] has {key}={rows[position]!r}, expected "
            + (f"numbers {list(shape)}" if shape else "a number")
        )
    return table


def _finite(value: Any, dtype: type[np.generic], shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
    try:
        found = np.asarray(value, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found.shape == shape and np.isfinite(found).all() else None


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
    mask_api = required("pycocotools.mask", "COCO masks need pycocotools: pip install pycocotools")
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
