"""Some records, read here and described: those that other processes survived.

It must not know how they are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from edl_torch.checking.describe import view
from edl_torch.checking.findings import Finding
from edl_torch.checking.reading import reason_of
from edl_torch.checking.sheet import Cell
from edl_torch.checking.spans import spread
from edl_torch.readers.base import AbstractDataReader
from edl_torch.shard import Shard, Source, Task, TaskType


def cells(
    reader: AbstractDataReader, sources: Sequence[Source], mode: TaskType, count: int, bad: Sequence[Finding]
) -> list[Cell]:
    """At most `count` records, evenly over the dataset. Those in `bad` are not read again: they may kill."""
    return [_cell(reader, mode, name, number, bad) for name, number in spread(sources, count)]


def _cell(reader: AbstractDataReader, mode: TaskType, name: str, number: int, bad: Sequence[Finding]) -> Cell:
    heading = f"{number}  {_tail(name)}"
    for finding in bad:
        if finding.name == name and finding.start <= number < finding.end:
            return Cell(heading=heading, error=finding.reason)
    try:
        (record,) = reader.read_records(Task(shard=Shard(name=name, start=number, end=number + 1), type=mode))
        return Cell(heading=heading, view=view(record, reader))
    except Exception as exc:  # noqa: BLE001  a reader is the user's code, and so is what its records are
        return Cell(heading=heading, error=reason_of(exc))


def _tail(name: str) -> str:
    return name if len(name) <= 24 else "..." + name[-21:]
