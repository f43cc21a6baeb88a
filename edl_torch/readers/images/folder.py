"""A folder of images: one subfolder per class, or one flat folder without labels.

It lists names once and must not open an image before its record is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from edl_torch.errors import DataFormatError, InvalidArgument
from edl_torch.fingerprint import Fingerprint
from edl_torch.readers.images.decode import EXTENSIONS, Image, checked_min_side
from edl_torch.readers.images.files import ImageFiles, ImageFilesReader
from edl_torch.readers.shared.looks import digest_of, listing
from edl_torch.readers.shared.mapped import StringTable
from edl_torch.readers.storage import Storage, is_url
from edl_torch.readers.storage.drivers import is_loop
from edl_torch.readers.storage.listing import Listing
from edl_torch.shard import IndexArray, TaskType

_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test", "testing"})


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
        storage_options: Endpoint, region, credentials of a store, where `root` is a URL.

    A folder in a store is listed once, when the reader is made. What is read is what was listed, else it is
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
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(os.fspath(root))
        self.min_side = checked_min_side(min_side)
        suffixes = _suffixes(extensions)
        found: Listing | None = None
        storage = Storage(storage_options) if is_url(self.name) else None
        if storage is None:
            subfolders, images = _list_folder(self.name, suffixes)
            below = {n: list(_images_below(os.path.join(self.name, n), suffixes)) for n in subfolders}
        else:
            found, subfolders = _found_in(storage, self.name, suffixes)
            below, images = _by_class(found.names, subfolders)
        self._index(subfolders, images, below, suffixes, allow_empty)
        self.image_files = ImageFiles(self.name, self._files, self.min_side, storage, found)

    def _index(
        self,
        subfolders: list[str],
        images: list[str],
        listed: dict[str, list[str]],
        suffixes: tuple[str, ...],
        allow_empty: bool,
    ) -> None:
        """Note classes and files, or say what is wrong with them."""
        if images:
            if classes := [name for name, files in listed.items() if files]:
                raise DataFormatError(
                    f"'{self.name}' has images of its own and folders with images ({', '.join(classes[:3])}):"
                    " keep either one folder per class, or one flat folder"
                )
            listed = {}
        elif _are_splits(subfolders) and any("/" in file for files in listed.values() for file in files):
            raise _holds_splits(self.name, subfolders)
        self.classes: list[str] = list(listed)
        self.class_to_idx: dict[str, int] = {name: number for number, name in enumerate(self.classes)}
        self._bounds: IndexArray = np.cumsum([0, *map(len, listed.values())], dtype=np.int64)
        self._files = StringTable(images or (os.path.join(c, file) for c in listed for file in listed[c]))
        self.count = len(self._files)
        if not self.count:
            raise DataFormatError(
                f"'{self.name}' has no image: files must end in one of {', '.join(suffixes)}"
            )
        empty = [name for name in listed if not listed[name]]
        if empty and not allow_empty:
            raise DataFormatError(
                f"'{self.name}': no image in the class folder(s) {', '.join(empty[:3])}; remove them, pass "
                "extensions=… if their files end otherwise, or pass allow_empty=True"
            )

    @property
    def targets(self) -> IndexArray | None:
        """Class index of each image, int64 [count]; None for a flat folder."""
        return np.repeat(np.arange(len(self.classes)), np.diff(self._bounds)) if self.classes else None

    def fingerprint(self, *, whole: bool = False) -> Fingerprint:
        """Names, and sizes of some files."""
        classes = [("class folders", digest_of(self.classes))] if self.classes else []
        looks = self.image_files.looks(whole=whole)
        return listing("whole" if whole else "names", self._files, looks, classes)

    def with_image(self, index: int, image: Image) -> Image | tuple[Image, int]:
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
        names, images = _list_folder(data, _suffixes(given.get("extensions")))
        if _are_splits(names):
            raise _holds_splits(data, names)
        return {"root": data} if names or images or not os.listdir(data) else None

    def __repr__(self) -> str:
        return f"<ImageFolderReader {self.name!r} records={self.count} classes={len(self.classes)}>"


def _found_in(storage: Storage, root: str, suffixes: tuple[str, ...]) -> tuple[Listing, list[str]]:
    """The images below a folder in a store, in their order, and the folders in it."""
    subfolders: set[str] = set()

    def is_image(name: str) -> bool:
        if name.startswith(".") or "/." in name:
            return False
        first, slash, _ = name.partition("/")
        if slash:
            subfolders.add(first)
        return name.lower().endswith(suffixes)

    def order(name: str) -> str:  # as files of this machine are: by class, then folder, then name
        folder, _, file = name.rpartition("/")
        return f"{folder.partition('/')[0]}\0{folder}\0{file}"

    return Listing.below(storage, root, is_image, order), sorted(subfolders)


def _by_class(names: Iterable[str], subfolders: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """The images by class, each with its name below the class' folder, and those in no class."""
    below: dict[str, list[str]] = {folder: [] for folder in subfolders}
    images = []
    for name in names:
        first, slash, rest = name.partition("/")
        if slash:
            below[first].append(rest)
        else:
            images.append(name)
    return below, images


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


def _list_folder(folder: str, suffixes: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Sorted names of the subfolders and of the images directly in `folder`."""
    try:
        with os.scandir(folder) as entries:
            visible = [(entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(".")]
    except OSError as exc:
        raise DataFormatError(
            f"the image folder '{folder}' cannot be listed: {exc.strerror}; check the path"
        ) from exc
    images = [name for name, is_folder in visible if not is_folder and name.lower().endswith(suffixes)]
    return sorted(name for name, is_folder in visible if is_folder), sorted(images)


def _images_below(top: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Paths relative to `top`, sorted by folder, then by name."""
    found = []
    for folder, subfolders, files in os.walk(top, followlinks=True, onerror=_unreadable):
        subfolders[:] = [
            name for name in subfolders if not name.startswith(".") and not is_loop(folder, name)
        ]
        found.append((folder, [f for f in files if f.lower().endswith(suffixes) and not f.startswith(".")]))
    for folder, files in sorted(found):
        prefix = "" if folder == top else os.path.relpath(folder, top) + os.sep
        yield from (prefix + file for file in sorted(files))


def _unreadable(error: OSError) -> None:
    raise DataFormatError(
        f"the image folder '{error.filename}' cannot be listed: {error.strerror}"
    ) from error
