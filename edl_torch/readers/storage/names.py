"""Names of data: which are URLs, which way to data they take, and what may not be in them."""

from __future__ import annotations

import re
from urllib.parse import unquote

from edl_torch.errors import InvalidArgument

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(?:::|://)")
_PASSWORD = re.compile(r"://[^/@]*:[^/@]*@")
_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https"})


def is_url(data: str) -> bool:
    """Whether `data` names its file system (`s3://…`, `memory://…`, `simplecache::s3://…`)."""
    return _URL.match(data) is not None


def is_elsewhere(name: str) -> bool:
    """Whether a name is a URL of no file of this machine."""
    return is_url(name) and not name.startswith("file://")


def is_web(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def refuse_secrets(url: str) -> None:
    """Raise InvalidArgument for a URL with a password, or with a query (a signature?) for a web server."""
    if _PASSWORD.search(url):
        raise InvalidArgument(
            "a URL with a password would be written down as the name of a source: leave user and "
            "password out and pass storage_options={…}"
        )
    if is_web(url) and "?" in url:
        raise InvalidArgument(
            f"'{url.partition('?')[0]}?…' has a query, which may be a signature, and names are written down: "
            "leave it out; what a server wants to know goes into storage_options={'client_options': "
            "{'default_headers': {…}}}"
        )


def by_obstore(name: str) -> bool:
    """Whether obstore is the way to a name."""
    return "://" in name and name.split("://", 1)[0].lower() in _SCHEMES


def root_of(name: str) -> str:
    """The part of a name that one driver serves: the bucket, the server; of a path nothing."""
    if not is_elsewhere(name):
        return ""
    if not by_obstore(name):
        return name.split("://", 1)[0] + "://"
    scheme, _, rest = name.partition("://")
    place = rest.partition("/")[0]
    if not place or "*" in place or "?" in place:
        raise InvalidArgument(f"'{name}' names no bucket: expected {scheme}://bucket/…")
    return f"{scheme.lower()}://{place}"


def spelled(url: str) -> str:
    """One spelling of a URL for all that lead to the same object."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    if not by_obstore(url):
        return f"{scheme}://{rest.strip('/')}"
    host, _, path = rest.partition("/")
    if is_web(url):
        host, path = host.lower(), unquote(path)
    return f"{'s3' if scheme == 's3a' else scheme}://{host}/{path.strip('/')}"


def local_path(name: str) -> str:
    """The path of a name that may be a `file://` URL."""
    return name.removeprefix("file://")
