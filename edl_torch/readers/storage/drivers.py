"""The ways to data: obstore, the operating system, fsspec; each lists, looks and reads in the calling thread.

What a driver raises has one of four meanings: `Transient` may be well in a moment, `CredentialsRefused` is
about credentials, `Missing` says that nothing has that name, and a ReaderError is final. Drivers are made
anew in each process.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

from edl_torch.errors import ReaderError, ReaderUnavailable, SourceChanged
from edl_torch.readers.shared.files import read_range
from edl_torch.readers.shared.packages import required
from edl_torch.readers.storage.names import by_obstore, is_url, is_web, local_path
from edl_torch.system.backoff import backoff
from edl_torch.system.whole_files import whole_file

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,80})</Code>")
_REFUSED = re.compile(
    r"credential|forbidden|unauthori[sz]ed|access ?denied|(?:expired|invalid|security) ?token", re.IGNORECASE
)
_QUERY = re.compile(r"\?[^\s\"'<>)]+")
_OF_PYTHON = KeyboardInterrupt, SystemExit, GeneratorExit  # and none of obstore's
_BUSY, _RETRIED = frozenset({429, 503}), frozenset({408, 425, 429})
_EXPIRED = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestTimeTooSkewed")
_PAGE, _LISTED_AT_ONCE = 1000, 16
_CUT_AT_MOST, _CUT_FOR_S = 6, 45.0  # times in a row, and how long
_PAGE_TIMEOUT = "20s"
_LISTING = {"max_retries": 8, "retry_timeout": timedelta(seconds=20)}
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")  # of AWS, and of obstore
# What s3fs calls the same: options that work there work here.
_S3FS = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "anon": "skip_signature",
    "requester_pays": "request_payer",
}


Data = bytes | memoryview  # what was read


def tag_of(text: str | None) -> int:
    """A number for an ETag: 63 bits of its digest, 0 for none."""
    if not text:
        return 0
    strong = text.removeprefix("W/").strip('"')  # of Azure's a listing has it without the quotes
    return int.from_bytes(hashlib.blake2b(strong.encode(), digest_size=8).digest(), "little") >> 1 or 1


class Object(NamedTuple):
    """What a listing says of an object.

    Args:
        name: Its URL or path, which begins as the user's did.
        size: In bytes.
        tag: Another one says that it is another object; 0 where its store tells none.
    """

    name: str
    size: int
    tag: int = 0

    def check(self, found: Object, got: int, length: int) -> None:
        """Raise SourceChanged unless `found`, of which `got` bytes came, is this; Transient for a part."""
        if found.size != self.size:
            raise self.changed(f"{self.size:,} bytes then, {found.size:,} now")
        if found.tag and self.tag and found.tag != self.tag:
            raise self.changed("of the same size, but not the same")
        if got != length:
            raise Transient(f"{got:,} bytes came of {length:,}")

    def changed(self, how: str) -> SourceChanged:
        """Return the error for an object that is no more what was listed."""
        return SourceChanged(
            f"'{self.name}' has changed since it was listed ({how}): data must stay as they are while a job "
            "uses them; start the job again, and where index_dir= keeps the listing, with refresh=True"
        )


class Page(NamedTuple):
    """A part of a listing.

    Args:
        names: Below the folder, as its name was given, without a slash at its beginning.
        sizes, tags: Of each, as `Object` has them.
        newest_s: When the last of them was written to, by the clock of who has them, in seconds since 1970;
            0 where nobody says, infinity where the listing itself shows a change.
    """

    names: list[str]
    sizes: array[int]
    tags: array[int]
    newest_s: float = 0.0


class Transient(Exception):
    """Error: what may be well in a moment. `busy` where the server asks for fewer requests."""

    def __init__(self, said: str, *, busy: bool = False) -> None:
        super().__init__(said)
        self.busy = busy


class CredentialsRefused(Exception):
    """Error: credentials are missing, wrong or too old."""


class Missing(Exception):
    """Error: nothing has that name."""


class Driver(Protocol):
    """A way to data. All methods may be called by several threads at once."""

    def listing(self, folder: str) -> Iterator[Page]:
        """Yield what lies below a folder, in any order; nothing where there is no such folder."""

    def look(self, name: str) -> Object:
        """The object of one name. Raises Missing."""

    def read(self, one: Object, start: int, length: int) -> Data:
        """A range of an object. Raises SourceChanged for another object than the listed one."""

    def put(self, name: str, data: bytes, new: bool = False) -> bool:
        """Write an object, whole or not at all; where it shall be `new`, False says that one is there."""

    def remove(self, name: str) -> None:
        """Remove an object. Raises Missing."""


class LocalFiles:
    """Files of this machine. Links are followed, loops of them are not."""

    def listing(self, folder: str) -> Iterator[Page]:
        top = local_path(folder)
        for inside, subfolders, files in os.walk(top, followlinks=True, onerror=_raise):
            subfolders[:] = sorted(name for name in subfolders if not is_loop(inside, name))
            found = []
            for file in sorted(files):
                path = os.path.join(inside, file)
                with suppress(FileNotFoundError):  # a link to nothing
                    one = os.stat(path)
                    found.append((path[len(top) :].lstrip("/"), one.st_size, one.st_mtime_ns))
            yield _page(found, max((tag / 1e9 for _, _, tag in found), default=0.0))

    def look(self, name: str) -> Object:
        try:
            found = os.stat(local_path(name))
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise Missing from exc
        if not os.path.isfile(local_path(name)):
            raise Missing
        return Object(name, found.st_size, found.st_mtime_ns)

    def read(self, one: Object, start: int, length: int) -> bytes:
        try:
            with open(local_path(one.name), "rb", buffering=0) as file:
                data = read_range(file.fileno(), start, start + length)
                found = os.fstat(file.fileno())
        except FileNotFoundError as exc:
            raise one.changed("it is gone") from exc
        one.check(Object(one.name, found.st_size, found.st_mtime_ns), len(data), length)
        return data

    def put(self, name: str, data: bytes, new: bool = False) -> bool:
        path = Path(local_path(name))
        if new and path.exists():
            return False
        with whole_file(path) as file:
            file.write(data)
        return True

    def remove(self, name: str) -> None:
        try:
            os.unlink(local_path(name))
        except FileNotFoundError as exc:
            raise Missing from exc


def _page(found: Sequence[tuple[str, int, int]], newest_s: float = 0.0) -> Page:
    """The page of names, sizes and tags."""
    names, sizes, tags = zip(*found, strict=True) if found else ((), (), ())
    return Page(list(names), array("q", sizes), array("q", tags), newest_s)


def _page_of(page: Sequence[Mapping[str, Any]], cut: int) -> Page:
    """The page of what obstore says; `cut` is the length of what names have before them."""
    newest = max((one["last_modified"] for one in page), default=None)
    return Page(
        [one["path"][cut:] for one in page],
        array("q", [one["size"] for one in page]),
        array("q", [tag_of(one["e_tag"]) for one in page]),
        newest.timestamp() if newest is not None else 0.0,
    )


def _raise(error: OSError) -> None:
    raise Missing if isinstance(error, FileNotFoundError | NotADirectoryError) else error


def is_loop(folder: str, name: str) -> bool:
    """Whether `folder/name` is a link to a folder that the way to it has passed through already."""
    path = os.path.abspath(os.path.join(folder, name))
    if not os.path.islink(path):
        return False
    target, above = os.path.realpath(path), os.path.dirname(path)
    while os.path.realpath(above) != target:
        if above == os.path.dirname(above):
            return False
        above = os.path.dirname(above)
    return True


class Objects:
    """Objects in a store or on a web server, by obstore.

    Args:
        root: The URL of the bucket, container or server.
        options: obstore's configuration of the store, or s3fs' names for the same.
    """

    def __init__(self, root: str, options: Mapping[str, Any]) -> None:
        import obstore
        from obstore.store import HTTPStore, from_url

        self._root = root
        self._obstore, self._errors = obstore, obstore.exceptions
        self._web = is_web(root)
        chosen = _obstore_options(root, options)
        self._secrets = [value for value in chosen.values() if isinstance(value, str) and len(value) >= 8]
        self._quiet = chosen.get("endpoint"), chosen.get("region")
        with self._meaning(root):
            try:
                make = HTTPStore if self._web else from_url
                self._store = make(root, **chosen)
                # A page of a listing is tried again by obstore, which alone knows where it was.
                own = options.get("client_options") or {}
                client = {**chosen["client_options"], "timeout": own.get("timeout", _PAGE_TIMEOUT)}
                self._lister = make(root, **{**chosen, "retry_config": _LISTING, "client_options": client})
            except (TypeError, ValueError, obstore.exceptions.BaseError) as exc:
                raise ReaderError(
                    f"'{root}': its store does not take these storage_options ({self._said(exc)}); see "
                    "obstore's configuration of it for their names"
                ) from None

    def listing(self, folder: str) -> Iterator[Page]:
        if self._web:
            raise ReaderError(
                f"'{folder}': a web server lists no files; name each one, or several as {{000..999}}"
            )
        prefix = self._path(folder)
        cut = len(prefix) + 1 if prefix else 0
        first = next(self._pages(prefix, cut), None)
        if first is None or not any("/" in name for name in first.names):
            yield from self._pages(prefix, cut)
            return
        found = self._with_folders(prefix)  # which are listed side by side
        yield _page_of(found["objects"], cut)
        with ThreadPoolExecutor(_LISTED_AT_ONCE, thread_name_prefix="edl-list") as pool:
            folders, waiting = iter(found["common_prefixes"]), deque[Future[list[Page]]]()
            try:
                while True:
                    for one in islice(folders, 2 * _LISTED_AT_ONCE - len(waiting)):
                        waiting.append(pool.submit(list, self._pages(one, cut)))
                    if not waiting:
                        break
                    pages = waiting.popleft().result()
                    yield from pages or [_page([], inf)]  # it was there when the folders were listed
            finally:
                for job in waiting:
                    job.cancel()

    def _pages(self, prefix: str, cut: int) -> Iterator[Page]:
        """Pages of a listing. One that is cut goes on behind what has come: names come in their order."""
        after, cuts = None, _Cuts()
        while True:
            try:
                with self._meaning(f"{self._root}/{prefix}"):
                    found = self._obstore.list(self._lister, prefix or None, offset=after, chunk_size=_PAGE)
                    for page in found:
                        yield _page_of(page, cut)
                        after, cuts = page[-1]["path"], _Cuts()
                return
            except Transient as exc:
                cuts.wait(exc)

    def _with_folders(self, prefix: str) -> Any:
        """The objects and the folders right below a prefix."""
        cuts = _Cuts()
        while True:
            try:
                with self._meaning(f"{self._root}/{prefix}"):
                    return self._obstore.list_with_delimiter(self._lister, prefix or None)
            except Transient as exc:
                cuts.wait(exc)

    def look(self, name: str) -> Object:
        with self._meaning(name):
            meta = self._obstore.head(self._store, self._path(name))
        return Object(name, meta["size"], tag_of(meta["e_tag"]))

    def read(self, one: Object, start: int, length: int) -> Data:
        if not length:
            return b""
        whole = start == 0 and length == one.size  # a server may know no ranges
        options: Any = None if whole else {"range": (start, start + length)}
        try:  # as `_meaning`, which costs some 3 % of a request
            answer = self._obstore.get(self._store, self._path(one.name), options=options)
            meta, data = answer.meta, memoryview(answer.bytes())  # copied by nobody who can do without
        except _OF_PYTHON:
            raise
        except BaseException as exc:  # noqa: BLE001  a panic of Rust's is no Exception
            raise self._meant(exc, one.name, one) from None
        one.check(Object(one.name, meta["size"], tag_of(meta["e_tag"])), len(data), length)
        return data

    def put(self, name: str, data: bytes, new: bool = False) -> bool:
        if self._web:
            raise ReaderError(f"'{name}': a web server takes no files")
        with self._meaning(name):
            try:
                mode: Any = "create" if new else "overwrite"
                self._obstore.put(self._store, self._path(name), data, use_multipart=False, mode=mode)
            except self._errors.AlreadyExistsError:
                return False
        return True

    def remove(self, name: str) -> None:
        with self._meaning(name):
            self._obstore.delete(self._store, self._path(name))

    def _path(self, name: str) -> str:
        path = name[len(self._root) :].strip("/")
        return unquote(path) if self._web else path

    @contextmanager
    def _meaning(self, name: str) -> Iterator[None]:
        try:
            yield
        except _OF_PYTHON:
            raise
        except BaseException as exc:  # noqa: BLE001  a panic of Rust's is no Exception
            raise self._meant(exc, name) from None

    def _meant(self, exc: BaseException, name: str, one: Object | None = None) -> BaseException:
        """What an error of obstore's means, for most it has no class; another one is itself."""
        errors = self._errors
        if type(exc).__name__ == "PanicException":  # of Rust: no Exception, and its class is in no module
            return ReaderError(
                f"'{name}' cannot be asked for: obstore failed ({self._said(exc)}); check endpoint, region "
                "and credentials, here and in the environment: an endpoint begins with http:// or https://, "
                "and none of them has a blank or a line end"
            )
        if not isinstance(exc, errors.BaseError | OSError | ValueError):
            return exc
        if isinstance(exc, FileNotFoundError):
            return Missing(self._said(exc)) if one is None else one.changed("it is gone")
        code = _CODE.search(str(exc))
        if code and code[1] == "InvalidObjectState":
            return ReaderError(
                f"'{name}' is archived (as in Glacier): restore it, or copy it to a warm class"
            )
        if isinstance(exc, errors.PermissionDeniedError | errors.UnauthenticatedError):
            return CredentialsRefused(self._said(exc))
        if isinstance(exc, errors.NotSupportedError):
            return ReaderError(
                f"'{name}': its server cannot do that ({self._said(exc)}); parts of files need one that "
                "knows ranges (nginx does, python -m http.server does not)"
            )
        if isinstance(exc, errors.InvalidPathError | ValueError):
            return ReaderError(f"'{name}': obstore reads no such name, rename it ({self._said(exc)})")
        found = _STATUS.search(str(exc))
        status = int(found[1]) if found else 0
        if code and code[1] in ("NoSuchBucket", "NoSuchKey", "ContainerNotFound"):
            return Missing(self._said(exc))
        if code and code[1] in _EXPIRED:
            return CredentialsRefused(self._said(exc))
        if "169.254.169.254" in str(exc):  # where a cloud's machine has credentials, and no other
            return CredentialsRefused("none were found; public data need storage_options={'anon': True}")
        if status == 416 and one is not None:
            return one.changed("it is shorter now")
        if status in (401, 403):
            return CredentialsRefused(self._said(exc))
        if 400 <= status < 500 and status not in _RETRIED:
            return ReaderError(f"'{name}' is refused ({self._said(exc)}); check the URL and storage_options")
        return Transient(self._said(exc), busy=status in _BUSY or bool(code and code[1] == "SlowDown"))

    def _said(self, exc: BaseException) -> str:
        """What it says, in short and without anything that is secret."""
        said = str(exc).split("\n\nDebug source")[0]
        code = _CODE.search(said)
        said = " ".join(_QUERY.sub("?…", said.split("<")[0]).split()).rstrip(": ")
        for secret in self._secrets:
            if secret not in self._quiet:
                said = said.replace(secret, "…")
        return f"{said} ({code[1]})" if code else said


class _Cuts:
    """Answers in a row of a listing that were cut: obstore tries those again alone that do not begin."""

    def __init__(self) -> None:
        self._count, self._pauses, self._began = 0, backoff(0.2, 4.0), time.monotonic()

    def wait(self, error: Transient) -> None:
        """Wait before the next attempt. Raises the error when there were too many, or for too long."""
        self._count += 1
        if self._count == _CUT_AT_MOST or time.monotonic() - self._began > _CUT_FOR_S:
            raise error
        time.sleep(next(self._pauses))


def endpoint_of(options: Mapping[str, Any]) -> str:
    """The endpoint that options or the environment name; '' for the cloud's own."""
    named = {name.lower().removeprefix("aws_"): value for name, value in options.items()}
    nested = options.get("client_kwargs") or {}
    given = (named.get("endpoint"), named.get("endpoint_url"), nested.get("endpoint_url"))
    return next((str(one) for one in (*given, *map(os.environ.get, _ENDPOINTS)) if one), "")


def _obstore_options(root: str, options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {
        _S3FS.get(name, name) if root.startswith("s3") else name: value for name, value in options.items()
    }
    client = {"connect_timeout": "5s", "timeout": "60s", **chosen.pop("client_options", {})}
    nested = chosen.pop("client_kwargs", None) or {}
    if "region_name" in nested:
        chosen.setdefault("region", nested["region_name"])
    endpoint = endpoint_of(options)
    if root.startswith("s3") and endpoint and not any("endpoint" in name.lower() for name in chosen):
        chosen["endpoint"] = endpoint
    if root.startswith("http://") or endpoint.startswith("http://"):
        client.setdefault("allow_http", True)
    chosen["client_options"] = client
    chosen.setdefault("retry_config", {"max_retries": 0})  # `requests.py` tries again
    return chosen


class FileSystem:
    """Files of a protocol that fsspec knows. Of a change only another size is seen."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)

    def listing(self, folder: str) -> Iterator[Page]:
        with self._at(folder) as (files, path):
            files.invalidate_cache()
            found = files.find(path, detail=True)
        root = path.rstrip("/")
        if any(not name.startswith(root) for name in found):
            raise ReaderError(f"'{folder}': its file system lists names elsewhere")
        each = ((name[len(root) :].lstrip("/"), one["size"]) for name, one in found.items() if name != root)
        yield _page([(name, int(size), 0) for name, size in each])

    def look(self, name: str) -> Object:
        with self._at(name) as (files, path):
            files.invalidate_cache()
            found = files.info(path)
        if found["type"] != "file":
            raise Missing
        return Object(name, int(found["size"]))

    def read(self, one: Object, start: int, length: int) -> bytes:
        bounds = () if start == 0 and length == one.size else (start, start + length)
        try:
            with self._at(one.name) as (files, path):
                data = bytes(files.cat_file(path, *bounds))
            now = one if len(data) == length else self.look(one.name)  # it may be shorter
        except Missing:
            raise one.changed("it is gone") from None
        one.check(now, len(data), length)
        return data

    def put(self, name: str, data: bytes, new: bool = False) -> bool:
        with self._at(name) as (files, path):
            files.invalidate_cache()
            if new and files.exists(path):  # no protocol of fsspec's has to create and look at once
                return False
            files.pipe_file(path, data)
        return True

    def remove(self, name: str) -> None:
        with self._at(name) as (files, path):
            files.rm_file(path)

    @contextmanager
    def _at(self, name: str) -> Iterator[tuple[Any, str]]:
        """The file system and the path in it, and what its errors mean.

        It is asked for each time: fsspec keeps one per process, and what a forked child inherits of a
        connection or an event loop is dead.
        """
        core = required("fsspec.core", f"'{name}' needs fsspec: pip install 'edl-torch[parquet]' (or fsspec)")
        made = None
        try:
            made = core.url_to_fs(name, **self._options)
            yield made
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as exc:
            raise Missing(str(exc)) from exc
        except PermissionError as exc:
            raise CredentialsRefused(str(exc)) from exc
        except OSError as exc:
            if not (made or exc.errno or isinstance(exc, ConnectionError | TimeoutError)):
                raise storage_error(exc, name) from exc  # as HDFS without Java: there will be none later
            raise Transient(f"{type(exc).__name__}: {exc}") from exc
        except Exception as exc:
            raise storage_error(exc, name) from exc


def storage_error(exc: Exception, url: str) -> ReaderError:
    """What a storage driver's error means. Each driver has a tree of its own, so names decide as well."""
    said = f"{type(exc).__name__}: {exc}"
    if isinstance(exc, FileNotFoundError | NotADirectoryError):
        return ReaderError(f"'{url}' does not exist; check the path{' and the bucket' * is_url(url)} ({exc})")
    if isinstance(exc, ImportError):
        return ReaderUnavailable(f"'{url}' needs a package that is not installed: {exc}")
    if isinstance(exc, PermissionError) or _REFUSED.search(said):
        where = "storage_options={…} or the environment" if is_url(url) else "the file's permissions"
        return ReaderError(f"access to '{url}' is refused ({said}); check the credentials in {where}")
    if isinstance(exc, ValueError) and "rotocol" in str(exc):
        return ReaderError(f"'{url}': fsspec knows no such protocol; check the part before '://' ({exc})")
    if isinstance(exc, TypeError):
        return ReaderError(f"'{url}': its file system does not take these storage_options ({exc})")
    return ReaderError(
        f"'{url}' cannot be reached ({said}); check the network, the endpoint and storage_options"
    )


_runs_in = os.getpid()  # the process whose obstore's threads are, if it is imported
_NEED = "object stores and web servers need obstore: pip install 'edl-torch[objects]'"


def require_obstore() -> None:
    """Raise ReaderUnavailable where there is no obstore; it is not imported."""
    if find_spec("obstore") is None:
        raise ReaderUnavailable(_NEED)


def obstore_runs_here() -> bool:
    """Import obstore. Return whether its threads are this process', and not those of its parent."""
    global _runs_in
    if "obstore" not in sys.modules:
        _runs_in = os.getpid()
        required("obstore", _NEED)
    return os.getpid() == _runs_in


def driver_for(root: str, options: Mapping[str, Any]) -> Driver:
    """Make the driver of a root. Raises ReaderUnavailable without its package, and ReaderError."""
    if not root:
        return LocalFiles()
    return Objects(root, options) if by_obstore(root) else FileSystem(options)
