"""A folder of images: one subfolder per class, or one flat folder without labels.

It lists names once and must not open an image before its record is asked for.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.readers.images.decode import EXTENSIONS, Image, checked_min_side
from edl_torch.readers.images.files import FolderFiles, ImageFilesReader
from edl_torch.readers.shared.finder import names_below
from edl_torch.readers.shared.looks import digest_of
from edl_torch.readers.shared.mapped import StringTable
from edl_torch.readers.storage import Data, Storage, StorageOptions, is_url
from edl_torch.readers.storage.listing import Listing, folder_order
from edl_torch.shard import IndexArray, TaskType

_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})
_HIDDEN = (".",)


class ImageFolderReader(ImageFilesReader):
    """Records `(image, class index)` of `root/<class>/…/<file>`, or `image` alone of `root/<file>`.

    Classes are the sorted names of the subfolders; the order of the records is torchvision's `ImageFolder`
    order: by class, then folder, then file name (code points). Images in nested subfolders belong to the
    class above them. Hidden files and folders (`.name`) are skipped; links are followed, loops are not.

    Args:
        root: The folder; its path as given is the source's name.
        extensions: File name endings to take, any case; default `readers.images.decode.EXTENSIONS`.
        allow_empty: Whether a class may have no image.
        min_side: Decode JPEGs at the smallest of 1, 1/2, 1/4, 1/8 of their size whose shorter side is not
            below this, for photographs that `transform` makes far smaller.
        store: Options of the store, and where indexes are kept: see `StorageOptions`.

    A folder in a store is listed when the reader is made. What is read is what was listed, else it is
    SourceChanged; the bytes of a lease's records are asked for before they are needed.

    Raises DataFormatError for a folder without images, for a class without images, for one that has both
    images and class folders, and for one of splits (`train`, `val`, …), each of which has class folders.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        extensions: Sequence[str] | None = None,
        *,
        allow_empty: bool = False,
        min_side: int | None = None,
        **store: Unpack[StorageOptions],
    ) -> None:
        super().__init__(os.fspath(root))
        self.min_side = checked_min_side(min_side)
        suffixes = _suffixes(extensions)
        given = Storage.of(self, store)
        storage = given if is_url(self.name) else None
        self._files, found, subfolders = _images_below(self.name, suffixes, storage)
        self._index(subfolders, suffixes, allow_empty)
        self.described = [("class folders", digest_of(self.classes))] if self.classes else []
        self.image_files = FolderFiles(self.name, self._files, storage, found, min_side=self.min_side)

    def _index(self, subfolders: list[str], suffixes: tuple[str, ...], allow_empty: bool) -> None:
        """Note classes, or say what is wrong with the files, which lie in their order."""
        self.count = len(self._files)
        if not self.count:
            raise DataFormatError(
                f"'{self.name}' has no image: files must end in one of {', '.join(suffixes)}"
            )
        of_class = [bisect_left(self._files, folder, key=_class_of) for folder in subfolders]
        bounds = np.array([*of_class, self.count], dtype=np.int64)
        empty = [folder for folder, count in zip(subfolders, np.diff(bounds), strict=True) if not count]
        if _class_of(self._files[0]) == "":  # images of its own
            if bounds[0] < self.count:
                classes = [folder for folder in subfolders if folder not in empty]
                raise DataFormatError(
                    f"'{self.name}' has images of its own and folders with images ({', '.join(classes[:3])}):"
                    " keep either one folder per class, or one flat folder"
                )
            subfolders, bounds, empty = [], bounds[-1:], []
        elif _are_splits(subfolders) and any(name.count("/") > 1 for name in self._files):
            raise _holds_splits(self.name, subfolders)
        if empty and not allow_empty:
            raise DataFormatError(
                f"'{self.name}': no image in the class folder(s) {', '.join(empty[:3])}; remove them, pass "
                "extensions=… if their files end otherwise, or pass allow_empty=True"
            )
        self.classes: list[str] = subfolders
        self.class_to_idx: dict[str, int] = {name: number for number, name in enumerate(self.classes)}
        self._bounds: IndexArray = bounds

    @property
    def targets(self) -> IndexArray | None:
        """Class index of each image, int64 [count]; None for a flat folder."""
        return np.repeat(np.arange(len(self.classes)), np.diff(self._bounds)) if self.classes else None

    def listed_files(self) -> Iterator[str]:
        """None: what was found is there, and once."""
        return iter(())

    def with_image(self, index: int, image: Image, *beside: Data) -> Image | tuple[Image, int]:
        """`(image, class index)`, or `image` for a flat folder; image: uint8 [height, width, 3], RGB."""
        if not self.classes:
            return image
        return image, int(np.searchsorted(self._bounds, index, side="right")) - 1

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for a folder, else None, as for one of other files alone. Raises
        DataFormatError for a folder of splits."""
        if not os.path.isdir(data):
            return None
        suffixes = _suffixes(given.get("extensions"))
        names = list(names_below(data, deep=False, hidden=_HIDDEN))
        folders = sorted(name[:-1] for name in names if name.endswith("/"))
        if _are_splits(folders):
            raise _holds_splits(data, folders)
        has_images = any(name.lower().endswith(suffixes) for name in names)
        return {"root": data} if folders or has_images or not os.listdir(data) else None

    def __repr__(self) -> str:
        return f"<ImageFolderReader {self.name!r} records={self.count} classes={len(self.classes)}>"


def _images_below(
    root: str, suffixes: tuple[str, ...], storage: Storage | None
) -> tuple[StringTable, Listing | None, list[str]]:
    """The images below a folder, by class, then folder, then name; what a store says of them; the folders in
    it."""
    if storage is not None:
        listed = Listing.below(storage, root)
        seen = listed.where(~listed.names.have_hidden())
        found = seen.where(seen.names.end_in(suffixes))
        return found.names, found, list(_first_folders(seen.names))
    subfolders: set[str] = set()

    def is_image(name: str) -> bool:
        if name.startswith(".") or "/." in name:
            return False
        first, slash, _ = name.partition("/")
        if slash:
            subfolders.add(first)
        return name.lower().endswith(suffixes)

    names = sorted(filter(is_image, names_below(root, hidden=_HIDDEN)), key=folder_order)
    return StringTable(names), None, sorted(subfolders)


def _first_folders(names: StringTable) -> Iterator[str]:
    """The folders right below, of names that lie by them."""
    place = bisect_right(names, "", key=_class_of)
    while place < len(names):
        folder = _class_of(names[place])
        yield folder
        place = bisect_right(names, folder, lo=place, key=_class_of)


def _class_of(name: str) -> str:
    return name.rpartition("/")[0].partition("/")[0]


def _are_splits(names: list[str]) -> bool:
    return bool(names) and set(names) <= _SPLITS


def _holds_splits(folder: str, names: list[str]) -> DataFormatError:
    return DataFormatError(
        f"'{folder}' holds the splits {names}, which would become classes: name one of them, "
        f"for example '{os.path.join(folder, names[0])}'"
    )


def _suffixes(extensions: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(extensions, str):
        raise InvalidArgument(
            f"extensions={extensions!r} is one string: pass a sequence, as in ['.jpg', '.png']"
        )
    chosen = EXTENSIONS if extensions is None else extensions
    return tuple(ending.lower() if ending.startswith(".") else "." + ending.lower() for ending in chosen)
