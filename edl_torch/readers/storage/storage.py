"""One face for data anywhere: names, sizes and bytes by URL or path. See the package's text."""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from edl_torch.errors import EdlError, OutputError, ReaderError
from edl_torch.readers.storage.apart import Apart
from edl_torch.readers.storage.drivers import (
    CredentialsRefused,
    Data,
    Driver,
    Missing,
    Object,
    Page,
    driver_for,
    endpoint_of,
    obstore_runs_here,
    require_obstore,
)
from edl_torch.readers.storage.names import by_obstore, is_url, refuse_secrets, root_of
from edl_torch.readers.storage.requests import Ahead, Fetch, Trying

if TYPE_CHECKING:
    from edl_torch.readers.storage.kept import KeptAway

log = logging.getLogger("edl_torch.readers")

T = TypeVar("T")
Ranges = Iterable[tuple[Object, int, int]]  # object, first byte, bytes

PATIENCE_S = 120.0
_FIRST_PATIENCE_S = 15.0  # of what is asked for while a reader is made


class NotFound(ReaderError):
    """Nothing has that name."""


class Known(Protocol):
    """What a listing says of objects."""

    @property
    def base(self) -> str:
        """What their URLs begin with."""

    def find(self, url: str) -> Object | None:
        """The object of a URL, if it is known."""


class StorageOptions(TypedDict, total=False):
    """What each reader of files takes by name, and passes to its `Storage`.

    * `storage_options`: for the drivers of data that are URLs: endpoint, region, credentials. obstore's
      names, or s3fs', for object stores; fsspec's storage options for other protocols. They travel to loader
      workers and are not shown.
    * `index_dir`: where indexes of files are kept, and packed files unpacked: a folder, a prefix of a store,
      or "beside" for beside the data; the default is in the user's cache (`readers.shared.mapped`). In a
      folder or prefix that all ranks reach the listing of a store is kept, too: the first reader lists, the
      others take what it kept, those of later jobs as well. By default each reader lists.
    * `refresh`: whether to list anew where the kept listing was made before this reader.
    """

    storage_options: Mapping[str, Any] | None
    index_dir: str | os.PathLike[str] | None
    refresh: bool


class _Here:
    """What one process has of a storage."""

    def __init__(self, patience_s: float) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.drivers: dict[str, Driver] = {}  # by root
        self.trying = Trying(patience_s)


class Storage:
    """Names, sizes and bytes of data at any place. Several threads may use it; it pickles as its options.

    Args:
        storage_options, index_dir, refresh: As `StorageOptions`.
        patience_s: Seconds until a network that fails ends a read; default 120.
    """

    def __init__(
        self,
        storage_options: Mapping[str, Any] | None = None,
        *,
        index_dir: str | os.PathLike[str] | None = None,
        refresh: bool = False,
        patience_s: float | None = None,
    ) -> None:
        self._options = dict(storage_options or {})
        self.index_dir = None if index_dir is None else os.fspath(index_dir)
        self.refresh = refresh
        self._listings: list[Known] = []
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._here: _Here | None = None
        self._apart: Apart | None = None

    @classmethod
    def of(cls, reader: object, options: StorageOptions) -> Storage:
        """The storage of a reader. Raises TypeError, as Python does for the reader, for other options."""
        if strange := options.keys() - StorageOptions.__annotations__.keys():
            name = type(reader).__name__
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {min(strange)!r}")
        return cls(**options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_here": None, "_apart": None, "_listings": []}

    @property
    def endpoint(self) -> str:
        """Which store the names of buckets are of; '' for the cloud's own."""
        return endpoint_of(self._options)

    def listing(self, folder: str) -> Iterator[Object]:
        """Yield the objects below a folder, at any depth and in any order, as they come; none where it is
        not.

        Raises ReaderError where it cannot be listed: what was yielded before it is then not all.
        """
        base = folder.rstrip("/") + "/"
        for page in self.pages(folder):
            for name, size, tag in zip(page.names, page.sizes, page.tags, strict=True):
                yield Object(base + name, size, tag)

    def pages(self, folder: str) -> Iterator[Page]:
        """As `listing`, many objects at a time."""
        folder = folder.rstrip("/") or folder
        pages = iter(self._asked(folder, lambda anew: self._driver(folder, anew).listing(folder)))
        while True:
            try:
                page = self._asked(folder, lambda _: next(pages, None), once=True)
            except NotFound:
                return
            if page is None:
                return
            yield page

    def look(self, name: str) -> Object | None:
        """The object of a name; None where there is none. Raises ReaderError where nobody can tell."""
        listed = (listing.find(name) for listing in self._listings if name.startswith(listing.base))
        if (known := next(listed, None)) is not None:
            return known
        try:
            return self._asked(name, lambda anew: self._driver(name, anew).look(name))
        except NotFound:
            return None

    def remember(self, listing: Known) -> None:
        """Take objects of a listing as they were listed, and ask for none of them again to look at it."""
        self._listings.append(listing)

    def read(self, one: Object, start: int = 0, length: int | None = None) -> bytes:
        """Bytes of an object: `length` from `start`, by default all.

        Raises SourceChanged for another object than was listed, and SourceUnavailable.
        """
        return bytes(self._read(one, start, one.size - start if length is None else length))

    def _read(self, one: Object, start: int, length: int) -> Data:
        if start < 0 or length < 0 or start + length > one.size:
            raise ReaderError(
                f"'{one.name}' has {one.size:,} bytes: {length:,} from byte {start:,} on are not in it"
            )
        return self._asked(one.name, lambda anew: self._driver(one.name, anew).read(one, start, length))

    def put(self, name: str, data: bytes, *, new: bool = False) -> bool:
        """Write an object, whole or not at all. Where it shall be `new`, return whether none was there: of
        several processes that create one at once, stores let one. Raises OutputError."""
        try:
            return self._asked(name, lambda anew: self._driver(name, anew).put(name, data, new))
        except ReaderError as exc:
            why = exc.__cause__.strerror if isinstance(exc.__cause__, OSError) else None
            raise OutputError(f"'{name}' cannot be written: {why or exc}") from exc

    def remove(self, name: str) -> None:
        """Remove an object; it may be gone already. Raises ReaderError."""
        with suppress(NotFound):
            self._asked(name, lambda anew: self._driver(name, anew).remove(name))

    def keep(self, name: str) -> KeptAway:
        """The place of that name for an index, which all who reach the store share."""
        from edl_torch.readers.storage.kept import KeptAway  # numpy, which a process `apart` does without

        return KeptAway(name, self)

    def read_many(self, ranges: Ranges) -> Iterator[bytes]:
        """Yield the bytes of each range, in this order, with many requests under way. Raises as `read`."""
        wanted = list(ranges)
        ahead = self.ahead(wanted)
        try:
            for number in range(len(wanted)):
                yield bytes(ahead.take(number))
        finally:
            ahead.close()

    def ahead(self, ranges: Sequence[tuple[Object, int, int]]) -> Ahead:
        """Ask for ranges that several threads take by their number, in about this order; as bytes, or as a
        view of what a driver has."""
        return Ahead(len(ranges), lambda n: Fetch(partial(self._read, *ranges[n]), ranges[n][2]))

    @contextmanager
    def apart(self) -> Iterator[Storage]:
        """The same storage; until the block ends its requests to object stores are another process'."""
        if self._apart is not None:
            yield self
            return
        storage = copy.copy(self)
        storage._patience_s = min(self._patience_s, _FIRST_PATIENCE_S)
        storage._apart = apart = Apart(self._options)
        try:
            yield storage
        finally:
            apart.close()

    def _asked(self, name: str, attempt: Callable[[bool], T], *, once: bool = False) -> T:
        refuse_secrets(name)
        try:
            return self._of_process().trying.until_done(name, attempt, once=once)
        except Missing as exc:
            raise NotFound(
                f"'{name}' does not exist; check the path{' and the bucket' * is_url(name)}"
            ) from exc
        except CredentialsRefused as exc:
            where = "storage_options={…} or the environment" if is_url(name) else "the file's permissions"
            raise ReaderError(
                f"access to '{name}' is refused: check the credentials in {where} ({exc})"
            ) from exc
        except EdlError:
            raise
        except OSError as exc:
            raise ReaderError(f"'{name}' cannot be read: {exc.strerror or exc}") from exc

    def _of_process(self) -> _Here:
        if self._here is None or self._here.pid != os.getpid():
            self._here = _Here(self._patience_s)
        return self._here

    def _driver(self, name: str, anew: bool) -> Driver:
        here, root = self._of_process(), root_of(name)
        found = here.drivers.get(root)
        if found is None or anew:
            with here.lock:
                found = None if anew else here.drivers.get(root)
                if found is None:
                    found = here.drivers[root] = self._new_driver(root)
        return found

    def _new_driver(self, root: str) -> Driver:
        if by_obstore(root):
            require_obstore()
            if self._apart is not None:
                return self._apart
            if not obstore_runs_here():
                log.warning(
                    "root=%s obstore ran before this process was forked: another process reads for it, at "
                    "more cost; multiprocessing_context='forkserver' needs none",
                    root,
                )
                return Apart(self._options)
        return driver_for(root, self._options)

    def __repr__(self) -> str:
        return f"<Storage options={sorted(self._options)}>"  # the names alone: values may be secret
