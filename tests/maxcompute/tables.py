"""What the server stores: tables, their columns, and rows by partition with a version.

It must not know HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pyarrow as pa
from odps import types
from odps.tunnel.io.types import odps_type_to_arrow_type

Content: TypeAlias = "pa.Table | Mapping[str, Sequence[Any]]"
_EPOCH_S = 1_700_000_000
_STEP_S = 60  # between two versions: the service tells times in whole seconds


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a partition, or of a table without partitions, as they are now."""

    rows: pa.Table
    version: int = 0

    @property
    def modified_s(self) -> int:
        """When the rows were last changed, in seconds since the epoch."""
        return _EPOCH_S + self.version * _STEP_S


@dataclass
class Table:
    """A table; `parts` maps `ds=x,hh=y` to rows, or the empty string where there are no partitions."""

    name: str
    columns: Mapping[str, str]
    partition_keys: Mapping[str, str] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.schema = pa.schema(
            [
                (name, odps_type_to_arrow_type(types.validate_data_type(kind)))
                for name, kind in self.columns.items()
            ]
        )

    def write(self, rows: Content, partition: str = "") -> None:
        """Put `rows` in the place of what is there; sessions that are open find the table modified."""
        spec = self.normal(partition)
        arrays = [pa.array(self._values(rows, name), type=kind) for name, kind in _fields(self.schema)]
        with self._lock:
            old = self.parts.get(spec)
            new = pa.Table.from_arrays(arrays, schema=self.schema)
            self.parts[spec] = Part(new, 0 if old is None else old.version + 1)

    def touch(self, partition: str = "") -> None:
        """As if the same rows had been written once more."""
        self.write(self.parts[self.normal(partition)].rows, partition)

    def normal(self, partition: str) -> str:
        """`ds=x,hh=y` in the order of the keys, without quotes. Raises ValueError for other keys."""
        values = parse_spec(partition)
        if set(values) != set(self.partition_keys):
            raise ValueError(f"{partition!r} does not name the partition keys {list(self.partition_keys)}")
        return ",".join(f"{key}={values[key]}" for key in self.partition_keys)

    @property
    def modified_s(self) -> int:
        """When any rows were last changed."""
        return max((part.modified_s for part in self.parts.values()), default=_EPOCH_S)

    def _values(self, rows: Content, name: str) -> Any:
        if isinstance(rows, pa.Table):
            return rows.column(name).to_pylist()
        return rows[name]


def _fields(schema: pa.Schema) -> list[tuple[str, Any]]:
    return [(column.name, column.type) for column in schema]


def parse_spec(spec: str) -> dict[str, str]:
    """`ds='x',hh=y` as a dict; quotes are left out."""
    pairs = (item.partition("=") for item in spec.split(",") if item.strip())
    return {key.strip(): value.strip().strip("'\"") for key, _, value in pairs}
