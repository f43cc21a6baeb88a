"""Rows of a MaxCompute (ODPS) table as records: by row range, over one or many partitions.

It must not know pyodps: `table` reads. How and why: docs/maxcompute.md. `ODPSReader` reads batches of rows
without a master, under the interface that ElasticDL's users know: which worker reads which rows is fixed by
numbers alone. Where workers come and go, `ODPSDataReader` with a `DataShardService` is right.
"""

from __future__ import annotations

import inspect
import os
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from edl_torch.errors import InvalidArgument
from edl_torch.fingerprint import Fingerprint
from edl_torch.readers.arrow import Columns, RowBlock, RowPicker, numpy_columns, rows, taken
from edl_torch.readers.base import AbstractDataReader, Range, check_range
from edl_torch.readers.odps.client import Retries
from edl_torch.readers.odps.config import OdpsConfig, parse_table_url, partition_patterns
from edl_torch.readers.odps.table import OdpsTable
from edl_torch.readers.shared.files import BlockCache
from edl_torch.readers.shared.looks import arguments, listing
from edl_torch.shard import IndexArray, Task, TaskType

if TYPE_CHECKING:
    import pyarrow as pa

_SCHEME = "odps://"
Key = tuple[str, int, int]  # source, first row, row after the last


class ODPSDataReader(AbstractDataReader):
    """The rows of a table; one source for each partition, named `project.table/ds=x`.

    A record is a dict of the columns' values. With `ElasticDataLoader(batch_size=None)` a batch is a dict of
    columns, which never were Python rows. Values are those of `readers.arrow`: NULL is NaN in
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
        config = OdpsConfig(
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
    def _blocks(self) -> RowBlocks:
        """The rows that this process has in memory."""
        pid = os.getpid()
        if self._own_blocks is None or self._own_blocks[0] != pid:
            blocks = RowBlocks(self._fetch, self.block_rows, self.cache_bytes)
            self._own_blocks = pid, blocks
        return self._own_blocks[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own_blocks": None}

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The columns that were asked for; None for all but partition keys."""
        return self.table.columns

    @property
    def retries(self) -> int:
        """How often this process has made a call again."""
        return self.table.retries.count

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """Rows by source, the same for every mode. The first call makes a download session a partition."""
        return {self.table.name(partition): count for partition, count in self.table.plan().items()}

    def fingerprint(self, *, whole: bool = False) -> Fingerprint:
        """The version of each partition: when it was last written to, by the service's clock. And what the
        reader makes of its rows."""
        versions = self.table.versions()
        given = (self.columns, sorted(self.fill_nulls.items()))
        made = arguments("columns", *given) if any(given) else []
        # As attributes: a master that makes the shards need not know of them.
        return listing("whole", versions, dict(enumerate(versions.values())), attributes=made)

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
        block, first, _ = self._blocks.block_of(name, count, int(index))
        if block.picker is None:
            block.picker = RowPicker(block.table, self.fill_nulls, {}, block.table.column_names)
        return block.picker.row(int(index) - first)

    def read_batch(self, name: str, indices: IndexArray) -> Columns:
        """The rows `indices` as one array a column."""
        first, last = (int(indices.min()), int(indices.max()) + 1) if len(indices) else (0, 0)
        count = self._count(name, first, last)
        if not len(indices):
            return numpy_columns(self._fetch(name, 0, 0), self.fill_nulls)
        return taken(indices, partial(self._blocks.block_of, name, count), self._columns)

    def _columns(self, parts: list[pa.Table]) -> Columns:
        import pyarrow as pa

        return numpy_columns(pa.concat_tables(parts), self.fill_nulls)

    def expect(self, ranges: Sequence[Range], *, in_order: bool = False) -> None:
        """Download just these ranges, in blocks, when their rows are asked for.

        Unless they come in order, keep them until others are expected.
        """
        self._blocks.expect(ranges, keep=not in_order)

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


class RowBlocks:
    """Rows by number, read in blocks of at most `block_rows`.

    Blocks lie one after the other from the beginning of a source, or of a range that was announced last
    by `expect`: then nothing is read that is not in the range. To `keep` them goes beyond `most_bytes`.
    """

    def __init__(self, fetch: Callable[[str, int, int], pa.Table], block_rows: int, most_bytes: int) -> None:
        self._fetch = fetch
        self._block_rows = block_rows
        self._blocks: BlockCache[RowBlock] = BlockCache(most_bytes)
        self._expected: dict[str, list[tuple[int, int]]] = {}  # ranges by source, ascending

    def expect(self, ranges: Iterable[Range], *, keep: bool) -> None:
        """Rows of these ranges are asked for next."""
        expected: dict[str, list[tuple[int, int]]] = {}
        keys: list[Key] = []
        for name, start, end in sorted(ranges):
            expected.setdefault(name, []).append((start, end))
            keys += [self._key_in(name, start, end, first) for first in range(start, end, self._block_rows)]
        self._expected = expected
        self._blocks.expect(keys if keep else ())

    def block_of(self, name: str, count: int, index: int) -> tuple[RowBlock, int, int]:
        """The block with row `index` of a source of `count` rows, its first row, the row after its last."""
        ranges = self._expected.get(name, ())
        place = bisect_right(ranges, index, key=itemgetter(0)) - 1
        within = ranges[place] if place >= 0 and index < ranges[place][1] else (0, count)
        _, first, after = key = self._key_in(name, *within, index)
        block = self._blocks.get(key)
        if block is None:
            # In one piece: single rows are picked where they lie.
            fetched = partial(self._fetch, name, first, after - first)
            block = self._blocks.put(key, lambda: RowBlock(fetched().combine_chunks()))
        return block, first, after

    def _key_in(self, name: str, low: int, high: int, index: int) -> Key:
        first = index - (index - low) % self._block_rows
        return name, first, min(first + self._block_rows, high)

    def __repr__(self) -> str:
        return f"<RowBlocks {len(self._blocks)} of {self._block_rows} rows>"


# Without a master: what ElasticDL's users know --------------------------------------------------------

Row = tuple[Any, ...]
SLICE_ROWS = 8192  # at least: what a request costs is spread over so many rows
_OLD_NAMES = {  # of options: as ElasticDL has them
    "odps.options.tunnel.endpoint": "tunnel_endpoint",
    "odps.options.read_timeout": "timeout_s",
    "odps.options.retry_times": "retries",
}
RowRange = tuple[str, int, int]  # partition, first row, number of rows
_AHEAD = 2  # ranges that are asked for, or downloaded, ahead for each thread


class ODPSReader:
    """Rows of a table, or of some of its partitions, as tuples in the order of the columns.

    Args:
        project, access_id, access_key, endpoint: None for the environment's.
        table: Its name.
        partition: None for all, one or several, patterns allowed.
        options: More arguments of `ODPSDataReader` (`tunnel_endpoint`, `fill_nulls`, …); ElasticDL's
            `odps.options.…` names are understood.
    """

    def __init__(
        self,
        project: str | None,
        access_id: str | None,
        access_key: str | None,
        endpoint: str | None,
        table: str,
        partition: str | Iterable[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        more = {_OLD_NAMES.get(name, name): value for name, value in (options or {}).items()}
        more.pop("odps.options.connect_timeout", None)  # one timeout serves for both
        named: dict[str, Any] = {"project": project, "endpoint": endpoint}
        named |= {"access_id": access_id, "access_key": access_key}
        taken = {*inspect.signature(ODPSDataReader).parameters} - {*named, "table", "partition"}
        if not more.keys() <= taken:
            raise InvalidArgument(
                f"options has {', '.join(more.keys() - taken)}: expected {', '.join(sorted(taken))}"
            )
        self._reader = ODPSDataReader(table, partition, **named, **more)
        self._records: Iterator[Row] | None = None

    def to_iterator(
        self,
        num_workers: int,
        worker_index: int,
        batch_size: int,
        epochs: int = 1,
        shuffle: bool = False,
        columns: Sequence[str] | None = None,
        table_size_limit: int = -1,
        num_processes: int | None = None,
    ) -> Iterator[list[Row]]:
        """Yield this worker's batches: lists of at most `batch_size` rows.

        Every row is read by exactly one of the `num_workers` workers in each epoch; only the last batch of
        a partition can be short.

        Args:
            num_workers, worker_index: How many workers there are, and which one this is, from 0.
            batch_size: Rows in a batch.
            epochs: How often the data is repeated.
            shuffle: Read the worker's slices in another order in each epoch, and mix the rows of a slice.
            columns: Their names, in order; None for the reader's.
            table_size_limit: Rows that are read at most, over all workers; -1 for all.
            num_processes: ElasticDL's name for how many download ahead, which threads do here; None for one a
                core, 0 for none.

        Raises InvalidArgument, now and not at the first batch.
        """
        for name, value, least in (
            ("num_workers", num_workers, 1),
            ("worker_index", worker_index, 0),
            ("batch_size", batch_size, 1),
            ("epochs", epochs, 1),
            ("num_processes", num_processes or 0, 0),
        ):
            if type(value) is not int or value < least:
                raise InvalidArgument(f"{name}={value!r}: expected an integer of at least {least}")
        if worker_index >= num_workers:
            raise InvalidArgument(
                f"worker_index={worker_index}: there are num_workers={num_workers}, from 0 on"
            )
        table = self._reader.table
        if columns is not None:
            table = table.with_columns(columns)
        threads = (os.cpu_count() or 1) if num_processes is None else num_processes
        fill_nulls = self._reader.fill_nulls

        def batches() -> Iterator[list[Row]]:
            ranges = list(_slices(table.plan(), batch_size, table_size_limit))[worker_index::num_workers]
            dice = random.Random()
            for _ in range(epochs):
                if shuffle:
                    dice.shuffle(ranges)
                fetched: Iterator[Any] = (table.fetch(*asked) for asked in ranges)
                if threads:
                    fetched = read_ahead(table, ranges, threads)
                for rows_of_slice in fetched:
                    found = [tuple(row.values()) for row in rows(rows_of_slice, fill_nulls)]
                    if shuffle:
                        dice.shuffle(found)
                    for start in range(0, len(found), batch_size):
                        yield found[start : start + batch_size]

        return batches()

    def record(self) -> Row | None:
        """The next row of the table, from its beginning on; None after the last one."""
        if self._records is None:
            batches = self.to_iterator(1, 0, self._reader.block_rows, num_processes=0)
            self._records = (row for batch in batches for row in batch)
        return next(self._records, None)

    def __len__(self) -> int:
        return sum(self._reader.table.plan().values())

    def __repr__(self) -> str:
        return f"<ODPSReader {self._reader.table!r}>"


def _slices(counts: Mapping[str, int], batch_size: int, limit: int) -> Iterator[RowRange]:
    """Whole batches of a partition, so many that a request is worth its while; the same for every worker."""
    step = batch_size * -(-SLICE_ROWS // batch_size)
    left = limit if limit >= 0 else sum(counts.values())
    for partition, count in counts.items():
        count = min(count, left)
        left -= count
        for start in range(0, count, step):
            yield partition, start, min(step, count - start)


def read_ahead(table: OdpsTable, ranges: Sequence[RowRange], threads: int) -> Iterator[pa.Table]:
    """Yield the rows of each range, in order, downloaded ahead by threads. Raises what a download raises.

    However it is left, nothing more is asked for; what was asked for is thrown away when it has come.
    """
    ahead: deque[Future[pa.Table]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="edl-odps")
    try:
        for number in range(len(ranges)):
            for asked in ranges[number + len(ahead) : number + _AHEAD * threads]:
                ahead.append(pool.submit(table.fetch, *asked))
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
