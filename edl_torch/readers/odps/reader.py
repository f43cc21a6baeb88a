"""Rows of a MaxCompute (ODPS) table as records: by row range, over one or many partitions.

It must not know pyodps: `table` reads. How and why: docs/maxcompute.md.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from edl_torch.errors import InvalidArgument
from edl_torch.readers.arrow.columns import Columns, numpy_columns, rows
from edl_torch.readers.base import AbstractDataReader, check_range
from edl_torch.readers.odps.blocks import RowBlocks
from edl_torch.readers.odps.config import odps_config, parse_table_url, partition_patterns
from edl_torch.readers.odps.retries import Retries
from edl_torch.readers.odps.table import OdpsTable
from edl_torch.shard import IndexArray, Task, TaskType

_SCHEME = "odps://"


class ODPSDataReader(AbstractDataReader):
    """The rows of a table; one source for each partition, named `project.table/ds=x`.

    A record is a dict of the columns' values. With `ElasticDataLoader(batch_size=None)` a batch is a dict of
    columns, which never were Python rows. Values are those of `readers.arrow.columns`: NULL is NaN in
    floating-point columns, None in text, NaT in times, and an error (`BadRecord`) in integers and booleans
    unless `fill_nulls` says what stands for it. Times are in UTC.

    Args:
        table: `table`, `project.table`, `project.schema.table`, or an `odps://` address.
        partition: None for all partitions, one (`"ds=20240101"`) or several. Values may be patterns
            (`"ds=202401*"`), and keys may be left out.
        columns: Their names, in order; partition keys may be among them. None: all but partition keys.
        project, endpoint, tunnel_endpoint, access_id, access_key, sts_token: None for the environment's (see
            docs/maxcompute.md). Keys given here reach child processes; pickles that are stored are without.
        schema, quota_name: Of a project with schemas, of the tunnel; rarely needed.
        fill_nulls: What stands for NULL, by column. In a column of arrays a list stands for NULL arrays, any
            other value for NULL inside of arrays.
        block_rows: Rows of one request at most.
        cache_bytes: Downloaded rows that a process keeps for random access.
        timeout_s: How long a request may be silent.
        retries: How often a call is made again; see `Retries`.

    Raises InvalidArgument for arguments that cannot be used. Reading raises ReaderError, SourceChanged where
    the table was written to meanwhile, and BadRecord.
    """

    reads_blocks = True

    def __init__(
        self,
        table: str,
        partition: str | Iterable[str] | None = None,
        columns: Sequence[str] | None = None,
        *,
        project: str | None = None,
        access_id: str | None = None,
        access_key: str | None = None,
        sts_token: str | None = None,
        endpoint: str | None = None,
        tunnel_endpoint: str | None = None,
        schema: str | None = None,
        quota_name: str | None = None,
        fill_nulls: Mapping[str, Any] | None = None,
        block_rows: int = 16_384,
        cache_bytes: int = 256 << 20,
        timeout_s: float = 60.0,
        retries: Retries | int = 8,
    ) -> None:
        super().__init__()
        if table.startswith(_SCHEME):
            place = parse_table_url(table)
            table, partition = place["table"], partition or place.get("partition")
            project, schema = place["project"], place.get("schema", schema)
        for name, value in (("block_rows", block_rows), ("cache_bytes", cache_bytes)):
            if not isinstance(value, int) or value < 1:
                raise InvalidArgument(f"{name}={value!r}: expected a positive integer")
        config = odps_config(
            table,
            project=project,
            schema=schema,
            access_id=access_id,
            access_key=access_key,
            sts_token=sts_token,
            endpoint=endpoint,
            tunnel_endpoint=tunnel_endpoint,
            quota_name=quota_name,
            timeout_s=timeout_s,
        )
        patience = retries if isinstance(retries, Retries) else Retries(retries)
        self.table = OdpsTable(config, partition_patterns(partition), columns, patience)
        if not isinstance(fill_nulls, Mapping | None):
            raise InvalidArgument(
                f"fill_nulls={fill_nulls!r}: expected values by column, {{'column': value}}"
            )
        self.fill_nulls = dict(fill_nulls or {})
        self.block_rows = block_rows
        self.cache_bytes = cache_bytes
        self._own_blocks: tuple[int, RowBlocks] | None = None

    @property
    def blocks(self) -> RowBlocks:
        """The rows that this process has in memory."""
        if self._own_blocks is None or self._own_blocks[0] != os.getpid():
            self._own_blocks = (
                os.getpid(),
                RowBlocks(self._fetch, self.block_rows, self.cache_bytes, self.fill_nulls),
            )
        return self._own_blocks[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own_blocks": None}

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns that were asked for; None: all but partition keys."""
        return self.table.columns

    @property
    def retries(self) -> int:
        """How often this process has made a call again."""
        return self.table.retries.count

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """Rows by source, the same for every mode. The first call makes a download session a partition."""
        return {self.table.name(partition): count for partition, count in self.table.plan().items()}

    def read_records(self, task: Task) -> Iterator[dict[str, Any]]:
        """Yield the rows one by one, downloaded in blocks. Raises ReaderError for a range outside."""
        self._count(task.shard_name, task.start, task.end)
        return self._records(task.shard_name, task.start, task.end)

    def _records(self, name: str, start: int, end: int) -> Iterator[dict[str, Any]]:
        for first in range(start, end, self.block_rows):
            yield from rows(self._fetch(name, first, min(self.block_rows, end - first)), self.fill_nulls)

    def read_record(self, name: str, index: int) -> dict[str, Any]:
        """Row `index`, out of a block that stays in memory."""
        count = self._count(name, index, index + 1)
        return self.blocks.row(name, int(index), count)

    def read_batch(self, name: str, indices: IndexArray) -> Columns:
        """The rows `indices` as one array a column."""
        first, last = (int(indices.min()), int(indices.max()) + 1) if len(indices) else (0, 0)
        count = self._count(name, first, last)
        if not len(indices):
            return numpy_columns(self._fetch(name, 0, 0), self.fill_nulls)
        return numpy_columns(self.blocks.take(name, indices, count), self.fill_nulls)

    def expect(self, name: str, start: int, end: int) -> None:
        """Download just this range, in blocks, when its rows are asked for."""
        self.blocks.expect(name, start, end)

    def _count(self, name: str, start: int, end: int) -> int:
        count = self.table.download(self.table.partition_of(name)).count
        check_range(start, end, 0, count, name)
        return count

    def _fetch(self, name: str, start: int, count: int) -> Any:
        return self.table.fetch(self.table.partition_of(name), start, count)

    @classmethod
    def arguments_for(cls, data: str, mode: TaskType, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Constructor arguments for an `odps://` address, else None."""
        if not data.startswith(_SCHEME):
            return None
        return parse_table_url(data)

    def __repr__(self) -> str:
        return f"<ODPSDataReader {self.table!r} retries={self.retries}>"
