"""Drawing of a judgement: its lineages as a tree, its epochs as maps of who acknowledged what, cell by cell.

Whatever the job's size, it has few epochs, trainers, lineages and cells, and says how many it leaves out. It
does not know how it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from edl_torch.audit.intervals import Intervals
from edl_torch.audit.lane import Lane, lane
from edl_torch.audit.lineage import Reports
from edl_torch.audit.part import Part, all_reports, records_of
from edl_torch.audit.tree import Branch, tree
from edl_torch.audit.verdict import Judgement
from edl_torch.core.picture import cell_edges

WRONG = ("lost", "doubled", "forgotten")
OUTCOMES = (*WRONG, "repeated", "quarantined", "dropped", "open", "acknowledged")
MOST_EPOCHS = 24
MOST_TRAINERS = 12  # of an epoch

Outcomes = Mapping[str, Intervals]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMap:
    """Map of one epoch, along its shards by number; along its windows, where records are mixed in windows.

    `outcomes` are those that it has, counted as in the verdict: `acknowledged` includes what is `doubled` or
    `repeated`. `trainers` are those that acknowledged most of it; `more_trainers` counts the others.
    """

    epoch: int
    outcomes: tuple[Lane, ...]
    trainers: tuple[Lane, ...]
    more_trainers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Drawing of a judgement. `others` has the outcomes of the `more_epochs` that are not drawn.

    `end` is that of the line which the cells of the lineages divide: so many records all epochs have.
    """

    end: int
    epochs: tuple[EpochMap, ...]
    more_epochs: int
    others: Mapping[str, int]
    roots: tuple[Branch, ...]
    several_ledgers: bool
    more_lineages: int
    empty_lineages: int


def draw(judgement: Judgement) -> Drawing:
    """Return the drawing of a judgement."""
    outcomes, size = _outcomes(judgement), judgement.verdict.size
    end = max(int(records.ends.max(initial=0)) for records in outcomes.values())
    total = max(judgement.verdict.num_epochs, -(-end // size))
    told = [(part, all_reports(part.lineage)) for part in judgement.parts]
    maps = tuple(_map(judgement, outcomes, told, epoch) for epoch in _chosen(outcomes, size, total))
    others = {name: records.count for name, records in outcomes.items()}
    for one in maps:
        for drawn in one.outcomes:
            others[drawn.name] -= drawn.records
    end = max(total * size, 1)
    roots, more_lineages, empty_lineages = tree(judgement, end)
    return Drawing(
        end=end,
        epochs=maps,
        more_epochs=total - len(maps),
        others={name: count for name, count in others.items() if count},
        roots=roots,
        several_ledgers=len({ledger for ledger, _ in judgement.history.lineages}) > 1,
        more_lineages=more_lineages,
        empty_lineages=empty_lineages,
    )


def _outcomes(judgement: Judgement) -> Outcomes:
    """Return the records of each outcome, as the verdict counts them."""
    parts, found = judgement.parts, judgement.found.records
    quarantined = _union(part.quarantined - part.begun for part in parts)
    sets = {
        **found,
        "quarantined": quarantined,
        "dropped": _union(part.dropped for part in parts),
        "open": judgement.open,
        "acknowledged": _union(part.own for part in parts) - quarantined,
    }
    return {name: sets[name] for name in OUTCOMES}


def _union(sets: Iterable[Intervals]) -> Intervals:
    together = Intervals()
    for records in sets:
        together |= records
    return together


def _chosen(outcomes: Outcomes, size: int, total: int) -> list[int]:
    """Return the epochs to draw: all, or those that went worst, where the job is, and the first."""
    if total <= MOST_EPOCHS:
        return list(range(total))
    chosen: dict[int, None] = {}
    for name in OUTCOMES:
        for epoch in islice(_epochs_of(outcomes[name], size), 2 if name == "open" else None):
            chosen[epoch] = None
            if len(chosen) == MOST_EPOCHS:
                return sorted(chosen)
    return sorted(chosen)


def _epochs_of(records: Intervals, size: int) -> Iterator[int]:
    while records:
        epoch = int(records.starts[0]) // size
        yield epoch
        records = records.between((epoch + 1) * size, int(records.ends[-1]))


def _map(
    judgement: Judgement, outcomes: Outcomes, told: Sequence[tuple[Part, Reports]], epoch: int
) -> EpochMap:
    size = judgement.verdict.size
    low, high = epoch * size, (epoch + 1) * size
    edges = cell_edges(size) + low
    lanes = [lane(name, records.between(low, high), edges) for name, records in outcomes.items()]
    had: dict[str, Intervals] = {}
    for part, reports in told:
        here = reports.at((reports.starts >= low) & (reports.starts < high))
        own = part.own.between(low, high)
        for place in np.unique(here.who).tolist():
            name = judgement.history.trainers[place]
            had[name] = had.get(name, Intervals()) | (records_of(here.at(here.who == place)) & own)
    most = sorted((name for name in had if had[name]), key=lambda name: (-had[name].count, name))
    return EpochMap(
        epoch=epoch,
        outcomes=tuple(one for one in lanes if one.records),
        trainers=tuple(lane(name, had[name], edges) for name in most[:MOST_TRAINERS]),
        more_trainers=len(most[MOST_TRAINERS:]),
    )
