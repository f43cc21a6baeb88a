"""Order of a mixture: the component of the record at each index, and its rank in that component's stream.

A mixture's indices 0, 1, 2, … are cut into segments. In each the weights stay the same: of `sum(parts)`
records `parts[c]` are of component c. Who is next is a function of the segment and the index alone.

The rule is that of the chairman of an assembly (Tijdeman, "The chairman assignment problem", 1980), which the
theory of fair scheduling knows as earliest deadline first (Baruah et al., "Proportionate progress", 1996).
The lag of a component is what it should have given by its weights, minus what it has given. Its next record
may come as soon as the lag stays above -1 then, and is due before the lag would be 1; of all that may come
the one that is due first comes.

* So in a segment that begins without lags each component is within one record of its share at every index.
* A later segment takes the lags over: what was owed is not forgotten, however often weights change. None
  falls below -1, ever. One may be 1 or more for a while after a change: many components that were all owed
  nearly a record, and are given all the weight, cannot be next all at once. `docs/mixtures.md` has numbers.
* The rule comes back to where it was after `sum(parts) / gcd(parts)` indices, at the latest from the second
  time on: so a table of those says all, and any index is found at once.

Exact: nothing here is a float but the weights that are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from edl_torch.core.permutation import MAX_SIZE, derive_key
from edl_torch.errors import InvalidArgument
from edl_torch.shard import Component, DatasetSpec, IndexArray, MixtureSegment, MixtureWeights, Source

PERIOD = 1 << 16  # indices after which the rule repeats itself, where weights are not rounded to fewer parts
LONGEST = 1 << 20  # the same, where a weight is so small that it needs more
_FINEST = 1 << 52  # of a lag: what is finer is rounded, so that lags fit the wire
_FIRST = 1 << 12  # indices that are computed at first
ENDLESS = MAX_SIZE  # the size of a mixture that nothing ends

FIRST_EXHAUSTED, ALL_EXHAUSTED = "first_exhausted", "all_exhausted"


# Components ---------------------------------------------------------------------------------------------


def mixed_name(component: str, source: str) -> str:
    """Return the name of a component's source among those of a mixture."""
    return f"{component}:{source}"


def component_spec(component: Component, seed: int) -> DatasetSpec:
    """Return a component of a mixture as a dataset: its order in the mixture is its order by itself.

    Its seed follows from the mixture's and from its name.
    """
    own = {field.name: getattr(component, field.name) for field in fields(component)}
    return DatasetSpec(**own, seed=derive_key(seed, 0, f"component {component.name}"), num_epochs=0)


# Weights ------------------------------------------------------------------------------------------------


def parts_of(weights: Sequence[float | Fraction], names: Sequence[str] = ()) -> tuple[int, ...]:
    """Return weights as whole parts: the shares exactly, as decimals are, where 2**16 parts allow it.

    Else they are rounded to so many parts, or up to 2**20 where one of them would be none.

    Raises InvalidArgument for weights of which none is positive, one is negative or no number, and for one
    that is less than a part of 2**20.
    """
    called = [repr(name) for name in names] or [f"number {place}" for place in range(len(weights))]
    exact = [_exact(weight, name) for weight, name in zip(weights, called, strict=True)]
    total = sum(exact)
    if not total:
        raise InvalidArgument("weights are all 0: give one component at least a positive weight")
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period > PERIOD:
        period, least = PERIOD, min(share for share in shares if share)
        while period * least < 1:
            period *= 2
        if period > LONGEST:
            which = called[shares.index(least)]
            raise InvalidArgument(
                f"the weight of {which} is {float(least):.2g} of all weights, less than a record in a "
                f"million: give it 0, or {1 / LONGEST:.2g} of all or more"
            )
    return _rounded(shares, period)


def _exact(weight: float | Fraction, name: str) -> Fraction:
    try:
        found = weight if isinstance(weight, Fraction) else Fraction(str(weight))
    except (ValueError, ZeroDivisionError, TypeError):  # nan, inf, no number
        found = Fraction(-1)
    if found < 0 or isinstance(weight, bool):
        raise InvalidArgument(f"the weight of {name} is {weight!r}: give a number, 0 or more")
    return found


def parts_by_name(spec: DatasetSpec, weights: Mapping[str, float]) -> tuple[int, ...]:
    """Return weights by the names of a mixture's components as parts in their order.

    Raises InvalidArgument as `parts_of`, and where a component has none or a name is of none.
    """
    names = [component.name for component in spec.components]
    check_names(f"mixture {spec.name!r}", names, weights)
    return parts_of([weights[name] for name in names], names)


def check_names(who: str, names: Sequence[str], weights: Mapping[str, float]) -> None:
    """Raise InvalidArgument unless each component has a weight, and nothing else."""
    missing = [name for name in names if name not in weights]
    unknown = [name for name in weights if name not in names]
    if missing or unknown:
        wrong = [f"{', '.join(missing)}: no weight"] * bool(missing)
        wrong += [f"{', '.join(map(str, unknown))}: no component"] * bool(unknown)
        raise InvalidArgument(
            f"{who} has the components {', '.join(names)}. {'; '.join(wrong)}. Give each a weight, 0 to "
            "leave it out"
        )


def _rounded(shares: Sequence[Fraction], period: int) -> tuple[int, ...]:
    """Parts of `period`, by largest remainders; none that is positive becomes 0."""
    parts = [max(int(share * period), 1 if share else 0) for share in shares]
    missing = period - sum(parts)
    by_remainder = sorted(range(len(parts)), key=lambda c: parts[c] - shares[c] * period)
    for c in by_remainder[: max(missing, 0)]:
        parts[c] += 1
    for _ in range(-missing):  # some were raised to 1: the largest make up for them
        parts[parts.index(max(parts))] -= 1
    return tuple(parts)


# Turns of one segment -----------------------------------------------------------------------------------


class _Table(NamedTuple):
    """Turns as far as they are computed, and where the rule stands then."""

    components: IndexArray
    ranks: IndexArray  # of each index: how many of its component came before it in the segment
    drawn: tuple[int, ...]  # records of each component
    waiting: tuple[tuple[int, int, int], ...]  # not to come yet: when, due when, component
    due: tuple[tuple[int, int], ...]  # may come now
    seen: tuple[tuple[int, ...], ...]  # how far ahead of its parts each component was after each round
    loop: int = -1  # index from which on the table repeats itself; -1: not known yet


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
        table = self._grown(after)
        places = np.arange(first, after, dtype=np.int64)
        if after <= len(table.ranks):
            return table.components[first:after], table.ranks[first:after]
        rounds, inside = self._folded(table, places)
        components = table.components[inside]
        return components, table.ranks[inside] + rounds * self._each_round(table)[components]

    def counts(self, index: int) -> IndexArray:
        """Return how many of the first `index` records are of each component."""
        table = self._grown(index)
        number = len(table.drawn)
        if index <= len(table.ranks):
            return np.bincount(table.components[:index], minlength=number)
        rounds, inside = self._folded(table, np.array([index], np.int64))
        before: IndexArray = np.bincount(table.components[: int(inside[0])], minlength=number)
        return before + rounds * self._each_round(table)

    def find(self, component: int, rank: int) -> int:
        """Return the index of a component's record by its rank. The component has parts."""
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
        of_a_round = int(self._each_round(table)[component])
        before = len(places) - of_a_round
        rounds, inside = divmod(rank - before, of_a_round)
        return int(places[before + inside]) + rounds * self._loop_size(table)

    def lags(self, index: int) -> tuple[int, ...]:
        """Return the lags after the first `index` records, in 1/scale."""
        scale, counts = self.segment.scale, self.counts(index).tolist()
        each = zip(self.segment.lags, self._steps, counts, strict=True)
        return tuple(lag + step * index - scale * count for lag, step, count in each)

    def _folded(self, table: _Table, places: IndexArray) -> tuple[IndexArray, IndexArray]:
        """The rounds of the loop before each place, and where it stands in the table."""
        rounds, inside = np.divmod(np.maximum(places - table.loop, 0), self._loop_size(table))
        return rounds, np.where(places < table.loop, places, inside + table.loop)

    def _loop_size(self, table: _Table) -> int:
        return len(table.ranks) - table.loop

    def _each_round(self, table: _Table) -> IndexArray:
        return np.bincount(table.components[table.loop :], minlength=len(table.drawn))

    def _grown(self, size: int) -> _Table:
        """The table up to `size` indices, or all of it."""
        table = self._table
        while table.loop < 0 and len(table.ranks) < size:
            table = self._table = self._more(table)
        return table

    def _more(self, table: _Table) -> _Table:
        """Compute as many indices again, up to the end of the round at most."""
        begin = len(table.ranks)
        end = min(begin - begin % self._period + self._period, max(2 * begin, _FIRST))
        drawn, waiting, due = list(table.drawn), list(table.waiting), list(table.due)
        heapify(waiting)
        components, ranks = [], []
        for turn in range(begin + 1, end + 1):
            while waiting and waiting[0][0] <= turn:
                _, until, c = heappop(waiting)
                heappush(due, (until, c))
            _, c = heappop(due)  # there is one: the lags add up to 0, so one grows above it with each index
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
        return _Table(
            np.concatenate((table.components, np.array(components, np.int64))),
            np.concatenate((table.ranks, np.array(ranks, np.int64))),
            tuple(drawn),
            tuple(waiting),
            tuple(due),
            seen,
            loop,
        )

    def _window(self, c: int, drawn: int) -> tuple[int, int]:
        """The first turn at which the next record of a component may come, and the last by which it is
        due."""
        lag, step, scale = self.segment.lags[c], self._steps[c], self.segment.scale
        return (scale * drawn - lag) // step + 1, -((lag - scale * (drawn + 1)) // step)

    def _ahead(self, drawn: tuple[int, ...], rounds: int) -> tuple[int, ...]:
        common = math.gcd(*self.segment.parts)
        each = zip(drawn, self.segment.parts, strict=True)
        return tuple(count - rounds * part // common for count, part in each)


@lru_cache(maxsize=16)
def _turns_of(segment: MixtureSegment) -> Turns:
    """The turns of a segment, computed once for all who have it in this process."""
    return Turns(segment)


# Segments -----------------------------------------------------------------------------------------------


class Segments:
    """Segments of a mixture in order, from the first that is still needed, and what each index is in them."""

    def __init__(self, segments: Iterable[MixtureSegment]) -> None:
        self.all: tuple[MixtureSegment, ...] = ()
        self._turns: tuple[Turns, ...] = ()
        self.learn(segments)

    def __repr__(self) -> str:
        return f"<Segments n={len(self.all)} newest={self.newest}>"

    @property
    def newest(self) -> int:
        """The largest number of a segment; 0 where there is none."""
        return max((segment.number for segment in self.all), default=0)

    def learn(self, segments: Iterable[MixtureSegment]) -> None:
        """Add segments; each takes the place of those that begin where it does, or later."""
        for segment in segments:
            self.all = (*(old for old in self.all if old.start < segment.start), segment)
        known = {turns.segment: turns for turns in self._turns}
        self._turns = tuple(known.get(segment) or _turns_of(segment) for segment in self.all)

    def runs(self, first: int, after: int) -> Iterator[tuple[Turns, int, int]]:
        """Yield the turns of each segment that the indices are in, with the first index and the one after.

        Raises InvalidArgument for indices before the first segment that is known.
        """
        turns = self._turns
        if first < turns[0].segment.start:
            raise InvalidArgument(
                f"index {first} of the mixture lies before {turns[0].segment.start}: of what was trained on "
                f"under older weights only counts are kept"
            )
        for place, each in enumerate(turns):
            ends = turns[place + 1].segment.start if place + 1 < len(turns) else after
            begin, end = max(first, each.segment.start), min(after, ends)
            if begin < end:
                yield each, begin, end

    def at(self, first: int, after: int) -> tuple[IndexArray, IndexArray]:
        """Return of each index its component, and the number of the record in all of the component's
        passes."""
        components, numbers = [], []
        for turns, begin, end in self.runs(first, after):
            start = turns.segment.start
            some, ranks = turns.at(begin - start, end - start)
            components.append(some)
            numbers.append(ranks + np.array(turns.segment.counts, np.int64)[some])
        if len(components) == 1:
            return components[0], numbers[0]
        none = [np.empty(0, np.int64)]
        return np.concatenate(components or none), np.concatenate(numbers or none)

    def turns_at(self, index: int) -> Turns:
        """Return the turns of the segment that an index is in."""
        for turns in reversed(self._turns):
            if turns.segment.start <= index:
                return turns
        return next(iter(self.runs(index, index + 1)))[0]  # raises

    def counts(self, index: int) -> IndexArray:
        """Return how many of the first `index` records are of each component."""
        turns = self.turns_at(index)
        start = turns.segment.start
        return np.array(turns.segment.counts, np.int64) + turns.counts(index - start)

    def lags(self, index: int) -> tuple[Fraction, ...]:
        """Return how many records each component is short of its share after the first `index`."""
        turns = self.turns_at(index)
        lags = turns.lags(index - turns.segment.start)
        return tuple(Fraction(lag, turns.segment.scale) for lag in lags)

    def find(self, component: int, number: int) -> int | None:
        """Return the index of a component's record by its number; None where it never comes.

        Raises InvalidArgument for one before the first segment that is known.
        """
        for place, turns in enumerate(self._turns):
            segment = turns.segment
            rank = number - segment.counts[component]
            if rank < 0:
                raise InvalidArgument(f"record {number} of component {component} came under older weights")
            is_last = place + 1 == len(self._turns)
            if not is_last and number >= self._turns[place + 1].segment.counts[component]:
                continue
            return segment.start + turns.find(component, rank) if segment.parts[component] else None
        return None


def begun(segments: Segments, changes: Iterable[MixtureWeights], *, number: int, key: str = "") -> Segments:
    """Return the segments, with one more for each change, all of which lie after what `segments` has begun.

    A segment that a change begins takes over what the segments before it have come to.
    """
    found = Segments(segments.all)
    for change in changes:
        found.learn([_next(found, change, number, key)])
        number += 1
    return found


def _next(segments: Segments, change: MixtureWeights, number: int, key: str) -> MixtureSegment:
    total = sum(change.parts)
    if not segments.all:
        nothing = (0,) * len(change.parts)
        return MixtureSegment(
            number=number,
            start=change.start,
            parts=change.parts,
            counts=nothing,
            lags=nothing,
            scale=total,
            key=key,
        )
    turns = segments.turns_at(change.start)
    index = change.start - turns.segment.start
    scale = math.lcm(turns.segment.scale, total)
    before = turns.lags(index)
    if any(lag and not part for lag, part in zip(before, change.parts, strict=True)):
        scale *= max(1, _FINEST // scale)  # what these let go is shared out
    if scale > _FINEST:
        scale = _FINEST - _FINEST % total
    lags = _settled(before, turns.segment.scale, scale, change.parts)
    return MixtureSegment(
        number=number,
        start=change.start,
        parts=change.parts,
        counts=tuple(segments.counts(change.start).tolist()),
        lags=lags,
        scale=scale,
        key=key,
    )


def _settled(lags: Sequence[int], old: int, scale: int, parts: Sequence[int]) -> tuple[int, ...]:
    """Lags in another scale, of which those without a part are let go: others give up as much of theirs.

    They add up to 0. None comes to lie further from it.
    """
    kept = [_scaled(lag, scale, old) if part else 0 for lag, part in zip(lags, parts, strict=True)]
    over = sum(kept)
    sign = -1 if over < 0 else 1
    may_give = [max(lag * sign, 0) for lag in kept]
    given = [each * over * sign // max(sum(may_give), 1) for each in may_give]
    left = over * sign - sum(given)  # by rounding: a unit from each that has more
    for c, each in enumerate(may_give):
        if left and given[c] < each:
            given[c] += 1
            left -= 1
    return tuple(lag - sign * less for lag, less in zip(kept, given, strict=True))


def _scaled(lag: int, scale: int, old: int) -> int:
    """A lag in another scale, towards 0 where that is coarser."""
    return lag * scale // old if lag >= 0 else -(-lag * scale // old)


def reweighed(
    spec: DatasetSpec, index: int, parts: tuple[int, ...] = (), *, oldest: int | None = None, key: str = ""
) -> DatasetSpec:
    """Return a mixture with other weights from `index` on: `parts`, or without them those of `spec.weights`.

    Changes that were to come later are dropped; of segments stay those that records from index `oldest` on
    are in. Raises InvalidArgument for weights with which a mixture that ends by its components would never
    end.
    """
    known = Segments(spec.segments)
    changes = (MixtureWeights(start=index, parts=parts),) if parts else _from(spec.weights, index)
    segments = begun(known, changes, number=known.newest + 1, key=key)
    first = index if oldest is None else oldest
    return _sized(replace(spec, segments=needed(segments, min(first, index))))


def restored(spec: DatasetSpec, segments: Sequence[MixtureSegment]) -> DatasetSpec:
    """Return a mixture with the segments of a token, or without any its first ones. Their numbers are new.

    Raises InvalidArgument for segments that this mixture cannot have had.
    """
    number = Segments(spec.segments).newest + 1
    if not segments:
        return _sized(replace(spec, segments=begun(Segments(()), spec.weights, number=number).all))
    for before, segment in zip((None, *segments), segments, strict=False):
        _check(spec, segment, before)
    numbered = (replace(segment, number=number + place) for place, segment in enumerate(segments))
    return _sized(replace(spec, segments=tuple(numbered)))


def heard_of(spec: DatasetSpec, segments: Sequence[MixtureSegment]) -> DatasetSpec:
    """Return a mixture with segments that are known of it from elsewhere."""
    return _sized(replace(spec, segments=tuple(segments)))


def _check(spec: DatasetSpec, segment: MixtureSegment, before: MixtureSegment | None) -> None:
    total = sum(segment.parts)
    sound = (
        len(segment.parts) == len(segment.counts) == len(segment.lags) == len(spec.components)
        and all(part >= 0 for part in segment.parts)
        and 0 < total <= LONGEST
        and all(count >= 0 for count in segment.counts)
        and sum(segment.counts) == segment.start
        and sum(segment.lags) == 0
        and 0 < segment.scale <= _FINEST
        and segment.scale % total == 0
        and all(part or not lag for part, lag in zip(segment.parts, segment.lags, strict=True))
        and all(-segment.scale < lag < segment.scale * len(segment.lags) for lag in segment.lags)
        and (before is None or before.start < segment.start)
    )
    if not sound:
        raise InvalidArgument(f"the segment from index {segment.start} on is none of mixture {spec.name!r}")


def _sized(spec: DatasetSpec) -> DatasetSpec:
    """The mixture with the size that follows from its segments, where it ends by its components."""
    if not spec.stops:
        return spec
    sizes = [component.size for component in spec.components]
    size = size_of(Segments(spec.segments), sizes, spec.stops)
    if size is None:
        raise InvalidArgument(
            f"mixture {spec.name!r} ends when each component has had a whole pass, and some would get none: "
            f"give each a positive weight, or give num_records instead of stopping_strategy"
        )
    return replace(spec, sources=(Source(name="", count=size),))


def _from(weights: Sequence[MixtureWeights], index: int) -> tuple[MixtureWeights, ...]:
    """The changes of a schedule from an index on: that which holds there begins there."""
    now = [change for change in weights if change.start <= index][-1:]
    later = [change for change in weights if change.start > index]
    return (*(replace(change, start=index) for change in now), *later)


def needed(segments: Segments, index: int) -> tuple[MixtureSegment, ...]:
    """Return the segments without those that end before an index."""
    first = segments.turns_at(index).segment.start
    return tuple(segment for segment in segments.all if segment.start >= first)


def size_of(segments: Segments, sizes: Sequence[int], stops: str) -> int | None:
    """Return how many records a mixture has that ends when a component, or each, has had a whole pass.

    None where that never comes: a component has no weight that others wait for.
    """
    ends = []
    for c, size in enumerate(sizes):
        if size <= segments.all[0].counts[c]:
            continue  # it has had a pass
        found = segments.find(c, size - 1)
        if found is not None:
            ends.append(found + 1)
        elif stops == ALL_EXHAUSTED:
            return None
    return max(ends, default=None) if stops == ALL_EXHAUSTED else min(ends, default=None)
