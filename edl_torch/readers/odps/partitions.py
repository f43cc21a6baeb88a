"""Partitions of a table: specifications, patterns over them, and `odps://` addresses.

Pure text; it must not know the service.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote, urlsplit

from edl_torch.errors import InvalidArgument

_GLOB = re.compile(r"[*?\[]")
_PATH = re.compile(r"/(?:schemas/(?P<schema>[^/]+)/)?tables/(?P<table>[^/]+)(?:/(?P<partition>.+?))?/?")


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
