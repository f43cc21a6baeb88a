"""Picture of an epoch: its order cut into a few cells, and how many records of each are in which state.

Computed from intervals with arrays: the cost is that of what is in progress, whatever the dataset's size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from edl_torch.core.plan import Plan
    from edl_torch.shard import IndexArray, Slice

CELLS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Records of one epoch by state, for each of its cells: stretches of the epoch's order, alike in length.

    `done` were trained on, or dropped with the last, too small batch; `returned` came back and wait again.
    """

    epoch: int
    waiting: tuple[int, ...]
    lent: tuple[int, ...]
    done: tuple[int, ...]
    returned: tuple[int, ...]
    quarantined: tuple[int, ...]


def draw(
    plan: Plan,
    epoch: int,
    passed: int,
    *,
    lent: Iterable[Slice],
    returned: Iterable[Slice],
    quarantined: Iterable[Slice],
) -> Picture:
    """Return the picture of an epoch of which `passed` records lie before the cursor."""
    edges = cell_edges(plan.size)
    waiting = np.diff(np.clip(edges, passed, None))
    counts = [_by_cell(plan, epoch, edges, slices) for slices in (lent, returned, quarantined)]
    done = np.maximum(np.diff(edges) - waiting - sum(counts), 0)
    names = ("waiting", "done", "lent", "returned", "quarantined")
    columns = zip(names, (waiting, done, *counts), strict=True)
    return Picture(epoch=epoch, **{name: tuple(column.tolist()) for name, column in columns})


def cell_edges(size: int) -> IndexArray:
    """Return where each cell of `size` records begins, and the end of the last one."""
    cells = min(CELLS, size)
    return np.array([size * i // cells for i in range(cells + 1)], np.int64)


def records_by_cell(first: IndexArray, length: IndexArray, edges: IndexArray) -> IndexArray:
    """Return how many records of some runs lie between each two edges. The runs ascend and do not overlap."""
    if not len(first):
        return np.zeros(len(edges) - 1, np.int64)
    before = np.concatenate(([0], np.cumsum(length)))  # records of the runs before each
    place = np.searchsorted(first, edges, side="right")  # runs that begin at the edge or before it
    last = np.maximum(place - 1, 0)  # before all of them nothing of the first one is reached
    inside = np.clip(edges - first[last], 0, length[last])
    reached: IndexArray = before[last] + inside
    return np.diff(reached)


def _by_cell(plan: Plan, epoch: int, edges: IndexArray, slices: Iterable[Slice]) -> IndexArray:
    """Return how many records of the slices lie between each two edges. No two slices overlap."""
    rows = np.array([(s.shard, s.skip, s.limit) for s in slices if s.epoch == epoch], np.int64).reshape(-1, 3)
    first = plan.window_bounds(epoch, rows[:, 0])[0] + rows[:, 1]
    order = np.argsort(first)
    return records_by_cell(first[order], rows[order, 2], edges)
