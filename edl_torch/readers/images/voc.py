"""The Pascal VOC layout: `JPEGImages/`, `Annotations/*.xml` and the lists in `ImageSets/Main/`.

The list of a split is read when the reader is made; images and annotations when their record is asked for.
Entities and document types are refused: an annotation needs none, and they can read other files or blow up
memory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np

from edl_torch.errors import BadRecord, DataFormatError
from edl_torch.fingerprint import Fingerprint, Part
from edl_torch.readers.base import IndexedReader
from edl_torch.readers.images.decode import Image, read_image, safe_relative_path, within
from edl_torch.readers.shared.looks import SummedFile, arguments, listing_of, sizes
from edl_torch.readers.shared.mapped import StringTable
from edl_torch.shard import TaskType

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train"),
    "tvmonitor",
)
_IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")
_SPLIT_OF = {TaskType.TRAINING: "train", TaskType.EVALUATION: "val", TaskType.PREDICTION: "test"}
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class VocReader(IndexedReader):
    """Records `(image, target)` of one split, in the order of its list.

    `target` is a dict with n objects in the file's order (n may be 0):

    - `image_id`: str, the name in the list
    - `boxes`: float32 [n, 4], xmin ymin xmax ymax as written (the challenge counts pixels from 1, inclusive)
    - `labels`: int64 [n], 1 … 20 in the order of `CLASSES`, 0 is the background: `reader.classes[label]`
    - `names`, `poses`: lists of n str
    - `difficult`, `truncated`: bool [n]

    Args:
        root: The folder that has `JPEGImages`, or one above it that has exactly one `VOC<year>` folder.
        split: The name of a list in `ImageSets/Main`: train, val, trainval, test.
        year: Which `VOC<year>` folder, where there are several.
        classes: Names of a dataset of one's own in the same layout.

    The source's name is the list's path. Raises DataFormatError where the layout or the list is not as
    expected; BadRecord, when the record is read, for a missing or broken annotation, one with a DTD or
    entities, and a class that is not in `classes`.
    """

    yields_images = True
    looks_again = True
    imports = ("cv2",)
    thread_safe = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "train",
        year: str | int | None = None,
        *,
        classes: Sequence[str] = CLASSES,
    ) -> None:
        self.root = _find_base(os.fspath(root), None if year is None else str(year))
        safe_relative_path(split, f"split={split!r}")
        super().__init__(os.path.join(self.root, "ImageSets", "Main", f"{split}.txt"))
        names, self._listed = _read_list(self.name)
        self._ids = StringTable(names)
        self.count = len(self._ids)
        self.classes = ("background", *classes)
        self._label_of = {name: number for number, name in enumerate(self.classes) if number}

    def load(self, index: int) -> tuple[Image, dict[str, Any]]:
        """`(image, target)`; image: uint8 [height, width, 3], RGB."""
        image_id = self._ids[index]
        path = self._annotation_path(image_id)
        with within(self.root):
            target = parse_target(parse_xml(_read_annotation(path), path), self._label_of, path)
            return read_image(self._image_path(image_id)), {"image_id": image_id, **target}

    def _annotation_path(self, image_id: str) -> str:
        return os.path.join(self.root, "Annotations", image_id + ".xml")

    def _image_path(self, image_id: str) -> str:
        stem = os.path.join(self.root, "JPEGImages", image_id)
        return next(
            (stem + ending for ending in _IMAGE_ENDINGS if os.path.exists(stem + ending)), stem + ".jpg"
        )

    def fingerprint(self, *, whole: bool = False) -> Fingerprint:
        """The list's bytes, those of some annotations, and sizes of their images."""

        def files(place: int) -> list[str]:
            return [self._annotation_path(self._ids[place]), self._image_path(self._ids[place])]

        classes = self.classes[1:]
        more = arguments("classes", classes) if classes != CLASSES else []
        looks = sizes(self.count, files, whole=whole)
        return listing_of(self._listed, self._ids, looks, whole=whole, more=more)

    def listed_files(self) -> Iterator[str]:
        """The images' paths, by record."""
        return map(self._image_path, self._ids)

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments with the split that fits `mode`; None if `data` has not this layout."""
        if not os.path.isdir(data) or not (_is_base(data) or _years(data)):
            return None
        return {"root": data, "split": _SPLIT_OF.get(mode, "train")}


def _is_base(folder: str) -> bool:
    return all(os.path.isdir(os.path.join(folder, name)) for name in ("JPEGImages", "ImageSets"))


def _years(root: str) -> dict[str, str]:
    """The `VOC<year>` folders in `root` or in `root/VOCdevkit`, by year."""
    for folder in (root, os.path.join(root, "VOCdevkit")):
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        found = {name[3:]: os.path.join(folder, name) for name in names if re.fullmatch(r"VOC\d{4}", name)}
        if found:
            return {year: path for year, path in found.items() if _is_base(path)}
    return {}


def _find_base(root: str, year: str | None) -> str:
    if year is None and _is_base(root):
        return root
    years = _years(root)
    if year is None and len(years) == 1:
        return next(iter(years.values()))
    if year in years:
        return years[year]
    if years:
        raise DataFormatError(f"'{root}' has the years {', '.join(years)}: pass year=… with one of them")
    raise DataFormatError(
        f"'{root}' is no Pascal VOC folder: expected JPEGImages, Annotations and ImageSets in it"
    )


def _read_list(path: str) -> tuple[list[str], Part]:
    try:
        seen = SummedFile(path)
        with seen.text(encoding="utf-8-sig") as file:
            lines = [line.split() for line in file]
    except OSError as exc:
        raise DataFormatError(f"the list '{path}' cannot be read: {exc.strerror}; check split=…") from exc
    except UnicodeDecodeError as exc:
        raise DataFormatError(f"the list '{path}' is not UTF-8: {exc.reason} at byte {exc.start}") from exc
    for number, words in enumerate(lines, 1):
        if len(words) > 1:
            raise DataFormatError(
                f"'{path}' line {number} has {len(words)} words, expected one image name: not a split"
            )
    names = [safe_relative_path(words[0], f"'{path}' line {n}") for n, words in enumerate(lines, 1) if words]
    if not names:
        raise DataFormatError(f"'{path}' lists no image")
    return names, seen.part


def _read_annotation(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as exc:
        raise BadRecord(f"the annotation '{path}' cannot be read: {exc.strerror}; restore it") from exc


def parse_xml(data: bytes, path: str) -> Element:
    """The root element. Raises BadRecord, naming the path, for broken XML and for any DTD or entity."""
    builder = TreeBuilder()
    parser = expat.ParserCreate()

    def refuse(*_: Any) -> NoReturn:
        raise BadRecord(
            f"'{path}' declares a document type or entity, which annotations must not: remove <!DOCTYPE …>"
        )

    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as exc:
        raise BadRecord(
            f"'{path}' is not valid XML: {exc}; repair it or take the image out of the split"
        ) from exc
    return builder.close()


def parse_target(root: Element, classes: Mapping[str, int], path: str) -> dict[str, Any]:
    """The objects of an annotation as described in `VocReader`. Raises BadRecord, naming path and object."""
    objects = root.findall("object")
    names = [(entry.findtext("name") or "").strip() for entry in objects]
    for number, name in enumerate(names):
        if name not in classes:
            raise BadRecord(f"'{path}' object {number} is of the class {name!r}: pass classes=… that has it")
    boxes = [
        [_coordinate(entry, corner, number, path) for corner in _CORNERS]
        for number, entry in enumerate(objects)
    ]
    return {
        "boxes": np.array(boxes, dtype=np.float32).reshape(-1, 4),
        "labels": np.array([classes[name] for name in names], dtype=np.int64),
        "names": names,
        "difficult": np.array([_flag(entry, "difficult") for entry in objects], dtype=np.bool_),
        "truncated": np.array([_flag(entry, "truncated") for entry in objects], dtype=np.bool_),
        "poses": [(entry.findtext("pose") or "Unspecified").strip() for entry in objects],
    }


def _coordinate(entry: Element, corner: str, number: int, path: str) -> float:
    text = entry.findtext(f"bndbox/{corner}")
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadRecord(f"'{path}' object {number} has {corner}={text!r}, expected a number")
    return value


def _flag(entry: Element, key: str) -> bool:
    return (entry.findtext(key) or "0").strip() not in ("0", "", "Unspecified")
