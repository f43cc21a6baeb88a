"""The Pascal VOC layout: `JPEGImages/`, `Annotations/*.xml` and the lists in `ImageSets/Main/`.

The list of a split is read when the reader is made; images and annotations when their record is asked for.
Entities and document types are refused: an annotation needs none, and they can read other files or blow up
memory.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from glob import glob
from typing import Any, NoReturn, Unpack
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np

from edl_torch.errors import BadRecord, DataFormatError
from edl_torch.fingerprint import Part
from edl_torch.readers.images.decode import Image, safe_relative_path
from edl_torch.readers.images.files import FolderFiles, ImageFilesReader, described_by
from edl_torch.readers.shared.files import readable
from edl_torch.readers.shared.finder import names_below
from edl_torch.readers.shared.looks import arguments
from edl_torch.readers.shared.mapped import StringTable
from edl_torch.readers.storage import Data, Storage, StorageOptions, is_elsewhere, is_url, local_path
from edl_torch.readers.storage.listing import Listing
from edl_torch.readers.storage.names import is_web
from edl_torch.shard import TaskType

CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train"),
    "tvmonitor",
)
_IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".JPG", ".JPEG", ".PNG")
_SPLIT_OF = {TaskType.TRAINING: "train", TaskType.EVALUATION: "val", TaskType.PREDICTION: "test"}
_BASE, _BY_NAME = re.compile(r"(?:VOCdevkit/)?VOC\d{4}"), re.compile(r"/VOC(?:devkit|\d{4})/?$")
_CORNERS = ("xmin", "ymin", "xmax", "ymax")


class VocReader(ImageFilesReader):
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
        store: Options of the store, and where indexes are kept: see `StorageOptions`.

    A folder in a store is listed once, when the reader is made; of a web server, which lists none, `root` is
    the folder that has `JPEGImages`, and images are looked for by each ending.

    The source's name is the list's path. Raises DataFormatError where the layout or the list is not as
    expected; BadRecord, when the record is read, for a missing or broken annotation, one with a DTD or
    entities, and a class that is not in `classes`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        split: str = "train",
        year: str | int | None = None,
        *,
        classes: Sequence[str] = CLASSES,
        **store: Unpack[StorageOptions],
    ) -> None:
        safe_relative_path(split, f"split={split!r}")
        storage = Storage.of(self, store)
        tree = _Tree(os.fspath(root), storage)
        self.root = tree.base(None if year is None else str(year))
        super().__init__(os.path.join(self.root, "ImageSets", "Main", f"{split}.txt"))
        names, listed = _read_list(self.name, storage)
        self._ids = StringTable(names)
        self.count = len(self._ids)
        self._annotations = tree.files(self.root, "Annotations", self._ids, (".xml",), "annotation")
        self.image_files = tree.files(self.root, "JPEGImages", self._ids, _IMAGE_ENDINGS, "image")
        self.files_beside = (self._annotations,)
        self.described = [
            listed,
            *(arguments("classes", tuple(classes)) if tuple(classes) != CLASSES else []),
        ]
        self.classes = ("background", *classes)
        self._label_of = {name: number for number, name in enumerate(self.classes) if number}

    def with_image(self, index: int, image: Image, *beside: Data) -> tuple[Image, dict[str, Any]]:
        """`(image, target)`; image: uint8 [height, width, 3], RGB."""
        path = self._annotations.path(index)
        target = parse_target(parse_xml(bytes(beside[0]), path), self._label_of, path)
        return image, {"image_id": self._ids[index], **target}

    @property
    def entries(self) -> StringTable:
        """The names of the list."""
        return self._ids

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments with the split that fits `mode`; None if `data` has not this layout."""
        if is_elsewhere(data):
            is_voc = _BY_NAME.search(data) is not None
        else:
            is_voc = os.path.isdir(local_path(data)) and bool(_bases(_folders_here(local_path(data))))
        return cls.arguments_named(data, mode) if is_voc else None

    @classmethod
    def arguments_named(cls, data: str, mode: TaskType) -> dict[str, Any]:
        """Constructor arguments for a folder that is known to have this layout."""
        return {"root": data, "split": _SPLIT_OF.get(mode, "train")}


class _Tree:
    """What lies below the folder that was named, here or in a store."""

    def __init__(self, root: str, storage: Storage) -> None:
        self._root = root.rstrip("/") or root
        self._storage = storage if is_url(root) else None
        self._listing: Listing | None = None
        if self._storage is not None and not is_web(root):
            self._listing = Listing.below(self._storage, self._root)

    def base(self, year: str | None) -> str:
        """The folder that has `JPEGImages`. Raises DataFormatError."""
        root = self._root
        if is_web(root):
            return root if year is None else f"{root}/VOC{year}"
        if self._listing is None:
            folders = _folders_here(root)
        else:
            folders = {name.rpartition("/")[0] for name in self._listing.names}
        bases = _bases(folders)
        if year is None and "" in bases:
            return root
        years = {base[-4:]: base for base in bases if base}
        if year is None and len(years) == 1:
            return os.path.join(root, next(iter(years.values())))
        if year in years:
            return os.path.join(root, years[year])
        if years:
            raise DataFormatError(f"'{root}' has the years {', '.join(years)}: pass year=… with one of them")
        raise DataFormatError(
            f"'{root}' is no Pascal VOC folder: expected JPEGImages, Annotations and ImageSets in it"
        )

    def files(
        self, base: str, folder: str, ids: StringTable, endings: Sequence[str], what: str
    ) -> FolderFiles:
        """The file of each id in a folder, by the first of the endings that is there."""
        if self._storage is not None and self._listing is None:
            return self._asked_for(f"{base}/{folder}", ids, endings, self._storage, what)
        root = base if self._storage is None else self._root
        inside = os.path.join(base, folder)[len(os.path.join(root, "")) :] + "/"
        there: set[str] = set()
        if self._listing is not None:
            there = {name.removeprefix(inside) for name in self._listing.names if name.startswith(inside)}
        elif len(endings) > 1:
            there = set(names_below(os.path.join(base, folder), hidden=()))
        names = StringTable(inside + name for name in _named(ids, endings, there))
        listing = None if self._listing is None else self._listing.of_names(names)
        return FolderFiles(root, names, self._storage, listing, what=what)

    @staticmethod
    def _asked_for(
        place: str, ids: StringTable, endings: Sequence[str], storage: Storage, what: str
    ) -> FolderFiles:
        """Files of a web server, which lists none: each is asked for, with one ending after the other."""
        listing = Listing.looked_up(storage, place, StringTable(name + endings[0] for name in ids))
        for ending in endings[1:]:
            listing = listing.with_others(storage, StringTable(name + ending for name in ids))
        return FolderFiles(place, listing.names, storage, listing, what=what)


def _named(ids: Iterable[str], endings: Sequence[str], there: Container[str]) -> Iterator[str]:
    for one in ids:
        yield next((one + ending for ending in endings if one + ending in there), one + endings[0])


def _folders_here(root: str) -> set[str]:
    """The folders of a root, and of those in it that may be bases."""
    return {
        name for inside in ("*", "VOC????/*", "VOCdevkit/VOC????/*") for name in glob(inside, root_dir=root)
    }


def _bases(folders: Iterable[str]) -> list[str]:
    """Where the layout begins: "" for the root itself, else `VOC<year>` in it or in its `VOCdevkit`."""
    found = {folder.rpartition("/")[0] for folder in folders if folder.split("/")[-1:] == ["JPEGImages"]}
    tops = {
        folder.partition("ImageSets")[0].rstrip("/") for folder in folders if "ImageSets" in folder.split("/")
    }
    return sorted(base for base in found & tops if not base or _BASE.fullmatch(base))


def _read_list(path: str, storage: Storage) -> tuple[list[str], Part]:
    with readable(f"the list '{path}'", "check split=…"):
        data, part = described_by(path, storage)
        lines = [line.split() for line in io.StringIO(data.decode("utf-8-sig"), newline=None)]
    for number, words in enumerate(lines, 1):
        if len(words) > 1:
            raise DataFormatError(
                f"'{path}' line {number} has {len(words)} words, expected one image name: not a split"
            )
    names = [safe_relative_path(words[0], f"'{path}' line {n}") for n, words in enumerate(lines, 1) if words]
    if not names:
        raise DataFormatError(f"'{path}' lists no image")
    return names, part


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
