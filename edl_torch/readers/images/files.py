"""The image files of a dataset and those beside them, here or in a store, by number; readers of them."""

from __future__ import annotations

import errno
import hashlib
import os
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from edl_torch.fingerprint import Fingerprint, Part
from edl_torch.readers.base import Begun, IndexedReader
from edl_torch.readers.images.decode import Image, decode_image, missing_file, read_file
from edl_torch.readers.shared.looks import arguments, listing, some_of
from edl_torch.readers.shared.mapped import StringTable
from edl_torch.readers.storage import Data, Object, Storage, is_url
from edl_torch.readers.storage.listing import MISSING, Listing
from edl_torch.readers.storage.names import is_web


def described_by(path: str, storage: Storage, most: int | None = None) -> tuple[bytes, Part]:
    """The bytes of a file that describes a dataset, of one in a store at most so many; and its entry in a
    fingerprint: a stronger digest would take as long as to parse them. Raises OSError, ReaderError."""
    if is_url(path):
        with storage.apart() as apart:
            found = apart.look(path)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "it does not exist in its store", path)
            data = apart.read(found, 0, found.size if most is None else min(most, found.size))
    else:
        with open(path, "rb") as file:
            data = file.read()
    return data, (os.path.basename(path), f"{len(data)} {zlib.crc32(data):08x}")


class FolderFiles:
    """Files by number: below a folder of this machine, or objects that were listed.

    Args:
        root: The folder.
        names: Their names below it.
        storage, listing: Of data that lie elsewhere.
        min_side: What JPEGs may be made smaller to while they are decoded, see `decode.read_image`.
        what: What each is, for messages.
    """

    def __init__(
        self,
        root: str,
        names: StringTable,
        storage: Storage | None = None,
        listing: Listing | None = None,
        *,
        min_side: int | None = None,
        what: str = "image",
    ) -> None:
        self.root, self.names, self.min_side, self.what = root, names, min_side, what
        self.storage, self._listing = storage, listing

    @classmethod
    def named(cls, root: str, names: StringTable, min_side: int | None, storage: Storage) -> FolderFiles:
        """The images of these names below a folder; one elsewhere is listed, or asked for each, where a web
        server lists none. Raises ReaderError."""
        if not is_url(root):
            return cls(root, names, min_side=min_side)
        if is_web(root):
            found = Listing.looked_up(storage, root, names)
        else:
            found = Listing.below(storage, root).of_names(names)
        return cls(root, names, storage, found, min_side=min_side)

    def __len__(self) -> int:
        return len(self.names)

    def path(self, number: int) -> str:
        if self._listing is not None:
            return self._listing.base + self.names[number]
        return os.path.join(self.root, self.names[number])

    def whole(self, number: int) -> tuple[Object, int, int]:
        """The range of all bytes of an object; none of one that was not there when it was listed."""
        assert self._listing is not None, "files of this machine are in no store"
        if self._listing.arrays["sizes"][number] == MISSING:
            return Object(self.path(number), 0), 0, 0
        one = self._listing.object(number)
        return one, 0, one.size

    def read(self, number: int) -> Data:
        """The bytes of one. Raises BadRecord; of data elsewhere SourceChanged and SourceUnavailable."""
        if self.storage is None:
            return read_file(self.path(number), self.what, within=self.root)
        self.check_listed(number)
        return self.storage.read(*self.whole(number))

    def check_listed(self, number: int) -> None:
        """Raise BadRecord where it was not there when the store was listed."""
        if self._listing is not None and self._listing.arrays["sizes"][number] == MISSING:
            raise missing_file(self.path(number), self.what)

    def decoded(self, number: int, data: Data) -> Image:
        """Decode an image whose bytes these are."""
        return decode_image(data, self.path(number), self.min_side)

    def looks(self, *, whole: bool) -> dict[int, str]:
        """What a fingerprint says of some of them, by number: of 64 or fewer all, of very many 1,024.

        That is sizes; of XML, which has annotations and is short, checksums too; of the `whole`, digests of
        all.
        """
        found = {n: self._size(n) for n in (range(len(self)) if whole else some_of(len(self)))}
        read = [n for n, size in found.items() if size and (whole or self.names[n].endswith(".xml"))]
        looks = {n: size or "missing" for n, size in found.items()}
        for number, data in zip(read, self._contents(read), strict=True):
            if data is None:
                looks[number] = "missing"
            elif whole:
                looks[number] = hashlib.blake2b(data, digest_size=16).hexdigest()
            else:
                looks[number] = f"{len(data)} {zlib.crc32(data):08x}"
        return looks

    def _size(self, number: int) -> str:
        """Its size; "" where it is not there."""
        if self._listing is not None:
            size = int(self._listing.arrays["sizes"][number])
            return "" if size == MISSING else str(size)
        with suppress(OSError):
            return str(os.stat(self.path(number)).st_size)
        return ""

    def _contents(self, numbers: Sequence[int]) -> Iterator[bytes | None]:
        """Yield the bytes of each; None of a file that cannot be read."""
        if self.storage is not None:
            with self.storage.apart() as apart:
                yield from apart.read_many(map(self.whole, numbers))
            return
        for number in numbers:
            data = None
            with suppress(OSError), open(self.path(number), "rb") as file:
                data = file.read()
            yield data


class ImageFilesReader(IndexedReader):
    """A reader whose records have one image file each; a subclass sets `image_files`.

    Other files that a record has too, of the image's number, are `files_beside`. `described` are entries of
    the fingerprint: what lists the files, and arguments that decide which records these are.
    """

    yields_images = True
    looks_again = True
    imports = ("cv2",)
    thread_safe = True
    image_files: FolderFiles
    files_beside: tuple[FolderFiles, ...] = ()
    described: Sequence[Part] = ()

    @property
    def entries(self) -> StringTable:
        """What the fingerprint names, by number of the image."""
        return self.image_files.names

    def fingerprint(self, *, whole: bool = False) -> Fingerprint:
        """Names, the bytes of what lists them, and sizes of some files."""
        each = [files.looks(whole=whole) for files in (*self.files_beside, self.image_files)]
        looks = {number: " ".join(look[number] for look in each) for number in each[0]}
        min_side = self.image_files.min_side
        made_with = arguments("min_side", min_side) if min_side else []
        return listing("whole" if whole else "names", self.entries, looks, [*self.described, *made_with])

    def listed_files(self) -> Iterator[str]:
        """The images' paths, by number."""
        return map(self.image_files.path, range(len(self.image_files)))

    @abstractmethod
    def with_image(self, index: int, image: Image, *beside: Data) -> Any:
        """The record `index`, of its image, uint8 [height, width, 3], RGB, and the files beside it."""

    def file_of(self, index: int) -> int:
        """The number of a record's image file."""
        return index

    @property
    def _files_of_each(self) -> tuple[FolderFiles, ...]:
        return self.image_files, *self.files_beside

    def load(self, index: int) -> Any:
        """The record; its image: uint8 [height, width, 3], RGB."""
        number = self.file_of(index)
        return self._made_of(index, number, [files.read(number) for files in self._files_of_each])

    def _made_of(self, index: int, number: int, contents: list[Data]) -> Any:
        image, *beside = contents
        return self.with_image(index, self.image_files.decoded(number, image), *beside)

    def begin(self, indices: Sequence[int]) -> Begun | None:
        """Ask for the bytes of records that lie elsewhere."""
        if type(self).load is not ImageFilesReader.load:  # a subclass makes its records in another way
            return None
        storage, wanted = self.image_files.storage, self.requests(indices)
        if storage is None or wanted is None:
            return None
        ahead, each = storage.ahead(wanted), self._files_of_each

        def record(at: int) -> Any:
            number = self.file_of(indices[at])
            contents = [ahead.take(len(each) * at + place) for place in range(len(each))]
            for files in each:
                files.check_listed(number)
            return self._made_of(indices[at], number, contents)

        return Begun(ahead, record=record)

    def requests(self, indices: Sequence[int]) -> Sequence[tuple[Object, int, int]] | None:
        """One for each file."""
        if self.image_files.storage is None:
            return None
        each = self._files_of_each
        return [files.whole(number) for number in map(self.file_of, indices) for files in each]
