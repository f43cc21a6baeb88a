"""Where a MaxCompute table is, which partitions of it are meant, and who reads them.

From arguments, else from the environment; it must not know pyodps. Keys that come from the environment stay
there: each process reads them where it connects. Those given as arguments are `Secret`s.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from multiprocessing.context import get_spawning_popen
from typing import Any
from urllib.parse import unquote, urlsplit

from edl_torch.errors import InvalidArgument

_PROJECT = ("ODPS_PROJECT_NAME", "ODPS_PROJECT", "MAXCOMPUTE_PROJECT")
_ENDPOINT = ("ODPS_ENDPOINT", "MAXCOMPUTE_ENDPOINT")
_TUNNEL_ENDPOINT = ("ODPS_TUNNEL_ENDPOINT", "MAXCOMPUTE_TUNNEL_ENDPOINT")
# Access id, key, temporary token. Never mixed: a key belongs to the id beside it.
_KEYS = (
    ("ODPS_ACCESS_ID", "ODPS_ACCESS_KEY", "ODPS_STS_TOKEN"),
    ("ODPS_STS_ACCESS_KEY_ID", "ODPS_STS_ACCESS_KEY_SECRET", "ODPS_STS_TOKEN"),
    ("MAXCOMPUTE_AK", "MAXCOMPUTE_SK", ""),
    ("ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET", "ALIBABA_CLOUD_SECURITY_TOKEN"),
)
_GLOB = re.compile(r"[*?\[]")
_PATH = re.compile(r"/(?:schemas/(?P<schema>[^/]+)/)?tables/(?P<table>[^/]+)(?:/(?P<partition>.+?))?/?")


class Secret:
    """Wraps a secret; `reveal()` is the only way to it.

    `repr`, `str` and `format` show `<secret>`. While multiprocessing starts a child (spawn, forkserver) a
    pickle carries the text, through the pipe to that child; every other pickle, on a disk or a wire, is
    without it, and `reveal()` of its copy gives None.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str | None = None) -> None:
        self._text = text

    def reveal(self) -> str | None:
        """The text; None where there is none, or the pickle left it out."""
        return self._text

    def hide_in(self, text: str) -> str:
        """`text` with `<secret>` in the place of this secret."""
        return text.replace(self._text, repr(self)) if self._text else text

    def __reduce__(self) -> tuple[Any, ...]:
        return Secret, (self._text if get_spawning_popen() is not None else None,)

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: Any) -> Secret:
        return self

    def __repr__(self) -> str:
        return "<secret>"


def cause_without_secrets(error: BaseException, hide: Callable[[str], str]) -> BaseException | None:
    """`error`, for `raise … from`, unless its traceback, with all that led to it, says what `hide` hides.

    HTTP requests that errors carry are taken out: their headers have tokens, and pickles of errors have all.
    """
    links = [error]
    for link in links:
        links += [e for e in (link.__cause__, link.__context__) if e is not None and e not in links]
        for name in {"request", "response"} & vars(link).keys():
            setattr(link, name, None)
    text = "".join(traceback.format_exception(error))
    return error if hide(text) == text else None


class OdpsConfig:
    """A table and how to reach it, from arguments, filled up from the environment.

    `table` may be `project.table` or `project.schema.table`. Its `repr` and its pickles on a disk are without
    secrets. Raises InvalidArgument for what is missing, with the variables that would supply it, and for half
    a pair of keys.
    """

    def __init__(
        self,
        table: str,
        *,
        project: str | None = None,
        schema: str | None = None,
        access_id: str | None = None,
        access_key: str | None = None,
        sts_token: str | None = None,
        endpoint: str | None = None,
        tunnel_endpoint: str | None = None,
        quota_name: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        *above, name = table.split(".")
        if not all((*above, name)) or len(above) > 2:
            raise InvalidArgument(f"table={table!r}: expected table, project.table or project.schema.table")
        if above:
            project, schema = above[0], (above[1] if len(above) == 2 else schema)
        keys = {"access_id": access_id, "access_key": access_key, "sts_token": sts_token}
        for what, given in keys.items():
            if not isinstance(given, str | None):
                raise InvalidArgument(f"{what} is {type(given).__name__}, expected text: put it in quotes")
        if access_key and not access_id:
            raise InvalidArgument("access_key is given without access_id: give both, or neither")
        if sts_token and not access_key:
            raise InvalidArgument("sts_token is given without access_id and access_key: give all, or none")
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise InvalidArgument(f"timeout_s={timeout_s!r}: expected a positive number of seconds")
        self.project = _needed("project", project, _PROJECT)
        self.endpoint = _needed("endpoint", endpoint, _ENDPOINT)
        self.tunnel_endpoint = tunnel_endpoint or _first(_TUNNEL_ENDPOINT)
        self.table, self.schema, self.quota_name, self.timeout_s = name, schema, quota_name, timeout_s
        self.access_id, self.access_key, self.sts_token = access_id, Secret(access_key), Secret(sts_token)

    def __repr__(self) -> str:
        return f"<OdpsConfig {self.name} at {self.endpoint}>"

    @property
    def name(self) -> str:
        """`project.table`, or `project.schema.table`."""
        return ".".join(part for part in (self.project, self.schema, self.table) if part)

    def credentials(self) -> AccessKey | None:
        """The keys to sign with, or None where neither arguments nor environment have any."""
        key = self.access_key.reveal()
        if self.access_id and key:
            return AccessKey(self.access_id, self.access_key, self.sts_token)
        for id_name, key_name, token_name in _KEYS:
            found, key = os.environ.get(id_name), os.environ.get(key_name)
            if found and key and self.access_id in (None, "", found):
                return AccessKey(found, Secret(key), Secret(os.environ.get(token_name) or None))
        return None

    def hide_in(self, text: str) -> str:
        """`text` without the secrets of this table's reader."""
        credentials = self.credentials()
        for secret in (credentials.access_key, credentials.sts_token) if credentials else ():
            text = secret.hide_in(text)
        return text


@dataclass(frozen=True)
class AccessKey:
    """What a request is signed with."""

    access_id: str
    access_key: Secret
    sts_token: Secret


def missing_keys() -> InvalidArgument:
    """What to say where nothing can be signed."""
    pairs = "; ".join(f"{key_id} and {key}" for key_id, key, _ in _KEYS)
    return InvalidArgument(
        "there is no access key for MaxCompute in this process: give access_id and access_key, or set one "
        f"pair of {pairs}. A key given as an argument reaches child processes, but no pickle that is stored"
    )


def _needed(what: str, given: str | None, names: tuple[str, ...]) -> str:
    found = given or _first(names)
    if not found:
        raise InvalidArgument(
            f"the MaxCompute {what} is not known: give {what}=, or set {' or '.join(names)}"
        )
    return found


def _first(names: tuple[str, ...]) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


class PartitionPattern:
    """`ds=2024*,hh=01`: values may have `*`, `?` and `[…]`; keys that are not named match anything."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.values = parse_partition(text)

    def matches(self, spec: str) -> bool:
        """Whether a partition `ds=x,hh=y` is meant."""
        found = parse_partition(spec)
        return all(key in found and fnmatchcase(found[key], value) for key, value in self.values.items())

    def prefix(self, keys: Sequence[str]) -> str:
        """What the service can select by itself: the first keys, as long as their values are literal."""
        literal = []
        for key in keys:
            value = self.values.get(key)
            if value is None or _GLOB.search(value):
                break
            literal.append(f"{key}={value}")
        return ",".join(literal)

    def __repr__(self) -> str:
        return f"<PartitionPattern {self.text!r}>"


def partition_patterns(partition: str | Iterable[str] | None) -> tuple[PartitionPattern, ...]:
    """The patterns of an argument: none (all partitions), one or several."""
    if partition is None or partition == "":
        return ()
    given = (partition,) if isinstance(partition, str) else tuple(partition)
    return tuple(PartitionPattern(text) for text in given)


def parse_partition(text: str) -> dict[str, str]:
    """`ds='x',hh=y` (or with `/` between) as a dict. Raises InvalidArgument for anything else."""
    values: dict[str, str] = {}
    for item in re.split("[,/]", text):
        key, equals, value = (part.strip() for part in item.partition("="))
        value = value.strip("'\"")
        if not (key and equals and value) or key in values:
            raise InvalidArgument(f"partition {text!r}: expected key=value[,key=value…], each key once")
        values[key] = value
    return values


def spec_of(values: Iterable[tuple[str, str]]) -> str:
    """`ds=x,hh=y`."""
    return ",".join(f"{key}={value}" for key, value in values)


def parse_table_url(url: str) -> dict[str, Any]:
    """`odps://project/tables/table[/ds=x,hh=y]` as arguments of a reader.

    `schemas/NAME/` may stand before `tables/`; partitions may be patterns, their keys separated by `,` or
    `/`. Raises InvalidArgument for another form, and for keys inside the address, without repeating it.
    """
    address = urlsplit(url)
    asked = re.split("[,/]", address.query)[0]  # a '?' is a pattern's; after it comes no other key
    if "@" in url.partition("/tables/")[0] or "=" in asked:
        raise InvalidArgument(
            "an odps:// address holds no keys and no options: set ODPS_ACCESS_ID and ODPS_ACCESS_KEY in the "
            "environment, and give the rest as arguments of the reader"
        )
    match = _PATH.fullmatch(address.path)
    if not address.netloc or match is None or address.fragment:
        raise InvalidArgument(f"{url!r}: expected odps://project/tables/table[/partition_key=value,…]")
    found = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
    if address.query:
        found["partition"] = f"{found.get('partition', '')}?{unquote(address.query)}"
    if "partition" in found:
        parse_partition(found["partition"])
    return {"project": unquote(address.netloc), **found}
