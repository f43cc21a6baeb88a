"""The image files of a dataset, here or in a store, by number; and readers whose records have one each."""

from __future__ import annotations

import errno
import hashlib
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edl_torch.readers.base import Begun, IndexedReader
from edl_torch.readers.images.decode import Image, decode_image, missing_image, read_image_in
from edl_torch.readers.shared.looks import SummedFile, sizes, some_of
from edl_torch.readers.shared.mapped import StringTable
from edl_torch.readers.storage import Object, Storage, is_url
from edl_torch.readers.storage.listing import MISSING, Listing
from edl_torch.readers.storage.names import is_web
from edl_torch.readers.storage.requests import Ahead


def opened(path: str, options: Mapping[str, Any] | None) -> SummedFile:
    """A file that describes a dataset, here or in a store. Raises OSError, ReaderError."""
    if not is_url(path):
        return SummedFile(path)
    with Storage(options).apart() as apart:
        found = apart.look(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "it does not exist in its store", path)
        return SummedFile(path, apart.read(found))


class ImageFiles:
    """Images by number: files below a folder of this machine, or objects that were listed.

    Args:
        root: The folder.
        names: Their names below it.
        min_side: What JPEGs may be made smaller to while they are decoded; see `decode.read_image`.
        storage, listing: Of data that lie elsewhere.
    """

    def __init__(
        self,
        root: str,
        names: StringTable,
        min_side: int | None = None,
        storage: Storage | None = None,
        listing: Listing | None = None,
    ) -> None:
        self.root, self.names, self._min_side = root, names, min_side
        self._storage, self._listing = storage, listing

    @classmethod
    def named(
        cls, root: str, names: StringTable, min_side: int | None, options: Mapping[str, Any] | None
    ) -> ImageFiles:
        """The images of these names below a folder; one elsewhere is listed, or asked for each, where a web
        server lists none. Raises ReaderError."""
        if not is_url(root):
            return cls(root, names, min_side)
        storage = Storage(options)
        if is_web(root):
            return cls(root, names, min_side, storage, Listing.looked_up(storage, root, names))
        found = Listing.below(storage, root, lambda _: True, lambda name: name)
        return cls(root, names, min_side, storage, found.of_names(names))

    def __len__(self) -> int:
        return len(self.names)

    def path(self, number: int) -> str:
        """Its path or URL."""
        if self._listing is not None:
            return self._listing.base + self.names[number]
        return os.path.join(self.root, self.names[number])

    def image(self, number: int) -> Image:
        """Read and decode one. Raises BadRecord; of data elsewhere SourceChanged and SourceUnavailable."""
        if self._storage is None or self._listing is None:
            return read_image_in(self.root, self.names[number], self._min_side)
        one = self._listing.object(number)
        return self.decoded(number, b"" if one.size == MISSING else self._storage.read(one))

    def begin(self, numbers: Sequence[int]) -> Ahead | None:
        """Ask for the bytes of these; None for those of this machine."""
        if self._storage is None or self._listing is None:
            return None
        return self._storage.ahead([self._whole(self._listing, number) for number in numbers])

    def _whole(self, listing: Listing, number: int) -> tuple[Object, int, int]:
        """The range of all of its bytes; none of one that is not there, as `decoded` will say."""
        one = listing.object(number)
        return (one, 0, one.size) if one.size != MISSING else (Object(one.name, 0), 0, 0)

    def decoded(self, number: int, data: bytes) -> Image:
        """Decode one whose bytes have come."""
        if self._listing is not None and self._listing.arrays["sizes"][number] == MISSING:
            raise missing_image(self.path(number))
        return decode_image(data, self.path(number), self._min_side)

    def looks(self, *, whole: bool) -> dict[int, str]:
        """What a fingerprint says of some of them: sizes; of the `whole`, digests of all of them."""
        storage, listing = self._storage, self._listing
        if storage is None or listing is None:
            return sizes(len(self), lambda n: [self.path(n)], whole=whole)
        if not whole:
            found = ((place, int(listing.arrays["sizes"][place])) for place in some_of(len(self)))
            return {place: "missing" if size == MISSING else str(size) for place, size in found}
        there = np.flatnonzero(listing.arrays["sizes"] != MISSING).tolist()
        digests = dict.fromkeys(range(len(self)), "missing")
        with storage.apart() as apart:
            contents = apart.read_many(self._whole(listing, number) for number in there)
            for number, data in zip(there, contents, strict=True):
                digests[number] = hashlib.blake2b(data, digest_size=16).hexdigest()
        return digests


class ImageFilesReader(IndexedReader):
    """A reader whose records have one image file each; a subclass sets `image_files`."""

    yields_images = True
    looks_again = True
    imports = ("cv2",)
    thread_safe = True
    image_files: ImageFiles

    @abstractmethod
    def with_image(self, index: int, image: Image) -> Any:
        """The record `index`, of its image."""

    def file_of(self, index: int) -> int:
        """The number of a record's image file."""
        return index

    def load(self, index: int) -> Any:
        """The record; its image: uint8 [height, width, 3], RGB."""
        return self.with_image(index, self.image_files.image(self.file_of(index)))

    def begin(self, indices: Sequence[int]) -> Begun | None:
        """Ask for the bytes of records that lie elsewhere."""
        if type(self).load is not ImageFilesReader.load:  # a subclass makes its records in another way
            return None
        ahead = self.image_files.begin([self.file_of(index) for index in indices])
        return None if ahead is None else _BegunImages(self, indices, ahead)


class _BegunImages:
    def __init__(self, reader: ImageFilesReader, indices: Sequence[int], ahead: Ahead) -> None:
        self._reader, self._indices, self._ahead = reader, indices, ahead

    @property
    def is_all_asked(self) -> bool:
        return self._ahead.is_all_asked

    def record(self, number: int) -> Any:
        reader, index = self._reader, self._indices[number]
        image = reader.image_files.decoded(reader.file_of(index), self._ahead.take(number))
        return reader.with_image(index, image)
