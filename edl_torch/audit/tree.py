"""Tree of a dataset's lineages: the token that each began from, what it did, what of that was rolled back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from edl_torch.audit.chain import may_precede
from edl_torch.audit.intervals import Intervals
from edl_torch.audit.lane import Lane, lane
from edl_torch.audit.lineage import History, Key, Lineage, Taken
from edl_torch.audit.log import token_digest
from edl_torch.audit.part import Part, all_reports, records_of
from edl_torch.audit.reading import Answer
from edl_torch.audit.verdict import Judgement
from edl_torch.core.picture import cell_edges
from edl_torch.errors import AuditError
from edl_torch.shard import IndexArray

MOST_LINEAGES = 100

Origins = dict[Key, Key | None]


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
    history, edges = judgement.history, cell_edges(end)
    latest = sorted(history.lineages.values(), key=_age, reverse=True)
    counting = (part.lineage for part in judgement.parts)
    keys = list(dict.fromkeys(lineage.key for lineage in (*counting, *latest)))
    origins = _origins(history, judgement.parts, keys)
    told = {*origins.values(), *(key for key in keys if len(all_reports(history.lineages[key])))}
    told |= {part.lineage.key for part in judgement.parts}
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


def _origins(history: History, parts: Sequence[Part], keys: Sequence[Key]) -> Origins:
    """Return the lineage that each began from, without circles: ledgers have no order."""
    origins: Origins = dict.fromkeys(keys)
    for part, before in pairwise(parts):
        origins[part.lineage.key] = before.lineage.key
    for key in keys[len(parts) :]:
        origin = _origin(history, history.lineages[key])
        if key not in _ancestors(origins, origin):
            origins[key] = origin
    return origins


def _ancestors(origins: Origins, key: Key | None) -> Iterator[Key]:
    while key is not None:
        yield key
        key = origins[key]


def _origin(history: History, lineage: Lineage) -> Key | None:
    """Return the lineage that a rolled back one began from."""
    if lineage.token is None:
        return None
    keys = {one.key for one in _taken(history, lineage)} or {(lineage.key[0], lineage.before)}
    known = [history.lineages[key] for key in keys & history.lineages.keys() if key != lineage.key]
    return max(known, key=_age).key if known else None


def _taken(history: History, lineage: Lineage) -> list[Taken]:
    """Return who took the token that a lineage began from."""
    taken = history.taken.get(token_digest(lineage.token or ""), ())
    return [one for one in taken if may_precede(one, lineage)]


def _branch(judgement: Judgement, key: Key, edges: IndexArray) -> Branch:
    history = judgement.history
    lineage = history.lineages[key]
    part = next((part for part in judgement.parts if part.lineage.key == key), None)
    final, before = part is judgement.parts[0], Intervals()
    with suppress(AuditError):  # where a lineage began that does not count, the logs need not say
        before = judgement.chain.begun(lineage)
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
        taken_by=_names(history, (one.place for one in _taken(history, lineage))),
        trainers=_names(history, np.unique(all_reports(lineage).who).tolist()),
        before=lane("before", before, edges),
        counted=lane("counted", counted, edges),
        rolled_back=lane("rolled back", Intervals() if final else beyond, edges),
    )


def _names(history: History, places: Iterable[int]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(history.trainers[place] for place in places))
