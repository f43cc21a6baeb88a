"""Who is next in one segment of a mixture: a function of the segment and the index alone.

In a segment the weights stay the same: of `sum(parts)` records `parts[c]` are of component c.

The rule is that of the chairman of an assembly (Tijdeman, "The chairman assignment problem", 1980), which the
theory of fair scheduling knows as earliest deadline first (Baruah et al., "Proportionate progress", 1996).
The lag of a component is what it should have given by its weights, minus what it has given. Its next record
may come as soon as the lag stays above -1 then, and is due before the lag would be 1; of all that may come
the one that is due first comes. Where records are due now, or were before, the largest lag comes first.

* So in a segment that begins without lags each component is within one record of its share at every index:
  one record at most is due at a time.
* A later segment takes the lags over: what was owed is not forgotten, however often weights change. No lag
  falls below -1, ever. One may be 1 or more for a while after a change: many components that were all owed
  nearly a record, and are given all the weight, cannot be next all at once. Of n components none reaches
  1 + 1/2 + … + 1/k with k = n/2 rounded up (`docs/decisions/0061`): largest first is the rule that empties
  the fullest of n cups (Adler et al., "A proportionate fair scheduling rule with good worst-case
  performance", 2003).
* The rule comes back to where it was after `sum(parts) / gcd(parts)` indices, at the latest from the second
  time on: so a table of those says all, and any index is found at once.

A turn has one record, or as many as the segment says: then all of this is of turns, whose records follow each
other, and each component is within one turn of its share.

Exact: nothing here is a float but the weights that are given.
"""

from __future__ import annotations

import math
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from edl_torch.shard import IndexArray, MixtureSegment

_FIRST = 1 << 12  # indices that are computed at first


class _Table(NamedTuple):
    """Turns as far as they are computed, and where the rule stands then."""

    components: IndexArray
    ranks: IndexArray  # of each turn: how many of its component came before it in the segment
    drawn: tuple[int, ...]  # turns of each component
    waiting: tuple[tuple[int, int, int], ...]  # not to come yet: when, due when, component
    due: tuple[tuple[int, int], ...]  # may come now
    seen: tuple[tuple[int, ...], ...]  # how far ahead of its parts each component was after each round
    loop: int = -1  # turn from which on the table repeats itself; -1: not known yet
    each_round: IndexArray = np.empty(0, np.int64)  # turns of each component from there to the end


class Turns:
    """Who is next in a segment, by the index counted from its start. Computed as far as it is asked for.

    Threads may share it: what is computed is one value, read and replaced at once.
    """

    __slots__ = ("_period", "_steps", "_table", "segment")

    def __init__(self, segment: MixtureSegment) -> None:
        self.segment = segment
        self._period = sum(segment.parts) // math.gcd(*segment.parts)
        one = segment.scale // sum(segment.parts)
        self._steps = tuple(
            part * one for part in segment.parts
        )  # what a lag gains with an index, in 1/scale
        none = np.empty(0, np.int64)
        first = tuple((*self._window(c, 0), c) for c, part in enumerate(segment.parts) if part)
        drawn = (0,) * len(segment.parts)
        self._table = _Table(none, none, drawn, first, (), (self._ahead(drawn, 0),))

    def __repr__(self) -> str:
        return f"<Turns from {self.segment.start} computed={len(self._table.ranks)}>"

    def at(self, first: int, after: int) -> tuple[IndexArray, IndexArray]:
        """Return component and rank of the indices `first` to `after`: how many of it came before it here."""
        turn = self.segment.turn
        if turn == 1:
            return self._turns(first, after)
        indices = np.arange(first, after, dtype=np.int64)
        components, ranks = self._turns(first // turn, -(-after // turn))
        places = indices // turn - first // turn
        return components[places], ranks[places] * turn + indices % turn

    def _turns(self, first: int, after: int) -> tuple[IndexArray, IndexArray]:
        """The same of turns."""
        table = self._grown(after)
        places = np.arange(first, after, dtype=np.int64)
        if after <= len(table.ranks):
            return table.components[first:after], table.ranks[first:after]
        rounds, inside = self._folded(table, places)
        components = table.components[inside]
        return components, table.ranks[inside] + rounds * table.each_round[components]

    def counts(self, index: int) -> IndexArray:
        """Return how many of the first `index` records are of each component."""
        turns, inside = divmod(index, self.segment.turn)
        counts = self._counts(turns) * self.segment.turn
        if inside:
            counts[self._turns(turns, turns + 1)[0]] += inside
        return counts

    def _counts(self, turns: int) -> IndexArray:
        table = self._grown(turns)
        number = len(table.drawn)
        if turns <= len(table.ranks):
            return np.bincount(table.components[:turns], minlength=number)
        rounds, inside = self._folded(table, np.array([turns], np.int64))
        before: IndexArray = np.bincount(table.components[: int(inside[0])], minlength=number)
        return before + rounds * table.each_round

    def find(self, component: int, rank: int) -> int:
        """Return the index of a component's record by its rank. The component has parts."""
        turns, inside = divmod(rank, self.segment.turn)
        return self._find(component, turns) * self.segment.turn + inside

    def _find(self, component: int, rank: int) -> int:
        size = _FIRST
        while True:
            table = self._grown(size)
            places = np.flatnonzero(table.components == component)
            if rank < len(places):
                return int(places[rank])
            if table.loop >= 0:
                break
            size *= 2
        # What the rounds of the loop add follows from its first one.
        of_a_round = int(table.each_round[component])
        before = len(places) - of_a_round
        rounds, inside = divmod(rank - before, of_a_round)
        return int(places[before + inside]) + rounds * self._loop_size(table)

    def lags(self, index: int) -> tuple[int, ...]:
        """Return the lags after the first `index` records, in 1/scale."""
        lags, scale = self.segment.lags, self.segment.scale
        return tuple(
            lags[c] * self.segment.turn + self._steps[c] * index - scale * count
            for c, count in enumerate(self.counts(index).tolist())
        )

    def _folded(self, table: _Table, places: IndexArray) -> tuple[IndexArray, IndexArray]:
        """The rounds of the loop before each place, and where it stands in the table."""
        rounds, inside = np.divmod(np.maximum(places - table.loop, 0), self._loop_size(table))
        return rounds, np.where(places < table.loop, places, inside + table.loop)

    def _loop_size(self, table: _Table) -> int:
        return len(table.ranks) - table.loop

    def _grown(self, size: int) -> _Table:
        """The table up to `size` turns, or all of it."""
        table = self._table
        while table.loop < 0 and len(table.ranks) < size:
            table = self._table = self._more(table)
        return table

    def _more(self, table: _Table) -> _Table:
        """Compute as many turns again, up to the end of the round at most."""
        begin = len(table.ranks)
        end = min(begin - begin % self._period + self._period, max(2 * begin, _FIRST))
        drawn, waiting, due = list(table.drawn), list(table.waiting), list(table.due)
        heapify(waiting)
        components, ranks = [], []
        late: list[int] = []  # components whose records are due now or were before: one at most, without lags
        for turn in range(begin + 1, end + 1):
            while waiting and waiting[0][0] <= turn:
                _, until, c = heappop(waiting)
                heappush(due, (until, c))
            while due and due[0][0] <= turn:
                late.append(heappop(due)[1])
            if late:
                c = max(late, key=lambda c: (self._lag(c, turn, drawn[c]), -c))
                late.remove(c)
            else:
                # There is one: the lags add up to 0, so one grows above it with each index.
                _, c = heappop(due)
            components.append(c)
            ranks.append(drawn[c])
            drawn[c] += 1
            may, until = self._window(c, drawn[c])
            heappush(waiting, (may, until, c))
        seen, loop = table.seen, -1
        if end % self._period == 0:
            ahead = self._ahead(tuple(drawn), end // self._period)
            loop = seen.index(ahead) * self._period if ahead in seen else -1
            seen = (*seen, ahead)
        all_components = np.concatenate((table.components, np.array(components, np.int64)))
        return _Table(
            all_components,
            np.concatenate((table.ranks, np.array(ranks, np.int64))),
            tuple(drawn),
            tuple(waiting),
            tuple(sorted([*due, *((self._window(c, drawn[c])[1], c) for c in late)])),
            seen,
            loop,
            np.bincount(all_components[max(loop, 0) :], minlength=len(drawn)),
        )

    def _lag(self, c: int, turn: int, drawn: int) -> int:
        """The lag of a component after so many turns and of these its own, in 1/scale of one."""
        return self.segment.lags[c] + self._steps[c] * turn - self.segment.scale * drawn

    def _window(self, c: int, drawn: int) -> tuple[int, int]:
        """The first turn at which the next one of a component may come, and the last by which it is due."""
        lag, step, scale = self.segment.lags[c], self._steps[c], self.segment.scale
        return (scale * drawn - lag) // step + 1, -((lag - scale * (drawn + 1)) // step)

    def _ahead(self, drawn: tuple[int, ...], rounds: int) -> tuple[int, ...]:
        common = math.gcd(*self.segment.parts)
        each = zip(drawn, self.segment.parts, strict=True)
        return tuple(count - rounds * part // common for count, part in each)


@lru_cache(maxsize=16)
def turns_of(segment: MixtureSegment) -> Turns:
    """The turns of a segment, computed once for all who have it in this process."""
    return Turns(segment)
