"""Drawing of a judgement: its lineages as a tree, its epochs as maps of who acknowledged what, cell by cell.

Whatever the job's size, it has few epochs, trainers, lineages and cells, and says how many it leaves out. It
does not know how it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np

from edl_torch.audit.chain import LineageChain, Part, all_reports, records_of
from edl_torch.audit.findings import WRONG
from edl_torch.audit.intervals import Intervals
from edl_torch.audit.lineage import DatasetHistory, Key, Lineage
from edl_torch.audit.reading import Answer, Reports
from edl_torch.audit.verdict import Judgement
from edl_torch.core.status import cell_edges, records_by_cell
from edl_torch.errors import AuditError
from edl_torch.shard import IndexArray

OUTCOMES = (*WRONG, "repeated", "quarantined", "dropped", "open", "acknowledged")
MOST_EPOCHS = 24
MOST_TRAINERS = 12  # of an epoch

Outcomes = Mapping[str, Intervals]
MOST_LINEAGES = 100

Origins = dict[Key, Key | None]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochMap:
    """Map of one epoch, along its order.

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
    told = [(part, all_reports(part.lineage)) for part in judgement.era.parts]
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
        several_ledgers=len({ledger for ledger, _ in judgement.era.history.lineages}) > 1,
        more_lineages=more_lineages,
        empty_lineages=empty_lineages,
    )


def _outcomes(judgement: Judgement) -> Outcomes:
    """Return the records of each outcome, as the verdict counts them."""
    parts, found = judgement.era.parts, judgement.found.records
    quarantined = Intervals.union(part.quarantined - part.begun for part in parts)
    sets = {
        **found,
        "quarantined": quarantined,
        "dropped": Intervals.union(part.dropped for part in parts),
        "open": judgement.open,
        "acknowledged": Intervals.union(part.own for part in parts) - quarantined,
    }
    return {name: sets[name] for name in OUTCOMES}


def _chosen(outcomes: Outcomes, size: int, total: int) -> list[int]:
    """Return the epochs to draw: all, or those that went worst, where the job is, and the first."""
    if total <= MOST_EPOCHS:
        return list(range(total))
    chosen: dict[int, None] = {}
    for name in OUTCOMES:
        for epoch, _ in islice(outcomes[name].blocks(size), 2 if name == "open" else None):
            chosen[epoch] = None
            if len(chosen) == MOST_EPOCHS:
                return sorted(chosen)
    return sorted(chosen)


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
            name = judgement.era.history.trainers[place]
            had[name] = had.get(name, Intervals()) | (records_of(here.at(here.who == place)) & own)
    most = sorted((name for name in had if had[name]), key=lambda name: (-had[name].count, name))
    return EpochMap(
        epoch=epoch,
        outcomes=tuple(one for one in lanes if one.records),
        trainers=tuple(lane(name, had[name], edges) for name in most[:MOST_TRAINERS]),
        more_trainers=len(most[MOST_TRAINERS:]),
    )


# Lineages ----------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Branch:
    """Lineage in the tree. The cells of its lanes are stretches of all epochs together.

    `before` had an outcome when it began, `counted` has its outcome from it, and `rolled_back` is what it
    acknowledged beyond the token that the job went back to. `children` began from a token of it.
    """

    key: Key
    final: bool
    counts: bool  # the final model came through it
    restored: bool  # it began from a token
    taken_by: tuple[str, ...]  # trainers that took this token
    trainers: tuple[str, ...]  # that reported in it
    before: Lane
    counted: Lane
    rolled_back: Lane
    children: list[Branch] = field(default_factory=list)


def tree(judgement: Judgement, end: int) -> tuple[tuple[Branch, ...], int, int]:
    """Return the lineages that began from no other, oldest first, and how many lineages are left out.

    Those are counted as too many, and as empty: a job that restores first leaves one behind. `end` is the end
    of the line that the cells divide. Lineages of the final model are kept, then the latest.
    """
    history, edges = judgement.era.history, cell_edges(end)
    latest = sorted(history.lineages.values(), key=_age, reverse=True)
    counting = (part.lineage for part in judgement.era.parts)
    keys = list(dict.fromkeys(lineage.key for lineage in (*counting, *latest)))
    origins = _origins(judgement, keys)
    told = {*origins.values(), *(key for key in keys if len(all_reports(history.lineages[key])))}
    told |= {part.lineage.key for part in judgement.era.parts}
    shown = [key for key in keys if key in told]
    branches = {key: _branch(judgement, key, edges) for key in shown[:MOST_LINEAGES]}
    roots: list[Branch] = []
    for key in sorted(branches, key=lambda key: _age(history.lineages[key])):
        drawn = (origin for origin in _ancestors(origins, origins[key]) if origin in branches)
        origin = next(drawn, None)
        siblings = roots if origin is None else branches[origin].children
        siblings.append(branches[key])
    return tuple(roots), len(shown) - len(branches), len(keys) - len(shown)


def _age(lineage: Lineage) -> tuple[int, Key]:
    return lineage.age, lineage.key


def _origins(judgement: Judgement, keys: Sequence[Key]) -> Origins:
    """Return the lineage that each began from, without circles: ledgers have no order."""
    history, chain, parts = judgement.era.history, judgement.era.chain, judgement.era.parts
    origins: Origins = dict.fromkeys(keys)
    for part, before in pairwise(parts):
        origins[part.lineage.key] = before.lineage.key
    for key in keys[len(parts) :]:
        origin = _origin(history, chain, history.lineages[key])
        if key not in _ancestors(origins, origin):
            origins[key] = origin
    return origins


def _ancestors(origins: Origins, key: Key | None) -> Iterator[Key]:
    while key is not None:
        yield key
        key = origins[key]


def _origin(history: DatasetHistory, chain: LineageChain, lineage: Lineage) -> Key | None:
    """Return the lineage that a rolled back one began from."""
    if lineage.token is None:
        return None
    keys = {one.key for one in chain.taken(lineage, lineage.token)} or {(lineage.key[0], lineage.before)}
    known = [history.lineages[key] for key in keys & history.lineages.keys() if key != lineage.key]
    return max(known, key=_age).key if known else None


def _branch(judgement: Judgement, key: Key, edges: IndexArray) -> Branch:
    history = judgement.era.history
    lineage = history.lineages[key]
    part = next((part for part in judgement.era.parts if part.lineage.key == key), None)
    final, before = part is judgement.era.parts[0], Intervals()
    taken = judgement.era.chain.taken(lineage, lineage.token or "")
    with suppress(AuditError):  # where a lineage began that does not count, the logs need not say
        before = judgement.era.chain.begun(lineage)
    if part is None:
        told = lineage.acknowledged
        counted, beyond = Intervals(), records_of(told.at(told.answers != Answer.REFUSED))
    else:
        counted, beyond = part.own, part.outcomes - part.begun - part.required
    return Branch(
        key=key,
        final=final,
        counts=part is not None,
        restored=lineage.token is not None,
        taken_by=_names(history, (one.place for one in taken)),
        trainers=_names(history, np.unique(all_reports(lineage).who).tolist()),
        before=lane("before", before, edges),
        counted=lane("counted", counted, edges),
        rolled_back=lane("rolled back", Intervals() if final else beyond, edges),
    )


def _names(history: DatasetHistory, places: Iterable[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(history.trainers[place] for place in places))
