"""Lane of a drawing: a set of records, counted cell by cell along a stretch of the line of all records."""

from __future__ import annotations

from dataclasses import dataclass

from edl_torch.audit.intervals import Intervals
from edl_torch.core.picture import records_by_cell
from edl_torch.shard import IndexArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Records of one kind, or of one trainer: how many, and how many in each cell."""

    name: str
    records: int
    cells: tuple[int, ...]


def lane(name: str, records: Intervals, edges: IndexArray) -> Lane:
    """Return the lane of a set of records; those beyond the first and the last edge are in no cell."""
    cells = records_by_cell(records.starts, records.ends - records.starts, edges)
    return Lane(name=name, records=records.count, cells=tuple(cells.tolist()))
