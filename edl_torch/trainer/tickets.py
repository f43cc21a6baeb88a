"""Which positions of which leases a batch holds, counted where its samples are drawn."""

from __future__ import annotations

from collections.abc import Iterable

Ticket = tuple[tuple[int, int, int], ...]  # (task, first position, position after the last), in drawing order


class Tally:
    """Positions drawn since the last batch. One per process that collates; never shared by threads."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[list[int]] = []

    def start(self, task: int, position: int) -> list[int]:
        """Begin to draw a lease at `position`. Returns `[task, first, next]`; the reader moves `next`."""
        run = [task, position, position]
        self._runs.append(run)
        return run

    def take(self) -> Ticket:
        """Return the positions drawn since the last call."""
        runs = self._runs
        if len(runs) == 1:  # as for most batches
            run = runs[0]
            task, first, after = run
            run[1] = after
            return ((task, first, after),) if after > first else ()
        ticket = tuple([(task, first, after) for task, first, after in runs if after > first])
        if runs:
            last = runs[-1]
            last[1] = last[2]
            self._runs = [last]
        return ticket

    def clear(self) -> None:
        """Forget what an abandoned pass drew: it is in no batch."""
        self._runs.clear()


def runs_of(tickets: Iterable[Ticket]) -> Ticket:
    """Return what several batches hold."""
    return tuple([run for ticket in tickets for run in ticket])


def ticket_size(ticket: Ticket) -> int:
    """Return the samples in a ticket: quarantined positions in the middle of a batch split a run."""
    size = 0
    for _, first, after in ticket:
        size += after - first
    return size
