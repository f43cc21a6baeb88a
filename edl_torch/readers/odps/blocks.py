"""Blocks of rows in memory: what was downloaded last, up to a number of bytes.

It must not know where rows come from: `fetch(name, start, count)` gives them as an Arrow table.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from edl_torch.readers.arrow.columns import flat_values, rows
from edl_torch.readers.arrow.values import row_numbers
from edl_torch.shard import IndexArray

if TYPE_CHECKING:
    import pyarrow as pa

Key = tuple[str, int, int]  # source, first row, row after the last
_VALUE_BYTES = 64  # about what a value takes as an object of Python


class Block:
    """Rows that lie one after the other, as Arrow, and as Python values once single rows are asked for."""

    def __init__(self, table: pa.Table, fill_nulls: Mapping[str, Any]) -> None:
        self.table = table
        self._table_bytes = int(table.nbytes)  # asked for often, and Arrow counts anew each time
        self._fill_nulls = fill_nulls
        self._values: dict[str, list[Any]] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory, about."""
        values = 0 if self._values is None else len(self._values) * self.table.num_rows * _VALUE_BYTES
        return self._table_bytes + values

    def row(self, at: int) -> dict[str, Any]:
        """One row, which belongs to the caller. Raises BadRecord for a NULL that has no value."""
        if self._values is None:
            self._values = flat_values(self.table, self._fill_nulls)
        if len(self._values) == self.table.num_columns:
            return {name: values[at] for name, values in self._values.items()}
        rest = [name for name in self.table.column_names if name not in self._values]
        row = next(rows(self.table.select(rest).slice(at, 1), self._fill_nulls))
        row.update((name, values[at]) for name, values in self._values.items())
        return {name: row[name] for name in self.table.column_names}


class RowBlocks:
    """Rows by number, read in blocks of at most `block_rows`.

    Blocks lie one after the other from the beginning of a source, or of the range that was announced last
    by `expect`: then nothing is read that is not in the range.
    """

    def __init__(
        self,
        fetch: Callable[[str, int, int], pa.Table],
        block_rows: int,
        most_bytes: int,
        fill_nulls: Mapping[str, Any],
    ) -> None:
        self._fetch = fetch
        self._fill_nulls = fill_nulls
        self._block_rows = block_rows
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Key, Block] = OrderedDict()
        self._expected: Key | None = None

    def expect(self, name: str, start: int, end: int) -> None:
        """Rows of this range are asked for next."""
        self._expected = (name, start, end)

    def row(self, name: str, index: int, count: int) -> dict[str, Any]:
        """Row `index` of a source of `count` rows."""
        key = self._key(name, index, count)
        return self._block(key).row(index - key[1])

    def take(self, name: str, indices: IndexArray, count: int) -> pa.Table:
        """The rows `indices` of a source of `count` rows, in that order."""
        import pyarrow as pa

        if _consecutive(indices):
            parts = list(self._range(name, int(indices[0]), int(indices[-1]) + 1, count))
            return pa.concat_tables(parts)
        order = np.argsort(indices, kind="stable")
        ascending = indices[order]
        parts, at = [], 0
        while at < len(ascending):
            _, first, after = key = self._key(name, int(ascending[at]), count)
            stop = int(np.searchsorted(ascending, after))
            parts.append(self._block(key).table.take(row_numbers(ascending[at:stop] - first)))
            at = stop
        return pa.concat_tables(parts).take(row_numbers(np.argsort(order)))

    def _range(self, name: str, start: int, end: int, count: int) -> Iterator[Any]:
        while start < end:
            _, first, after = key = self._key(name, start, count)
            stop = min(after, end)
            yield self._block(key).table.slice(start - first, stop - start)
            start = stop

    def _key(self, name: str, index: int, count: int) -> Key:
        expected = self._expected
        if expected is not None and expected[0] == name and expected[1] <= index < expected[2]:
            _, low, high = expected
        else:
            low, high = 0, count
        first = index - (index - low) % self._block_rows
        return name, first, min(first + self._block_rows, high)

    def _block(self, key: Key) -> Block:
        with self._lock:
            block = self._blocks.get(key)
            if block is not None:
                self._blocks.move_to_end(key)
                return block
        name, first, after = key
        block = Block(self._fetch(name, first, after - first), self._fill_nulls)
        with self._lock:
            self._blocks[key] = block
            kept = sum(held.nbytes for held in self._blocks.values())
            while kept > self._most_bytes and len(self._blocks) > 1:
                _, oldest = self._blocks.popitem(last=False)
                kept -= oldest.nbytes
        return block

    def __repr__(self) -> str:
        return f"<RowBlocks {len(self._blocks)} of {self._block_rows} rows>"


def _consecutive(indices: IndexArray) -> bool:
    return len(indices) > 0 and bool(np.all(np.diff(indices) == 1))
