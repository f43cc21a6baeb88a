"""Random schedules of a mixture's master, and what its trainers make of their leases.

Trainers come, die and read; weights change; the master is started again from its rows; the data go back to
tokens, on another master too, with a program that gives other weights. Programs that are edited have one
dataset more, later one less, which they register on the master that runs or bring to a new one. In half of
them a component has enough after some passes, and in two thirds components take turns of several records. A
book that shares no code with the package knows which record stands at each index, and what has an outcome.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from core_kit import Trainer
from test_mixture import Chairman

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    Failure,
    GiveBack,
    Grant,
    SetWeightsCall,
)
from edl_torch.core.changes import Changes
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import dump, load, update
from edl_torch.core.plan import Plan
from edl_torch.errors import DatasetConflict, StaleLease, TokenError
from edl_torch.shard import Component, MixtureSegment, MixtureWeights, Registration, Source

SIZES = {"a": 3, "b": 17, "c": 50, "d": 9, "e": 7}
JOINS, LEAVES = "e", "c"  # later, in this order
LIMITED, PASSES = "b", 3
BAD = "a", 1  # component and record: no pass can read it
SIZE = 900
Record = tuple[str, int, int]
Changed = list[tuple[int, tuple[int, ...], tuple[Fraction, ...]]]


class Plans:
    """Which record is at each index: weights by the index from which on they hold, and the lags of then."""

    def __init__(self, parts: tuple[int, ...], *, limited: bool, turn: int) -> None:
        self.turn = turn
        self.changes: Changed = [(0, whole(parts), (Fraction(0),) * len(SIZES))]
        self.limit = SIZES[LIMITED] * PASSES if limited else SIZE
        self.told: dict[int, tuple[Fraction, ...]] = {}  # by their start, lags of segments without a call

    def learn(self, segments: tuple[MixtureSegment, ...]) -> None:
        for one in segments:
            self.told[one.start] = whole(tuple(Fraction(lag, one.scale) for lag in one.lags))

    def change(self, segment: MixtureSegment, parts: tuple[int, ...]) -> None:
        parts, lags = whole(parts), whole(tuple(Fraction(lag, segment.scale) for lag in segment.lags))
        self.changes = [change for change in self.changes if change[0] < segment.start]
        self.changes.append((segment.start, parts, lags))

    def has_share(self, name: str, index: int) -> bool:
        """Whether weights that hold from an index on, or later, are of this one too."""
        now = [change for change in self.changes if change[0] <= index][-1:]
        later = [change for change in self.changes if change[0] > index]
        return any(parts[[*SIZES].index(name)] for _, parts, _ in (*now, *later))

    def records(self, size: int = SIZE) -> list[Record]:
        chairman, found = Chairman(len(SIZES)), []
        names = list(SIZES)
        b, now = names.index(LIMITED), self.changes[0][1]
        for index in range(0, size, self.turn):
            begins = [more for start, *more in self.changes if start == index]
            spent = chairman.counts[b] * self.turn >= self.limit
            if not begins and spent and chairman.shares[b]:
                begins = [(now, self.told[index])]
            for parts, lags in begins:
                now = parts
                chairman.weigh([0 if spent and c == b else part for c, part in enumerate(parts)])
                distances = [abs(lag - own) for lag, own in zip(lags, chairman.lags, strict=True)]
                assert max(distances) < Fraction(1, 1 << 40)
                chairman.lags = list(lags)  # rounded, records may be due in another order
            c = chairman.next()
            first, each = (chairman.counts[c] - 1) * self.turn, SIZES[names[c]]
            found += [(names[c], number // each, number % each) for number in range(first, first + self.turn)]
        return found[:size]


def whole(each: tuple[Any, ...]) -> tuple[Any, ...]:
    """With a place for the component that joins."""
    return (*each, *(0,) * (len(SIZES) - len(each)))


def registration(parts: tuple[int, ...], *, limited: bool, without: bool, turn: int) -> Registration:
    components = tuple(
        Component(name=name, sources=(), records_per_shard=1, shuffle_window=1, left=True)
        if without and name == LEAVES
        else Component(
            name=name,
            sources=(Source(name=name, count=size),),
            records_per_shard=5,
            shuffle_window=1,
            max_passes=PASSES if limited and name == LIMITED else 0,
        )
        for name, size in list(SIZES.items())[: len(parts)]
    )
    return Registration(
        name="m",
        sources=(Source(name="", count=SIZE),),
        records_per_shard=16,
        components=components,
        weights=(MixtureWeights(start=0, parts=parts),),
        turn=turn,
        max_bad_records=1,
    )


class Member(Trainer):
    """A trainer: what it knows of the order, and what it holds."""

    plan: Plan

    def __init__(self, master: Dispatcher, session: str) -> None:
        super().__init__(master, session)
        self.grants: dict[int, tuple[Grant, int]] = {}  # and the next position
        self.known: dict[str, int] = {}  # numbers of the last calls that it was answered


class Job:
    """The master, its trainers, and the book."""

    def __init__(self, seed: int) -> None:
        self.noise = random.Random(seed)
        self.limited = seed % 2 == 1
        self.turn = (1, 4, 8)[seed % 3]
        self.names = [name for name in SIZES if name != JOINS]
        self.without = False  # the one that leaves
        self.given = self.parts()
        self.book = Plans(self.given, limited=self.limited, turn=self.turn)
        self.done: dict[int, Record] = {}  # by index
        self.members: list[Member] = []
        self.numbers = 0
        self.tokens: list[
            tuple[str, list[tuple[int, tuple[int, ...]]], dict[int, Record], tuple[int, ...], bool]
        ] = []
        self.rows: dict[Any, Any] = {}
        self.changes = Changes()
        self.master = Dispatcher(ledger_id="L1", changes=self.changes)
        self.join()

    def parts(self) -> tuple[int, ...]:
        while True:
            parts = tuple(
                0 if self.without and name == LEAVES else self.noise.choice((0, 1, 2, 5, 13))
                for name in self.names
            )
            b = self.names.index(LIMITED)
            if sum(parts) > parts[b]:
                return parts

    def join(self) -> None:
        self.numbers += 1
        member = Member(self.master, f"s{self.numbers}")
        answer = member.register(
            registration(self.given, limited=self.limited, without=self.without, turn=self.turn)
        )
        self.book.learn(answer.spec.segments)
        member.plan = Plan(answer.spec)
        self.members.append(member)

    def die(self) -> None:
        if len(self.members) > 1:
            gone = self.members.pop(self.noise.randrange(len(self.members)))
            self.master.leave(gone.session, gone.member)

    def edit(self) -> None:
        """All trainers end, and go on with a program that has other components."""
        before = self.names, self.without, self.given
        if self.names != list(SIZES):
            self.names = list(SIZES)
        elif not self.without:
            self.without = True
        else:
            return
        for member in self.members:
            self.master.leave(member.session, member.member)
        self.members.clear()
        self.given = self.parts()
        ledger = self.master.find_ledger("m")
        assert ledger is not None
        index = self.turn_from(ledger.backlog.passed)
        if self.without and self.has_open(LEAVES, index):
            with pytest.raises(DatasetConflict, match=f"of {LEAVES}. Give these their data once more"):
                self.join()
            self.names, self.without, self.given = before
        self.join()
        if index < SIZE and (
            self.given != before[2] or (self.without and self.book.has_share(LEAVES, index))
        ):
            self.book.change(self.segment_at(index), self.given)

    def turn_from(self, index: int) -> int:
        return -(-index // self.turn) * self.turn

    def has_open(self, name: str, index: int) -> bool:
        records = self.book.records(min(index, SIZE))
        return any(i not in self.done and record[0] == name for i, record in enumerate(records))

    def segment_at(self, index: int) -> MixtureSegment:
        segments = self.master.find_ledger("m").spec.segments  # type: ignore[union-attr]
        (found,) = (one for one in segments if one.start == index)
        return found

    def lease(self) -> None:
        member = self.noise.choice(self.members)
        epoch, segment = NEW_PASS if self.finished else 0, member.plan.newest_segment
        count = self.noise.choice((1, 1, 3))
        call = member.lease_call("m", count, epoch=epoch, segment=segment, **member.known)
        answer = self.master.lease(call, 0.0)
        if self.noise.random() < 0.2:  # the answer was lost
            assert self.master.lease(call, 0.0) == answer
        member.known["asked"] = call.request
        member.plan.learn(answer.segments)
        self.book.learn(answer.segments)
        for grant in answer.grants:
            _, end = member.plan.indices_of(grant.slice)
            assert end == self.turn_from(end) or end == SIZE  # whatever was given back in the middle of one
            member.grants[grant.task] = grant, grant.slice.skip

    @property
    def finished(self) -> bool:
        return bool(self.master.dataset_status("m").finished)

    def train(self) -> None:
        member = self.noise.choice(self.members)
        if not member.grants:
            return
        task = self.noise.choice(list(member.grants))
        grant, position = member.grants[task]
        upto = min(position + 4, grant.slice.stop)
        indices = member.plan.indices(replace(grant.slice, skip=position, limit=upto - position))
        assert indices.passes is not None
        named = {"task": task, "attempt": grant.attempt}
        each = [
            (place, (name.partition(":")[0], n) == BAD) for place, (name, n) in enumerate(indices, position)
        ]
        outcomes = [
            Failure(**named, position=place, reason="torn")
            if is_bad
            else Acknowledgement(**named, start=place, upto=place + 1)
            for place, is_bad in each
        ]
        call = member.report_call(*outcomes, dataset="m", **member.known)
        assert not self.master.report(call, 0.0).stale
        if self.noise.random() < 0.2:  # the answer was lost
            assert not self.master.report(call, 0.0).stale
        member.known["reported"] = call.request
        first, _ = member.plan.indices_of(replace(grant.slice, skip=position, limit=upto - position))
        for index, (name, number), turn in zip(
            range(first, SIZE), indices, indices.passes.tolist(), strict=False
        ):
            assert index not in self.done
            self.done[index] = name.partition(":")[0], turn, number
        member.grants[task] = grant, upto
        if upto == grant.slice.stop:
            del member.grants[task]

    def give_back(self) -> None:
        member = self.noise.choice(self.members)
        if member.grants:
            task, (grant, position) = member.grants.popitem()
            back = GiveBack(task=task, attempt=grant.attempt, start=position)
            call = member.report_call(back, dataset="m", **member.known)
            self.master.report(call, 0.0)
            member.known["reported"] = call.request

    def reweigh(self) -> None:
        status = self.master.dataset_status("m")
        if status.todo == 0 or self.finished:
            return
        parts = self.parts()
        call = SetWeightsCall(
            dataset="m",
            ledger=status.ledger,
            lineage=status.lineage,
            replaces=status.segment,
            key=str(self.noise.random()),
            weights={name: float(part) for name, part in zip(self.names, parts, strict=True)},
        )
        passed = self.master.find_ledger("m").backlog.passed  # type: ignore[union-attr]
        if self.turn_from(passed) >= SIZE:
            segment = self.master.set_weights(replace(call, weights=call.weights | {"a": 77.0}), 0.0)
            assert segment.start == SIZE
            assert self.master.dataset_status("m").segment == status.segment
            return
        segment = self.master.set_weights(call, 0.0)
        assert self.master.set_weights(call, 0.0) == segment
        has_changed = segment.key == call.key
        if has_changed:
            self.book.change(segment, parts)
        others = [part for name, part in zip(self.names, parts, strict=True) if name != LIMITED and part]
        if has_changed and len(others) > 1:
            with pytest.raises(StaleLease):
                self.master.set_weights(replace(call, key="late", weights=call.weights | {"a": 77.0}), 0.0)

    def write(self) -> None:
        for key, row in update(self.master, self.changes.take()).items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = json.loads(json.dumps(row))

    def start_again(self) -> None:
        self.write()
        whole = {key: json.loads(json.dumps(row)) for key, row in dump(self.master).items()}
        assert self.rows == whole
        self.master = load(self.rows, ledger_id=self.master.ledger_id, now=0.0, changes=self.changes)

    def snapshot(self) -> None:
        member = self.noise.choice(self.members)
        token = self.master.snapshot(member.call("m", **member.known), 0.0)
        self.tokens.append((token, list(self.book.changes), dict(self.done), self.given, self.without))

    def go_back(self) -> None:
        if not self.tokens:
            return
        token, changes, done, given, without = self.noise.choice(self.tokens)
        elsewhere = self.noise.random() < 0.5
        if len(given) > len(self.names) or without > self.without:  # the master here does not know of it
            elsewhere = True
        if elsewhere:  # a new master, and a program that may have been edited
            self.names = list(SIZES)[: len(given)]
            self.without = without
            if self.noise.random() < 0.5:
                self.names = list(SIZES)
                self.without = without or self.noise.random() < 0.5
            fits = len(given) == len(self.names) and not (self.without and given[[*SIZES].index(LEAVES)])
            same = given if fits else self.parts()
            self.given = self.noise.choice((same, self.parts()))
            self.start_anew()
        call = self.members[0].restore_call(token, "m", **self.members[0].known)
        epoch, shard, offset = json.loads(token)["cursor"]
        index = self.turn_from(SIZE if epoch else 16 * shard + offset)
        now = self.book.changes, self.done
        self.book.changes, self.done = list(changes), dict(done)
        if self.without and self.has_open(LEAVES, index):
            with pytest.raises(TokenError, match=f"of {LEAVES}. Give these their data once more"):
                self.master.restore(call, 0.0)
            if not elsewhere:
                self.book.changes, self.done = now
                return
            self.without, self.given = False, self.parts()  # it is given its data again
            self.start_anew()
            call = self.members[0].restore_call(token, "m", **self.members[0].known)
        lineage = self.master.restore(call, 0.0)
        if index < SIZE and (self.given != given or (self.without and self.book.has_share(LEAVES, index))):
            self.book.change(self.segment_at(index), self.given)
        for member in self.members:  # those that do not start anew are refused
            member.fence = replace(member.fence, lineage=lineage)
            member.grants.clear()
            member.known.clear()

    def start_anew(self) -> None:
        """On a master that knows nothing."""
        self.members.clear()
        self.rows, self.changes = {}, Changes()
        self.master = Dispatcher(ledger_id=f"L{self.noise.random()}", changes=self.changes)
        self.join()

    def run(self, events: int) -> None:
        acts = (
            *(self.lease,) * 8,
            *(self.train,) * 14,
            *(self.join, self.die, self.give_back, self.reweigh, self.start_again, self.snapshot),
        )
        for _ in range(events):
            self.noise.choice(acts)()
            if self.noise.random() < 0.01:
                self.go_back()
            if self.noise.random() < 0.01:
                self.edit()
        while not self.finished:
            for act in (self.lease, self.train, self.train):
                act()
            if self.noise.random() < 0.02:
                self.reweigh()


SEEDS = [*range(12), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 300))]


@pytest.mark.parametrize("seed", SEEDS)
def test_each_record_of_the_plan_has_one_outcome_whatever_happens(seed: int) -> None:
    job = Job(seed)
    job.run(400)
    assert list(map(job.done.get, range(SIZE))) == job.book.records()
    status, ledger = job.master.dataset_status("m"), job.master.find_ledger("m")
    assert ledger is not None
    met = sorted(turn for name, turn, number in job.done.values() if (name, number) == BAD)
    assert (status.acknowledged, status.quarantined) == (SIZE - len(met), len(met))
    assert [sorted(turn for run in bad.runs() for turn in range(*run)) for bad in ledger.quarantine] == [met][
        : len(met)
    ]
    done = Counter(name for name, _, _ in job.done.values())
    assert {one.name: one.given for one in status.components} == {name: done[name] for name in job.names}
    assert not any(one.open for one in status.components)
