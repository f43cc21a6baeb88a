"""Order of a mixture: the component of the record at each index, and its rank in that component's stream.

A mixture's indices 0, 1, 2, … are cut into segments, in each of which the weights stay the same; `turns.py`
says who is next there. A segment takes over the lags that the one before has left.

Exact: nothing here is a float but the weights that are given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from itertools import zip_longest
from types import MappingProxyType

import numpy as np

from edl_torch.core.permutation import MAX_SIZE, derive_key
from edl_torch.core.turns import Turns, turns_of
from edl_torch.errors import InvalidArgument
from edl_torch.shard import Component, DatasetSpec, IndexArray, MixtureSegment, MixtureWeights, Source

PERIOD = 1 << 16  # indices after which the rule repeats itself, where weights are not rounded to fewer parts
LONGEST = 1 << 20  # the same, where a weight is so small that it needs more
_FINEST = 1 << 52  # of a lag: what is finer is rounded, so that lags fit the wire
ENDLESS = MAX_SIZE  # the size of a mixture that nothing ends

# What the size of a mixture may follow from: the first whole pass over any component, one over each, or the
# `max_passes` of all that have weights.
FIRST_EXHAUSTED, ALL_EXHAUSTED, SPENT = "first_exhausted", "all_exhausted", "max_passes"
MOST_LIMITED = 64  # components with `max_passes`: each is a segment more
NO_LENGTHS: Mapping[str, float] = MappingProxyType({})
Limits = Sequence[int | None]  # records that each component gives at most


# Components ---------------------------------------------------------------------------------------------


def mixed_name(component: str, source: str) -> str:
    """Return the name of a component's source among those of a mixture."""
    return f"{component}:{source}"


def component_spec(component: Component, seed: int) -> DatasetSpec:
    """Return a component of a mixture as a dataset: its order in the mixture is its order by itself.

    Its seed follows from the mixture's and from its name.
    """
    own = {f.name: getattr(component, f.name) for f in fields(component)}
    del own["max_passes"], own["left"], own["mean_length"]
    return DatasetSpec(**own, seed=derive_key(seed, 0, f"component {component.name}"), num_epochs=0)


# Weights ------------------------------------------------------------------------------------------------


def parts_of(
    weights: Sequence[float | Fraction], names: Sequence[str] = (), lengths: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return weights as whole parts: the shares exactly, as decimals are, where 2**16 parts allow it.

    Else they are rounded to so many parts, or up to 2**20 where one of them would be none. With mean
    `lengths` the weights are of tokens, and the parts of records.

    Raises InvalidArgument for weights of which none is positive, one is negative or no number, and for one
    that is less than a part of 2**20.
    """
    called = [repr(name) for name in names] or [f"number {place}" for place in range(len(weights))]
    exact = _exact_all(weights, called)
    if any(lengths):
        exact = [each and each / Fraction(str(length)) for each, length in zip(exact, lengths, strict=True)]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period > PERIOD:
        period, least = PERIOD, min(share for share in shares if share)
        while period * least < 1:
            period *= 2
        if period > LONGEST:
            which, of = called[shares.index(least)], "records" if any(lengths) else "weights"
            raise InvalidArgument(
                f"the weight of {which} is {float(least):.2g} of all {of}, less than a record in a "
                f"million: give it 0, or {1 / LONGEST:.2g} of all or more"
            )
    return _rounded(shares, period)


def _exact_all(weights: Sequence[float | Fraction], called: Sequence[str]) -> list[Fraction]:
    exact = [_exact(weight, name) for weight, name in zip(weights, called, strict=True)]
    if not any(exact):
        raise InvalidArgument("weights are all 0: give one component at least a positive weight")
    return exact


def _exact(weight: float | Fraction, name: str) -> Fraction:
    try:
        found = weight if isinstance(weight, Fraction) else Fraction(str(weight))
    except (ValueError, ZeroDivisionError, TypeError):  # nan, inf, no number
        found = Fraction(-1)
    if found < 0 or isinstance(weight, bool):
        raise InvalidArgument(f"the weight of {name} is {weight!r}: give a number, 0 or more")
    return found


def weights_by_name(
    who: str, names: Sequence[str], weights: Mapping[str, float], *, left: Iterable[str] = ()
) -> list[Fraction]:
    """Return weights by the names of a mixture's components in their order, exactly.

    Those that have `left` have none. Raises InvalidArgument for weights of which none is positive, one is
    negative or no number, and where another component has none, or a name is of none.
    """
    weights = dict.fromkeys(left, 0.0) | dict(weights)
    missing = [name for name in names if name not in weights]
    unknown = [name for name in weights if name not in names]
    if missing or unknown:
        wrong = [f"{', '.join(missing)}: no weight"] * bool(missing)
        wrong += [f"{', '.join(map(str, unknown))}: no component"] * bool(unknown)
        raise InvalidArgument(
            f"{who} has the components {', '.join(names)}. {'; '.join(wrong)}. Give each a weight, 0 to "
            "leave it out"
        )
    if back := [name for name in left if weights[name]]:
        raise InvalidArgument(
            f"{', '.join(back)} has left {who}: give it no weight, and what comes back another name"
        )
    return _exact_all([weights[name] for name in names], [repr(name) for name in names])


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
        self._turns = tuple(known.get(segment) or turns_of(segment) for segment in self.all)

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


def begun(
    segments: Segments,
    changes: Iterable[MixtureWeights],
    *,
    number: int,
    key: str = "",
    limits: Limits = (),
    turn: int = 1,
) -> Segments:
    """Return the segments, with one more for each change, all of which lie after what `segments` has begun.

    A segment that a change begins takes over what the segments before it have come to. One that it takes the
    place of, before any record of it was lent, leaves no trace. Where a component has given all that its
    limit allows, a segment without it follows its last turn by itself, unless no other has a weight.
    Raises InvalidArgument for weights of components alone that have nothing left.
    """
    found = Segments(segments.all)
    changes = tuple(changes)
    for change, following in zip_longest(changes, changes[1:]):
        weights = _without_spent(found, change, limits)
        if not any(weights.parts):
            raise InvalidArgument(
                "these weights are of components alone that have had their max_passes: give another a weight"
            )
        found.learn([_next(found, weights, number, key, turn)])
        number += 1
        while (end := _spent_at(found, limits)) is not None and (following is None or end < following.start):
            weights = _without_spent(found, replace(weights, start=end), limits)
            if not any(weights.parts):
                break
            found.learn([_next(found, weights, number, "", turn)])
            number += 1
    return found


def _without_spent(segments: Segments, change: MixtureWeights, limits: Limits) -> MixtureWeights:
    """Weights without those of components that have given all that they may."""
    if not segments.all or not any(limits):
        return change
    counts = segments.counts(change.start).tolist()
    pairs = zip(change.parts, counts, limits, strict=True)
    parts = tuple(0 if limit is not None and count >= limit else part for part, count, limit in pairs)
    return replace(change, parts=parts)


def _spent_at(segments: Segments, limits: Limits) -> int | None:
    """The index at which the first component of the last segment has given all that it may."""
    last = segments.all[-1]
    ends = [
        segments.find(c, limit - 1)
        for c, limit in enumerate(limits)
        if limit is not None and last.parts[c] and limit > last.counts[c]
    ]
    return min((first_turn(end + 1, last.turn) for end in ends if end is not None), default=None)


def first_turn(index: int, turn: int) -> int:
    """Return the first index from this one on with which a turn of so many records begins."""
    return index + -index % turn


def _next(segments: Segments, change: MixtureWeights, number: int, key: str, turn: int) -> MixtureSegment:
    total = sum(change.parts)
    if not segments.all or not change.start:
        nothing = (0,) * len(change.parts)
        return MixtureSegment(
            number=number,
            start=change.start,
            parts=change.parts,
            counts=nothing,
            lags=nothing,
            scale=total,
            key=key,
            turn=turn,
        )
    turns = segments.turns_at(max(change.start - 1, segments.all[0].start))
    index = change.start - turns.segment.start
    scale = math.lcm(turns.segment.scale, total)
    before = [lag // turn for lag in turns.lags(index)]  # of turns: one begins there
    if any(lag and not part for lag, part in zip(before, change.parts, strict=True)):
        scale *= max(1, _FINEST // scale)  # what these let go is shared out
    if scale > _FINEST:
        scale = _FINEST - _FINEST % total
    lags = _settled(before, turns.segment.scale, scale, change.parts)
    return MixtureSegment(
        number=number,
        start=change.start,
        parts=change.parts,
        counts=tuple((np.array(turns.segment.counts, np.int64) + turns.counts(index)).tolist()),
        lags=lags,
        scale=scale,
        key=key,
        turn=turn,
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

    A turn begins there. Changes that were to come later are dropped; of segments stay those that records from
    index `oldest` on are in. Raises InvalidArgument for weights with which a mixture that ends by its
    components would never end.
    """
    known = Segments(spec.segments)
    changes = (MixtureWeights(start=index, parts=parts),) if parts else _from(spec.weights, index)
    segments = begun(known, changes, number=known.newest + 1, key=key, limits=_limits(spec), turn=spec.turn)
    first = index if oldest is None else oldest
    return _sized(replace(spec, segments=needed(segments, min(first, index))))


def alters(spec: DatasetSpec, index: int, parts: tuple[int, ...]) -> bool:
    """Return whether other records come than would anyway, with these weights from an index on."""
    known, limits = Segments(spec.segments), _limits(spec)
    change = MixtureWeights(start=index, parts=parts)
    if _without_spent(known, change, limits).parts != known.turns_at(index).segment.parts:
        return True
    later = [(one.start, one.parts) for one in known.all if one.start > index]
    then = begun(known, [change], number=0, limits=limits, turn=spec.turn).all if later else ()
    return later != [(one.start, one.parts) for one in then if one.start > index]


def _limits(spec: DatasetSpec) -> Limits:
    return [component.most for component in spec.components]


def restored(
    spec: DatasetSpec, segments: Sequence[MixtureSegment], mean_lengths: Mapping[str, float] = NO_LENGTHS
) -> DatasetSpec:
    """Return a mixture with the segments of a token, or without any its first ones. Their numbers are new.
    Components that have left have the mean lengths of the token.

    Raises InvalidArgument for segments that this mixture cannot have had.
    """
    spec = with_lengths_of_left(spec, mean_lengths)
    number = Segments(spec.segments).newest + 1
    if not segments:
        limits = _limits(spec)
        segments = begun(Segments(()), spec.weights, number=number, limits=limits, turn=spec.turn).all
        return _sized(replace(spec, segments=segments))
    for before, segment in zip((None, *segments), segments, strict=False):
        _check(spec, segment, before)
    numbered = (replace(segment, number=number + place) for place, segment in enumerate(segments))
    return _sized(replace(spec, segments=tuple(numbered)))


def widened(
    segments: Iterable[MixtureSegment], names: Sequence[str], wider: Sequence[str]
) -> tuple[MixtureSegment, ...]:
    """Return segments of a mixture of the components `names` as those of a `wider` one, in its order.

    What joins has no weight in them, has given nothing, and is owed nothing.
    """
    if list(names) == list(wider):
        return tuple(segments)
    places = [names.index(name) if name in names else None for name in wider]

    def of_all(each: tuple[int, ...]) -> tuple[int, ...]:
        if len(each) != len(names):
            raise InvalidArgument(f"a segment has {len(each)} components, and the mixture {len(names)}")
        return tuple(0 if place is None else each[place] for place in places)

    return tuple(
        replace(one, parts=of_all(one.parts), counts=of_all(one.counts), lags=of_all(one.lags))
        for one in segments
    )


def check_left(spec: DatasetSpec, runs: Iterable[tuple[int, int]]) -> None:
    """Raise InvalidArgument where indices without an outcome are of components that have left."""
    left = [c for c, component in enumerate(spec.components) if component.left]
    if not left:
        return
    segments = Segments(spec.segments)
    found = np.zeros(len(spec.components), np.int64)
    for first, after in runs:
        found += np.bincount(segments.at(first, after)[0], minlength=len(found))
    if waiting := [f"{found[c]:,} of {spec.components[c].name}" for c in left if found[c]]:
        raise InvalidArgument(
            f"mixture {spec.name!r} has records without an outcome of components that have left it: "
            f"{', '.join(waiting)}. Give these their data once more, with weight 0, until all that was lent "
            f"is trained on"
        )


def goes_on(
    weights: tuple[MixtureWeights, ...], mean_lengths: Mapping[str, float], spec: DatasetSpec
) -> bool:
    """Return whether a mixture's program gives the weights of then, to components as long as then."""
    there = [component for component in spec.components if not component.left]
    return weights == spec.weights and all(
        component.mean_length == mean_lengths.get(component.name, 0.0) for component in there
    )


def with_lengths_of_left(spec: DatasetSpec, mean_lengths: Mapping[str, float]) -> DatasetSpec:
    """Return a mixture whose components that have left have the mean lengths of then, unless known: their
    program does not say them any more."""
    if not spec.mean_lengths:  # its weights are of records now
        return spec
    components = tuple(
        replace(one, mean_length=mean_lengths.get(one.name, 0.0)) if one.left and not one.mean_length else one
        for one in spec.components
    )
    return replace(spec, components=components)


def is_due_of_left(spec: DatasetSpec, index: int) -> bool:
    """Return whether components that have left have a share from an index on."""
    now = Segments(spec.segments).turns_at(index).segment
    later = [one for one in spec.segments if one.start > index]
    left = [c for c, component in enumerate(spec.components) if component.left]
    return any(one.parts[c] for one in (now, *later) for c in left)


def heard_of(spec: DatasetSpec, segments: Sequence[MixtureSegment]) -> DatasetSpec:
    """Return a mixture with segments that are known of it from elsewhere."""
    return _sized(replace(spec, segments=tuple(segments)))


def _check(spec: DatasetSpec, segment: MixtureSegment, before: MixtureSegment | None) -> None:
    total = sum(segment.parts)
    sound = (
        len(segment.parts) == len(segment.counts) == len(segment.lags) == len(spec.components)
        and all(part >= 0 for part in segment.parts)
        and 0 < total <= LONGEST
        and segment.turn == spec.turn
        and all(count >= 0 and count % spec.turn == 0 for count in segment.counts)
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
        last = _last_of(Segments(spec.segments), _limits(spec))
        if last is not None and last < spec.size:
            wanted = str(spec.size) if spec.size < ENDLESS else "no end"
            raise InvalidArgument(
                f"mixture {spec.name!r} has {last} records, by the max_passes of its components with "
                f"weights, and is to have {wanted}: give num_records={last} or fewer, a component without "
                f"max_passes a weight, or max_passes to all and no num_records"
            )
        return spec
    sizes = [component.size for component in spec.components]
    segments = Segments(spec.segments)
    last = _last_of(segments, _limits(spec))
    size = last if spec.stops == SPENT else size_of(segments, sizes, spec.stops)
    if size is None or (last is not None and size > last):
        raise InvalidArgument(
            f"mixture {spec.name!r} ends when each component has had a whole pass, and some would get none: "
            f"give each a positive weight, or give num_records instead of stopping_strategy"
        )
    return replace(spec, sources=(Source(name="", count=size),))


def _last_of(segments: Segments, limits: Limits) -> int | None:
    """How many records there are where all components with weights have limits; else None."""
    last = segments.all[-1]
    if any(part and limit is None for part, limit in zip(last.parts, limits, strict=True)):
        return None
    return _spent_at(segments, limits)


def _from(weights: Sequence[MixtureWeights], index: int) -> tuple[MixtureWeights, ...]:
    """The changes of a schedule from an index on: that which holds there begins there."""
    now = [change for change in weights if change.start <= index][-1:]
    later = [change for change in weights if change.start > index]
    return (*(replace(change, start=index) for change in now), *later)


def needed(segments: Segments, index: int) -> tuple[MixtureSegment, ...]:
    """Return the segments without those that no record from an index on is in, but the one before them."""
    first = segments.turns_at(max(index - 1, segments.all[0].start)).segment.start
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
