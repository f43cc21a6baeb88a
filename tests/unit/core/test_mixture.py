"""The order of a mixture against the rule that it is defined by, record by record, in exact fractions."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from cases import cases
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core.mixture import (
    LONGEST,
    PERIOD,
    Segments,
    begun,
    needed,
    parts_of,
    restored,
    reweighed,
)
from edl_torch.core.permutation import MAX_SIZE
from edl_torch.core.plan import Plan, component_spec
from edl_torch.core.registration import identity, new_spec
from edl_torch.core.token import Token
from edl_torch.core.turns import Turns
from edl_torch.errors import InvalidArgument, TokenError
from edl_torch.fingerprint import Fingerprint
from edl_torch.shard import (
    Component,
    DatasetSpec,
    MixtureSegment,
    MixtureWeights,
    Registration,
    Slice,
    Source,
)


class Chairman:
    """The rule as it is told: the largest lag of those that are due now, else of the components whose lag
    stays above -1 the one that is due first.

    Slow, and shares no code with the package: a list of fractions.
    """

    def __init__(self, components: int) -> None:
        self.counts = [0] * components
        self.lags = [Fraction(0)] * components
        self.shares = [Fraction(0)] * components

    def weigh(self, parts: Sequence[int]) -> None:
        """Go on with other weights. Who leaves takes no lag along: others give up as much of theirs."""
        self.shares = [Fraction(part, sum(parts)) for part in parts]
        gone = sum(lag for lag, part in zip(self.lags, parts, strict=True) if not part)
        self.lags = [lag if part else Fraction(0) for lag, part in zip(self.lags, parts, strict=True)]
        if gone:
            sign = -1 if gone > 0 else 1  # what is left adds up to -gone
            whole = sum(lag * sign for lag in self.lags if lag * sign > 0)
            self.lags = [lag * (1 - abs(gone) / whole) if lag * sign > 0 else lag for lag in self.lags]

    def next(self) -> int:
        """Return whose turn it is."""
        due = {
            c: math.ceil((1 - self.lags[c]) / share)
            for c, share in enumerate(self.shares)
            if share and self.lags[c] + share - 1 > -1
        }
        self.lags = [lag + share for lag, share in zip(self.lags, self.shares, strict=True)]
        now = [c for c, turn in due.items() if turn <= 1]
        chosen = max(now, key=lambda c: (self.lags[c], -c)) if now else min(due, key=lambda c: (due[c], c))
        self.lags[chosen] -= 1
        self.counts[chosen] += 1
        return chosen


def order_of(parts: Sequence[int], start: int = 0) -> Segments:
    return begun(Segments([]), [MixtureWeights(start=start, parts=tuple(parts))], number=1)


PARTS = st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any)


@given(PARTS, st.integers(0, 200))
def test_the_turns_are_those_of_the_rule(parts: list[int], start: int) -> None:
    chairman = Chairman(len(parts))
    chairman.weigh(parts)
    told = [chairman.next() for _ in range(start + 150)]
    components, numbers = order_of(parts).at(start, start + 150)
    assert components.tolist() == told[start:]
    seen = [told[: start + place].count(c) for place, c in enumerate(told[start:])]
    assert numbers.tolist() == seen


CHANGES = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any)), max_size=6
)


@given(st.lists(st.integers(0, 9), min_size=4, max_size=4).filter(any), CHANGES)
def test_segments_take_over_what_the_rule_has_come_to(
    parts: list[int], changes: list[tuple[int, list[int]]]
) -> None:
    chairman, segments, told = Chairman(4), order_of(parts), []
    chairman.weigh(parts)
    for number, (after, new) in enumerate(changes, 2):
        told += [chairman.next() for _ in range(after)]
        segments = begun(segments, [MixtureWeights(start=len(told), parts=tuple(new))], number=number)
        chairman.weigh(new)
        lags = segments.lags(len(told))
        assert sum(lags) == 0
        distances = [abs(lag - own) for lag, own in zip(lags, chairman.lags, strict=True)]
        assert max(distances) < Fraction(1, 1 << 40)
        chairman.lags = list(lags)  # rounded, they may be due in another order
    told += [chairman.next() for _ in range(100)]
    assert segments.at(0, len(told))[0].tolist() == told
    assert segments.counts(len(told)).tolist() == chairman.counts


LIMITS = st.one_of(st.none(), st.integers(1, 40))
LIMITED = st.lists(LIMITS, min_size=4, max_size=4).map(lambda each: [None, *each])


@given(st.lists(st.integers(0, 9), min_size=4, max_size=4), CHANGES, LIMITED)
def test_a_component_with_a_limit_gives_so_many_records_and_no_more(
    parts: list[int], changes: list[tuple[int, list[int]]], limits: list[int | None]
) -> None:
    """The first one has none, and always a weight."""
    chairman, told, now = Chairman(5), [], (1, *parts)

    def left(new: Sequence[int]) -> list[int]:
        spent = [
            limit is not None and count >= limit for limit, count in zip(limits, chairman.counts, strict=True)
        ]
        return [0 if gone else part for gone, part in zip(spent, new, strict=True)]

    def until(index: int) -> None:
        while len(told) < index:
            told.append(chairman.next())
            if limits[told[-1]] == chairman.counts[told[-1]]:
                chairman.weigh(left(now))
                begins.append(len(told))
                known = segments.lags(len(told))
                distances = [abs(lag - own) for lag, own in zip(known, chairman.lags, strict=True)]
                assert max(distances) < Fraction(1, 1 << 40)
                chairman.lags = list(known)  # rounded, they may be due in another order

    begins = [0]
    segments = begun(Segments([]), [MixtureWeights(start=0, parts=now)], number=1, limits=limits)
    chairman.weigh(left(now))
    for after, new in changes:
        until(len(told) + after)
        now = (1, *new)
        change = MixtureWeights(start=len(told), parts=now)
        segments = begun(segments, [change], number=segments.newest + 1, limits=limits)
        if begins[-1] == len(told):  # it takes the place of one that nobody was in: go back to before it
            return
        begins.append(len(told))
        chairman.weigh(left(now))
        chairman.lags = list(segments.lags(len(told)))
    until(len(told) + 200)
    assert segments.at(0, len(told))[0].tolist() == told
    assert [one.start for one in segments.all if one.start <= len(told)] == begins


def shares_of(number: int) -> list[float]:
    noise = random.Random(number)
    return [noise.random() ** 2 + 0.001 for _ in range(number)]


@pytest.mark.parametrize("number", [1, 2, 3, 5, 17, 100, 1000])
def test_at_every_prefix_each_component_is_within_one_record_of_its_share(number: int) -> None:
    parts = parts_of(shares_of(number))
    total = sum(parts)
    counts = np.zeros(number, np.int64)
    ideal, weights = np.zeros(number, np.int64), np.array(parts, np.int64)
    for index, chosen in enumerate(order_of(parts).at(0, 20_000)[0].tolist()):
        ideal += weights
        counts[chosen] += 1
        assert np.abs(ideal - counts * total).max() < total, index


@pytest.mark.parametrize("number", [2, 5, 100, 1000])
def test_any_index_is_found_without_those_before_it(number: int) -> None:
    parts = parts_of(shares_of(number))
    segments, total = order_of(parts), sum(parts)
    far = 10**12 * total
    near, behind = segments.at(70, 90), segments.at(far + 70, far + 90)
    assert (near[0] == behind[0]).all()
    weights = np.array(parts, np.int64)
    assert (behind[1] - near[1] == 10**12 * weights[near[0]]).all()
    assert (segments.counts(far) == 10**12 * weights).all()
    for c in (0, number - 1):
        index = segments.find(c, 10**12 * parts[c] + 3)
        assert index is not None
        found, numbers = segments.at(index, index + 1)
        assert (found[0], numbers[0]) == (c, 10**12 * parts[c] + 3)


def lags_of(number: int, seed: int) -> Iterator[Segments]:
    """Segments of a mixture whose weights change often, some of them to nothing."""
    noise = random.Random(seed)
    segments, index = order_of(parts_of([noise.random() + 0.01 for _ in range(number)])), 0
    for change in range(2, 60):
        index += noise.choice((1, 2, 7, 50, 1000))
        shares = [
            noise.choice((0.0, noise.random() + 0.01, noise.random() ** 3 + 0.01)) for _ in range(number)
        ]
        if any(shares):
            segments = begun(segments, [MixtureWeights(start=index, parts=parts_of(shares))], number=change)
            yield segments


def most_owed(components: int) -> float:
    """What no lag reaches, however weights change: see docs/decisions/0061."""
    return sum(1 / k for k in range(1, (components + 1) // 2 + 1))


@cases("seed", range(5), range(20))
def test_lags_stay_within_what_is_proven_however_weights_change(seed: int) -> None:
    number = 2 + seed % 9
    for segments in lags_of(number, seed):
        start = segments.all[-1].start
        for index in range(start, start + 40):
            lags = segments.lags(index)
            assert sum(lags) == 0
            assert min(lags) > -1
            assert max(lags) < most_owed(number)


def against(number: int, segments: Segments, at: int, changes: Sequence[tuple[int, list[int]]]) -> Segments:
    """Change weights as somebody would who wants one component to be owed much: all weight to some."""
    for records, favoured in changes:
        parts = [1] * number
        for c in favoured:
            parts[c] = (PERIOD - number) // len(favoured)
        newest = segments.newest
        segments = begun(segments, [MixtureWeights(start=at, parts=tuple(parts))], number=newest + 1)
        at += records
    return segments


@pytest.mark.parametrize("number", [4, 16, 64])
def test_changes_that_are_made_to_starve_a_component_reach_what_no_rule_avoids_and_no_more(
    number: int,
) -> None:
    """Give all weight to those that were not drawn: after n - 1 of such changes one is owed 1/n + … + 1/2."""
    segments = order_of([1] * number)
    left, at = list(range(number)), 0
    while len(left) > 1:
        segments = against(number, segments, at, [(1, left)])
        drawn = int(segments.at(at, at + 1)[0][0])
        left = [c for c in left if c != drawn]
        at += 1
    worst = max(segments.lags(at))
    assert worst > sum(1 / k for k in range(2, number + 1)) - 0.1
    assert worst < most_owed(number)


def test_a_heavy_component_does_not_wait_for_many_light_ones_that_are_late() -> None:
    """By due dates alone it would: theirs lie far back, and it would be short of 20 records and more."""
    number = 200
    segments = order_of([1] * number)
    halves = [c for c in range(number) if c not in set(segments.at(0, 100)[0].tolist())]
    segments = against(number, segments, 100, [(50, halves)])
    quarter = [c for c in halves if segments.lags(150)[c] > 0.9]
    segments = against(number, segments, 150, [(25, quarter), (0, [0])])
    late = [lag for lag in segments.lags(175) if lag > 1]
    assert len(late) > 20
    for index in range(175, 275):
        assert max(segments.lags(index)) < most_owed(number)


def test_a_table_repeats_itself_from_its_second_round_on_whatever_lags_it_begins_with() -> None:
    for seed in range(200):
        noise = random.Random(seed)
        parts = tuple(noise.randint(1, 9) for _ in range(noise.randint(2, 7)))
        total, scale = sum(parts), sum(parts) * noise.randint(1, 5)
        lags = [noise.randint(1 - scale, scale - 1) for _ in parts]
        while over := sum(lags):
            c = noise.randrange(len(lags))
            lags[c] = min(max(lags[c] - over, 1 - scale), scale - 1)
        nothing = (0,) * len(parts)
        segment = MixtureSegment(
            number=1, start=0, parts=parts, counts=nothing, lags=tuple(lags), scale=scale, turn=1
        )
        turns = Turns(segment)
        period = total // math.gcd(*parts)
        first, second = (turns.at(begin, begin + period)[0] for begin in (period, 5 * period))
        assert (first == second).all()
        assert turns.lags(period) == turns.lags(10**6 * period)


def test_sources_that_are_small_are_drawn_however_often_weights_change() -> None:
    number = 1000
    segments = order_of(parts_of(shares_of(number)))
    for change in range(1, 25):
        shares = shares_of(number)
        random.Random(change).shuffle(shares)
        segments = begun(
            segments, [MixtureWeights(start=change * 50, parts=parts_of(shares))], number=change + 1
        )
    index = 1300
    wanted = [
        float(count + lag) for count, lag in zip(segments.counts(index), segments.lags(index), strict=True)
    ]
    counts = segments.counts(index).tolist()
    assert all(abs(want - count) < 2 for want, count in zip(wanted, counts, strict=True))
    assert not [c for c in range(number) if wanted[c] >= 2 and not counts[c]]


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([0.6, 0.2, 0.1, 0.05, 0.05], (12, 4, 2, 1, 1)),
        ([60, 20, 10, 5, 5], (12, 4, 2, 1, 1)),
        ([0.1, 0.2], (1, 2)),
        ([1, 0], (1, 0)),
        ([Fraction(1, 3), Fraction(2, 3)], (1, 2)),
    ],
)
def test_decimals_are_exact(weights: list[float], parts: tuple[int, ...]) -> None:
    assert parts_of(weights) == parts


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=50))
def test_other_weights_are_rounded_to_parts_of_which_none_is_nothing(weights: list[float]) -> None:
    parts = parts_of(weights)
    total = sum(parts)
    assert all(parts)
    assert total <= LONGEST
    if total == PERIOD:
        least = sum(map(Fraction, map(str, weights)))
        ideal = [Fraction(str(weight)) / least * total for weight in weights]
        raised = sum(one < 1 for one in ideal)
        assert all(abs(part - one) < 1 + raised for part, one in zip(parts, ideal, strict=True))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([0, 0], "all 0"),
        ([1, -1], "'b' is -1"),
        ([1, math.nan], "'b' is nan"),
        ([math.inf, 1], "'a' is inf"),
        ([1, True], "'b' is True"),
        (["x", 1], "'a' is 'x'"),
        ([1, 1e-9], "'b' is 1e-09 of all weights"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: list[float], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        parts_of(weights, ["a", "b"])


# Records ------------------------------------------------------------------------------------------------


def component(name: str, *counts: int, **order: object) -> Component:
    sources = tuple(Source(name=f"/data/{name}/{n}", start=n, count=count) for n, count in enumerate(counts))
    return Component(name=name, sources=sources, records_per_shard=4, **{"shuffle_window": 1, **order})  # type: ignore[arg-type]


KINDS = [
    {},
    {"shuffle": True},
    {"shuffle_shards": True},
    {"shuffle_shards": True, "shuffle_in_shard": True},
    {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": 3},
]


def mixture(size: int = MAX_SIZE, **more: object) -> DatasetSpec:
    components = tuple(component(f"c{n}", 5, 7 + n, 3, **kind) for n, kind in enumerate(KINDS))
    weights = (MixtureWeights(start=0, parts=(5, 4, 3, 2, 1)),)
    made = {"components": components, "weights": weights, "stops": "", "seed": 3, "records_per_shard": 16}
    return new_spec(
        Registration(name="mixed", sources=(Source(name="", count=size),), **{**made, **more}),  # type: ignore[arg-type]
        batch_size=4,
    )


def test_each_pass_over_a_component_is_a_permutation_of_its_own() -> None:
    spec = mixture(600)
    plan = Plan(spec)
    found = [
        plan.indices(Slice(epoch=0, shard=shard, skip=0, limit=plan.length(shard)))
        for shard in range(plan.num_shards)
    ]
    records: dict[str, dict[int, list[tuple[str, int]]]] = {}
    for part in found:
        assert part.passes is not None
        for (name, index), number in zip(part, part.passes.tolist(), strict=True):
            owner, _, source = name.partition(":")
            records.setdefault(owner, {}).setdefault(number, []).append((source, index))
    orders = set()
    for one in spec.components:
        everything = sorted((s.name, n) for s in one.sources for n in range(s.start, s.start + s.count))
        passes = records[one.name]
        assert list(passes) == list(range(len(passes)))
        for number, of_it in passes.items():
            is_last = number == len(passes) - 1
            assert len(set(of_it)) == len(of_it)
            assert is_last or sorted(of_it) == everything
            # The order is that of the component by itself.
            own = Plan(component_spec(one, spec.seed))
            run = [
                record
                for _, some in own.stream(number * one.size, number * one.size + len(of_it))
                for record in some
            ]
            assert run == of_it
        orders.add(tuple(map(tuple, passes.values())))
    assert len(orders) == len(spec.components)


def test_a_record_is_located_where_its_slice_has_it() -> None:
    plan = Plan(mixture())
    cut = Slice(epoch=0, shard=10**12, skip=3, limit=9)
    indices = plan.indices(cut)
    assert [plan.locate(0, cut.shard, position) for position in range(3, 12)] == list(indices)
    assert list(plan.shard(cut).indices()) == list(indices)


@pytest.mark.parametrize(("stops", "choose"), [("first_exhausted", min), ("all_exhausted", max)])
def test_a_mixture_ends_with_the_passes_over_its_components(stops: str, choose: object) -> None:
    spec = mixture(stops=stops)
    chairman = Chairman(5)
    chairman.weigh((5, 4, 3, 2, 1))
    ends: dict[int, int] = {}
    for index in range(2000):
        c = chairman.next()
        if chairman.counts[c] == spec.components[c].size:
            ends[c] = index + 1
    assert spec.size == choose(ends.values())  # type: ignore[operator]
    assert spec.num_epochs == 1
    later = reweighed(spec, 10, (1, 1, 1, 1, 1))
    chairman = Chairman(5)
    chairman.weigh((5, 4, 3, 2, 1))
    ends = {}
    for index in range(2000):
        if index == 10:
            chairman.weigh((1,) * 5)
        c = chairman.next()
        if chairman.counts[c] == spec.components[c].size:
            ends[c] = index + 1
    assert later.size == choose(ends.values())  # type: ignore[operator]


def test_a_token_of_a_thousand_components_is_small_and_says_all() -> None:
    components = tuple(
        replace(
            component(f"source-{n:04}", 5 + n % 90, 7),
            fingerprint=Fingerprint.of("sampled", [(f"/{n}/0", f"{n:032x}"), ("1", f"{n:032x}")]).encode(),
            max_passes=n % 2 * (n < 20),
        )
        for n in range(1000)
    )
    parts = tuple(1 + n % 65 for n in range(1000))
    spec = mixture(components=components, weights=(MixtureWeights(start=0, parts=parts),))
    token = Token(identity=identity(spec), weights=spec.weights, segments=spec.segments[:1])
    text = token.encode()
    assert len(text) < 100_000
    assert Token.decode(text) == token
    told = json.loads(text)
    for wrong in ("x", "eAE=", told["identity"]["components"][:-8], 7, {}):
        told["identity"]["components"] = wrong
        with pytest.raises(TokenError, match="not a data token"):
            Token.decode(json.dumps(told))


@pytest.mark.parametrize(
    "wrong", [7, "ab", [1.0], [1.0, 2, 3.0, 4.0, 5.0], [math.nan] * 5, [math.inf] * 5, [-1.0] * 5]
)
def test_a_token_has_the_mean_length_of_each_component_that_has_one(wrong: Any) -> None:
    spec = mixture(600)
    means = {"c1": 40.5, "c3": 1e-3}
    token = Token(identity=identity(spec), weights=spec.weights, mean_lengths=means, segments=spec.segments)
    told = json.loads(token.encode())
    assert told["mean_lengths"] == [0, 40.5, 0, 1e-3, 0]
    assert Token.decode(token.encode()).mean_lengths == means
    with pytest.raises(TokenError, match="not a data token"):
        Token.decode(json.dumps(told | {"mean_lengths": wrong}))


def test_weights_with_which_it_would_never_end_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="some would get none"):
        reweighed(mixture(stops="all_exhausted"), 10, (1, 1, 1, 1, 0))
    assert reweighed(mixture(stops="first_exhausted"), 10, (1, 0, 0, 0, 0)).size < MAX_SIZE


def test_only_segments_that_records_are_in_are_kept() -> None:
    spec = mixture()
    for index in (100, 200, 300):
        spec = reweighed(spec, index, (1, 1, 1, 1, index), oldest=max(0, index - 150))
    assert [segment.start for segment in spec.segments] == [100, 200, 300]
    kept = Segments(spec.segments)
    whole = Segments(
        reweighed(
            reweighed(mixture(), 100, (1, 1, 1, 1, 100), oldest=0), 200, (1, 1, 1, 1, 200), oldest=0
        ).segments
    )
    assert (kept.at(150, 290)[0] == whole.at(150, 290)[0]).all()
    assert needed(kept, 250) == spec.segments[1:]
    with pytest.raises(InvalidArgument, match="older weights"):
        kept.at(99, 101)


def test_a_change_takes_the_place_of_those_that_were_to_come() -> None:
    later = (MixtureWeights(start=0, parts=(1,) * 5), MixtureWeights(start=1000, parts=(2, 1, 1, 1, 1)))
    spec = mixture(weights=later)
    assert [segment.start for segment in spec.segments] == [0, 1000]
    changed = reweighed(spec, 500, (1, 2, 1, 1, 1), oldest=0)
    assert [segment.start for segment in changed.segments] == [0, 500]
    assert [segment.number for segment in changed.segments] == [1, 3]


def test_weights_that_are_taken_back_before_a_record_of_them_was_lent_leave_no_trace() -> None:
    spec = reweighed(mixture(), 101, (1, 1, 1, 1, 1))
    once = reweighed(spec, 203, (1, 2, 3, 4, 5))
    mistaken = reweighed(spec, 203, (1, 0, 0, 0, 0))
    assert any(mistaken.segments[0].lags) or any(once.segments[-1].lags)
    twice = reweighed(mistaken, 203, (1, 2, 3, 4, 5)).segments[-1]
    assert replace(twice, number=0) == replace(once.segments[-1], number=0)
    whole = reweighed(reweighed(mixture(), 0, (1, 0, 0, 0, 0)), 0, (5, 4, 3, 2, 1))
    assert not any(whole.segments[-1].lags)


def test_segments_of_a_token_get_new_numbers_and_are_looked_at() -> None:
    spec = reweighed(mixture(), 100, (1, 1, 1, 1, 6), oldest=0)
    again = restored(spec, spec.segments)
    assert [segment.number for segment in again.segments] == [3, 4]
    last = spec.segments[-1]
    for wrong in (
        {"parts": (1, 1, 1, 1)},
        {"parts": (0,) * 5},
        {"parts": (1, 1, 1, 1, -1)},
        {"counts": (1, 2, 3, 4, 5)},
        {"lags": (1, 0, 0, 0, 0)},
        {"scale": 7},
        {"start": 0},
    ):
        with pytest.raises(InvalidArgument, match="is none of mixture"):
            restored(spec, (spec.segments[0], replace(last, **wrong)))  # type: ignore[arg-type]
