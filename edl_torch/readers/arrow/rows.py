"""Single rows of an Arrow table by number, the same that `columns.rows` gives, in a few microseconds.

It must not know where a table comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from edl_torch.readers.arrow.columns import rows
from edl_torch.readers.arrow.values import is_in_place, plain_view, text_bounds

if TYPE_CHECKING:
    import pyarrow as pa

Pick = Callable[[int], Any]


class RowPicker:
    """Rows of `table`, with what stands for NULL by column, and `same`, columns that have one value.

    Columns of numbers and strings without NULL are read where they lie; each of the others is made a column
    of one row.
    """

    def __init__(
        self,
        table: pa.Table,
        fill_nulls: Mapping[str, Any],
        same: Mapping[str, Any],
        order: list[str],
    ) -> None:
        self.table = table
        self._fills = fill_nulls
        self._same = dict(same)
        self._order = order
        self._quick: dict[str, Pick] = {}
        for name in table.column_names:
            pick = _picker(table.column(name))
            if pick is not None:
                self._quick[name] = pick
        self._others = [name for name in table.column_names if name not in self._quick]
        self._rest = table.select(self._others)
        self._in_order = [*self._quick, *self._others, *self._same] == order

    def row(self, number: int) -> dict[str, Any]:
        """Row `number`, from 0. Raises BadRecord for a NULL that has no value."""
        row = {name: pick(number) for name, pick in self._quick.items()}
        if self._others:
            row |= next(rows(self._rest.slice(number, 1), self._fills))
        row |= self._same
        return row if self._in_order else {name: row[name] for name in self._order}


def _picker(column: pa.ChunkedArray) -> Pick | None:
    """The values of a column by number; None where they have to be made of more than their bytes."""
    if column.num_chunks != 1 or column.null_count:
        return None
    array = column.chunk(0)
    if is_in_place(array.type):
        return plain_view(array).item
    return _texts(array)


def _texts(array: pa.Array) -> Pick | None:
    import pyarrow as pa

    if array.type not in (pa.string(), pa.large_string()):
        return None
    bounds: Any = text_bounds(array)
    data = memoryview(array.buffers()[2] or b"")
    return lambda number: str(data[bounds[number] : bounds[number + 1]], "utf-8")
