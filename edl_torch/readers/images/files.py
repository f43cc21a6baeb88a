"""The image files of a dataset, here or in a store, by number; and readers whose records have one each."""

from __future__ import annotations

import errno
import hashlib
import os
import zlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from edl_torch.fingerprint import Part
from edl_torch.readers.base import Begun, IndexedReader
from edl_torch.readers.images.decode import Image, decode_image, missing_image, read_image, within
from edl_torch.readers.shared.looks import SummedFile, arguments, sizes, some_of
from edl_torch.readers.shared.mapped import StringTable
from edl_torch.readers.storage import Data, Object, Storage, is_url
from edl_torch.readers.storage.listing import MISSING, Listing
from edl_torch.readers.storage.names import is_web
from edl_torch.readers.storage.requests import Ahead


def opened(path: str, storage: Storage, most: int | None = None) -> SummedFile:
    """A file that describes a dataset, here or in a store, of which `most` bytes are wanted. Raises OSError,
    ReaderError."""
    if not is_url(path):
        return SummedFile(path)
    with storage.apart() as apart:
        found = apart.look(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "it does not exist in its store", path)
        return SummedFile(path, apart.read(found, 0, found.size if most is None else min(most, found.size)))


class FolderFiles:
    """Images and other files by number: below a folder of this machine, or objects that were listed.

    Args:
        root: The folder.
        names: Their names below it.
        storage, listing: Of data that lie elsewhere.
        min_side: What JPEGs may be made smaller to while they are decoded, see `decode.read_image`.
    """

    def __init__(
        self,
        root: str,
        names: StringTable,
        storage: Storage | None = None,
        listing: Listing | None = None,
        *,
        min_side: int | None = None,
    ) -> None:
        self.root, self.names, self.min_side = root, names, min_side
        self._storage, self._listing = storage, listing

    @classmethod
    def named(cls, root: str, names: StringTable, min_side: int | None, storage: Storage) -> FolderFiles:
        """The images of these names below a folder; one elsewhere is listed, or asked for each, where a web
        server lists none. Raises ReaderError."""
        if not is_url(root):
            return cls(root, names, min_side=min_side)
        of_web = is_web(root)
        found = (
            Listing.looked_up(storage, root, names)
            if of_web
            else Listing.below(storage, root).of_names(names)
        )
        return cls(root, names, storage, found, min_side=min_side)

    @classmethod
    def of_web(cls, root: str, names: StringTable, endings: Sequence[str], storage: Storage) -> FolderFiles:
        """Files of a web server, which lists none: each is asked for, with one ending after the other."""
        listing = Listing.looked_up(storage, root, StringTable(name + endings[0] for name in names))
        for ending in endings[1:]:
            listing = listing.with_others(storage, StringTable(name + ending for name in names))
        return cls(root, listing.names, storage, listing)

    def __len__(self) -> int:
        return len(self.names)

    def path(self, number: int) -> str:
        """Its path or URL."""
        if self._listing is not None:
            return self._listing.base + self.names[number]
        return os.path.join(self.root, self.names[number])

    def is_missing(self, number: int) -> bool:
        """Whether it was not there when it was listed."""
        return self._listing is not None and bool(self._listing.arrays["sizes"][number] == MISSING)

    def ahead(self, ranges: Sequence[tuple[Object, int, int]]) -> Ahead | None:
        """Ask for ranges; None for files of this machine."""
        return None if self._storage is None else self._storage.ahead(ranges)

    def whole(self, number: int) -> tuple[Object, int, int]:
        """The range of all bytes of an object; none of one that is not there."""
        if self._listing is None or self.is_missing(number):
            return Object(self.path(number), 0), 0, 0
        one = self._listing.object(number)
        return one, 0, one.size

    def looks(self, *, whole: bool) -> dict[int, str]:
        """What a fingerprint says of some of them: sizes, of XML checksums too; of the `whole`, digests of
        all."""
        storage, listing = self._storage, self._listing
        if storage is None or listing is None:
            return sizes(len(self), lambda n: [self.path(n)], whole=whole)
        places = range(len(self)) if whole else some_of(len(self))
        found = {n: "missing" if self.is_missing(n) else str(self.whole(n)[2]) for n in places}
        read = [n for n in places if found[n] != "missing" and (whole or self.names[n].endswith(".xml"))]
        with storage.apart() as apart:
            for number, data in zip(read, apart.read_many(map(self.whole, read)), strict=True):
                digest = hashlib.blake2b(data, digest_size=16).hexdigest()
                found[number] = digest if whole else f"{len(data)} {zlib.crc32(data):08x}"
        return found

    def image(self, number: int) -> Image:
        """Read and decode one. Raises BadRecord; of data elsewhere SourceChanged and SourceUnavailable."""
        if self._storage is None:
            with within(self.root):
                return read_image(self.path(number), self.min_side)
        return self.decoded(number, self._storage.read(*self.whole(number)))

    def requests(self, numbers: Sequence[int]) -> list[tuple[Object, int, int]] | None:
        """What a store is asked for to read these; None for those of this machine."""
        return None if self._storage is None else [self.whole(number) for number in numbers]

    def decoded(self, number: int, data: Data) -> Image:
        """Decode one whose bytes have come."""
        if self.is_missing(number):
            raise missing_image(self.path(number))
        return decode_image(data, self.path(number), self.min_side)


class ImageFilesReader(IndexedReader):
    """A reader whose records have one image file each; a subclass sets `image_files`."""

    yields_images = True
    looks_again = True
    imports = ("cv2",)
    thread_safe = True
    image_files: FolderFiles

    @property
    def made_with(self) -> list[Part]:
        """The entry of a fingerprint for what makes another image of the same bytes; none by default."""
        return arguments("min_side", self.image_files.min_side) if self.image_files.min_side else []

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
        files = [self.file_of(index) for index in indices]
        wanted = self.image_files.requests(files)
        ahead = None if wanted is None else self.image_files.ahead(wanted)
        if ahead is None:
            return None

        def record(number: int) -> Any:
            image = self.image_files.decoded(files[number], ahead.take(number))
            return self.with_image(indices[number], image)

        return Begun(ahead, record=record)

    def requests(self, indices: Sequence[int]) -> Sequence[tuple[Object, int, int]] | None:
        """One for each image."""
        return self.image_files.requests([self.file_of(index) for index in indices])
