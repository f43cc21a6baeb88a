"""A CSV of image files and labels.

It reads the list once and must not open an image before its record is asked for.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, BinaryIO, Unpack

import numpy as np

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.readers.images.decode import (
    EXTENSIONS,
    Image,
    checked_min_side,
    require_folder,
    safe_relative_path,
)
from edl_torch.readers.images.files import FolderFiles, ImageFilesReader, described_by
from edl_torch.readers.shared.files import readable
from edl_torch.readers.shared.looks import arguments
from edl_torch.readers.shared.mapped import StringTable, shared
from edl_torch.readers.storage import Data, Storage, StorageOptions, is_url
from edl_torch.shard import IndexArray, TaskType

_OWN_OPTIONS = {"root", "classes", "has_header", "min_side"}
_SEEN_LINES, _SEEN_BYTES = 20, 1 << 16
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)


class ImageManifestReader(ImageFilesReader):
    """Records `(image, label)` of a CSV with the columns `file,label`, or `image` alone of one column `file`.

    The file is UTF-8 (with or without a byte order mark), with any line ends; fields may be quoted, blank
    lines are skipped, blanks around labels do not count. Labels are the integers of the file if every label
    is one, else the class index of the name in `classes`, the sorted names. A name has another index
    in a list with other names: pass the training list's `classes` to the reader of the validation list.

    Args:
        manifest: The CSV; its path as given is the source's name.
        root: The folder that file names are relative to; default the CSV's own.
        has_header: Whether the first line is a heading. By default it is one if its first field does not
            end as image files do and no such file is below `root`.
        delimiter: One character between the fields.
        classes: The class names in the order of their indices; labels must be among them.
        min_side: Decode JPEGs at the smallest of 1, 1/2, 1/4, 1/8 of their size whose shorter side is not
            below this, for photographs that `transform` makes far smaller.
        store: Options of the store, and where indexes are kept: see `StorageOptions`.

    Raises DataFormatError, naming file and line, for a list that cannot be understood and for file names that
    lead out of `root`.
    """

    def __init__(
        self,
        manifest: str | os.PathLike[str],
        root: str | os.PathLike[str] | None = None,
        has_header: bool | None = None,
        delimiter: str = ",",
        *,
        classes: Sequence[str] | None = None,
        min_side: int | None = None,
        **store: Unpack[StorageOptions],
    ) -> None:
        super().__init__(os.fspath(manifest))
        self.min_side = checked_min_side(min_side)
        self.root = os.path.dirname(self.name) if root is None else os.fspath(root)
        if root is not None and not is_url(self.root):
            require_folder(self.root)
        storage = Storage.of(self, store)
        with readable(f"the manifest '{self.name}'"):
            data, part = described_by(self.name, storage)
        rows = self._without_heading(_rows(io.BytesIO(data), self.name, delimiter), has_header)
        labels: list[str] = []
        files = StringTable(_files_of(rows, self.name, labels))
        self.count = len(files)
        if not self.count:
            raise DataFormatError(f"'{self.name}' lists no image: expected lines of the form file,label")
        self.classes, numbers = _numbered(labels, classes, self.name)
        self._labels = shared({"labels": numbers}, "labels")
        self.described = [part, *(arguments("classes", self.classes) if self.classes else [])]
        self.image_files = FolderFiles.named(self.root, files, self.min_side, storage)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class index by name; empty where labels are integers."""
        return {name: number for number, name in enumerate(self.classes)}

    @property
    def targets(self) -> IndexArray | None:
        """Label of each image, int64 [count]; None where there are no labels."""
        labels = self._labels["labels"]
        return labels if len(labels) else None

    def with_image(self, index: int, image: Image, *beside: Data) -> Image | tuple[Image, int]:
        """`(image, label)`, or `image` where there are no labels; image: uint8 [height, width, 3], RGB."""
        labels = self._labels["labels"]
        return (image, int(labels[index])) if len(labels) else image

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for a `.csv` file that lists images, else None: others are `CsvReader`'s.

        It lists images if its lines after the first have one or two fields, of which the first ends as image
        files do; options that only one of the two readers has settle it.
        """
        if not (data.lower().endswith(".csv") and (is_url(data) or os.path.isfile(data))):
            return None
        storage = Storage(given.get("storage_options"))
        strange = given.keys() - _OWN_OPTIONS - {"delimiter"} - StorageOptions.__annotations__.keys()
        lists = not strange and (
            _OWN_OPTIONS & given.keys() or _lists_images(data, given.get("delimiter", ","), storage)
        )
        return {"manifest": data} if lists else None

    def _without_heading(self, rows: Iterator[_Row], has_header: bool | None) -> Iterator[_Row]:
        for position, (line, fields) in enumerate(rows):
            if position == 0 and has_header is None:
                name = fields[0]
                is_image = name.lower().endswith(EXTENSIONS) or os.path.isfile(os.path.join(self.root, name))
                has_header = not is_image
            if position or not has_header:
                yield line, fields


_Row = tuple[int, list[str]]  # line number and fields


def _files_of(rows: Iterator[_Row], path: str, labels: list[str]) -> Iterator[str]:
    """Yield the file names, each checked, and note the labels on the way."""
    width, known = 0, dict[str, str]()  # a label is held once, whatever the number of lines
    for line, fields in rows:
        width = width or min(len(fields), 2)
        place = f"'{path}' line {line}"
        if len(fields) != width:
            wanted = ("file", "file,label")[width - 1]
            raise DataFormatError(f"{place} has {len(fields)} fields, expected {wanted}")
        if width == 2:
            label = fields[1].strip()
            if not label:
                raise DataFormatError(f"{place} has no label: fill it in or remove the line")
            labels.append(known.setdefault(label, label))
        yield safe_relative_path(fields[0], place)


def _numbered(
    labels: Sequence[str], classes: Sequence[str] | None, path: str
) -> tuple[list[str], IndexArray]:
    """The class names (none for integers) and the int64 label of every record."""
    names = dict.fromkeys(labels)
    if classes is None and all(_INTEGER.fullmatch(name) for name in names):
        return [], np.fromiter(map(int, labels), np.int64, len(labels))
    known = sorted(names) if classes is None else [str(name) for name in classes]
    index = {name: number for number, name in enumerate(known)}
    for name in names:
        if name not in index:
            raise DataFormatError(f"'{path}' has the label {name!r}, which is not in classes={known}")
    return known, np.fromiter(map(index.__getitem__, labels), np.int64, len(labels))


def _lists_images(path: str, delimiter: str, storage: Storage) -> bool:
    try:
        with readable(f"the manifest '{path}'"):
            if is_url(path):
                start: BinaryIO = io.BytesIO(described_by(path, storage, _SEEN_BYTES)[0])
            else:
                start = open(path, "rb")  # noqa: SIM115  its rows close it
        rows = _rows(start, path, delimiter)
        head = [fields for _, fields in islice(rows, _SEEN_LINES)]
    except DataFormatError:
        return False
    return bool(head) and all(
        len(fields) <= 2 and fields[0].strip().lower().endswith(EXTENSIONS) for fields in head[1:] or head
    )


def _rows(file: BinaryIO, path: str, delimiter: str) -> Iterator[_Row]:
    """The lines that are not blank."""
    what = f"the manifest '{path}'"
    with readable(what), io.TextIOWrapper(file, newline="", encoding="utf-8-sig") as text:
        if len(delimiter) != 1:
            raise InvalidArgument(f"delimiter={delimiter!r} is not one character")
        reader = csv.reader(text, delimiter=delimiter, skipinitialspace=True, strict=True)
        try:
            for fields in reader:
                if any(field.strip() for field in fields):
                    yield reader.line_num, fields
        except csv.Error as exc:
            raise DataFormatError(f"'{path}' line {reader.line_num} is not CSV: {exc}") from exc
