"""Random schedules of a mixture's master, and what its trainers make of their leases.

Trainers come, die and read; weights change; the master is started again from its rows; the data go back to
tokens, on another master too, with a program that gives other weights. A book that shares no code with the
package knows which record stands at each index, and what has an outcome.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import pytest
from test_mixture import Chairman

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    GiveBack,
    Grant,
    LeaseCall,
    RegisterCall,
    ReportCall,
    RestoreCall,
    SetWeightsCall,
    SnapshotCall,
)
from edl_torch.core.changes import Changes
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import dump, load, update
from edl_torch.core.plan import Plan
from edl_torch.errors import InvalidArgument, StaleLease
from edl_torch.shard import Component, MixtureSegment, MixtureWeights, Registration, Source

SIZES = {"a": 3, "b": 17, "c": 50, "d": 9}
SIZE = 900
Record = tuple[str, int, int]
Changed = list[tuple[int, tuple[int, ...], tuple[Fraction, ...]]]


class Plans:
    """Which record is at each index: weights by the index from which on they hold, and the lags of then."""

    def __init__(self, parts: tuple[int, ...]) -> None:
        self.changes: Changed = [(0, parts, (Fraction(0),) * len(SIZES))]

    def change(self, segment: MixtureSegment, parts: tuple[int, ...]) -> None:
        lags = tuple(Fraction(lag, segment.scale) for lag in segment.lags)
        self.changes = [change for change in self.changes if change[0] <= segment.start]
        self.changes.append((segment.start, parts, lags))

    def records(self) -> list[Record]:
        chairman, found = Chairman(len(SIZES)), []
        names = list(SIZES)
        for index in range(SIZE):
            for parts, lags in [more for start, *more in self.changes if start == index]:
                chairman.weigh(parts)
                distances = [abs(lag - own) for lag, own in zip(lags, chairman.lags, strict=True)]
                assert max(distances) < Fraction(1, 1 << 40)
                chairman.lags = list(lags)  # rounded, records may be due in another order
            c = chairman.next()
            number = chairman.counts[c] - 1
            size = SIZES[names[c]]
            found.append((names[c], number // size, number % size))
        return found


def registration(parts: tuple[int, ...]) -> Registration:
    components = tuple(
        Component(name=name, sources=(Source(name=name, count=size),), records_per_shard=5, shuffle_window=1)
        for name, size in SIZES.items()
    )
    return Registration(
        name="m",
        sources=(Source(name="", count=SIZE),),
        records_per_shard=16,
        components=components,
        weights=(MixtureWeights(start=0, parts=parts),),
    )


@dataclass
class Member:
    """A trainer: what it knows of the order, and what it holds."""

    session: str
    plan: Plan
    fence: Any
    asked: int = 0
    reported: int = 0
    grants: dict[int, tuple[Grant, int]] = field(default_factory=dict)  # and the next position


class Job:
    """The master, its trainers, and the book."""

    def __init__(self, seed: int) -> None:
        self.noise = random.Random(seed)
        self.given = self.parts()
        self.book = Plans(self.given)
        self.done: dict[int, Record] = {}  # by index
        self.members: list[Member] = []
        self.numbers = 0
        self.tokens: list[
            tuple[str, list[tuple[int, tuple[int, ...]]], dict[int, Record], tuple[int, ...]]
        ] = []
        self.rows: dict[Any, Any] = {}
        self.changes = Changes()
        self.master = Dispatcher(ledger_id="L1", changes=self.changes)
        self.join()

    def parts(self) -> tuple[int, ...]:
        while True:
            parts = tuple(self.noise.choice((0, 1, 2, 5, 13)) for _ in SIZES)
            if sum(parts):
                return parts

    def join(self) -> None:
        self.numbers += 1
        session = f"s{self.numbers}"
        call = RegisterCall(
            session=session, worker_id="w", batch_size=4, registration=registration(self.given)
        )
        answer = self.master.register(call, 0.0)
        self.members.append(Member(session, Plan(answer.spec), answer.fence))

    def die(self) -> None:
        if len(self.members) > 1:
            gone = self.members.pop(self.noise.randrange(len(self.members)))
            self.master.leave(gone.session, gone.fence.member)

    def common(self, member: Member) -> dict[str, Any]:
        known = {"asked": member.asked, "reported": member.reported}
        return {"session": member.session, "dataset": "m", "fence": member.fence, **known}

    def lease(self) -> None:
        member = self.noise.choice(self.members)
        call = LeaseCall(
            **self.common(member),
            request=member.asked + 1,
            epoch=NEW_PASS if self.finished else 0,
            count=self.noise.choice((1, 1, 3)),
            segment=member.plan.newest_segment,
        )
        answer = self.master.lease(call, 0.0)
        if self.noise.random() < 0.2:  # the answer was lost
            assert self.master.lease(call, 0.0) == answer
        member.asked += 1
        member.plan.learn(answer.segments)
        for grant in answer.grants:
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
        call = ReportCall(
            **self.common(member),
            request=member.reported + 1,
            acknowledgements=(Acknowledgement(task=task, attempt=grant.attempt, start=position, upto=upto),),
        )
        assert not self.master.report(call, 0.0).stale
        member.reported += 1
        indices = member.plan.indices(replace(grant.slice, skip=position, limit=upto - position))
        assert indices.passes is not None
        first = member.plan.index_of(replace(grant.slice, skip=position, limit=upto - position))
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
            call = ReportCall(**self.common(member), request=member.reported + 1, give_backs=(back,))
            self.master.report(call, 0.0)
            member.reported += 1

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
            weights={name: float(part) for name, part in zip(SIZES, parts, strict=True)},
        )
        ahead = self.master.find_ledger("m").backlog.ahead  # type: ignore[union-attr]
        if not ahead:
            with pytest.raises(InvalidArgument, match="no records left"):
                self.master.set_weights(replace(call, weights=call.weights | {"a": 77.0}), 0.0)
            return
        segment = self.master.set_weights(call, 0.0)
        assert self.master.set_weights(call, 0.0) == segment
        if segment.number != status.segment:
            self.book.change(segment, parts)
        if segment.number != status.segment and sum(map(bool, parts)) > 1:
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
        token = self.master.snapshot(SnapshotCall(**self.common(member)), 0.0)
        self.tokens.append((token, list(self.book.changes), dict(self.done), self.given))

    def go_back(self) -> None:
        if not self.tokens:
            return
        token, changes, done, given = self.noise.choice(self.tokens)
        elsewhere = self.noise.random() < 0.5
        if elsewhere:  # a new master, and a program that may have been edited
            self.given = self.noise.choice((given, self.parts()))
            self.members.clear()
            self.rows, self.changes = {}, Changes()
            self.master = Dispatcher(ledger_id=f"L{self.noise.random()}", changes=self.changes)
            self.join()
        first = self.members[0]
        call = RestoreCall(**self.common(first), request=self.numbers, token=token)
        self.numbers += 1
        lineage = self.master.restore(call, 0.0)
        self.book.changes, self.done = list(changes), dict(done)
        epoch, shard, offset = json.loads(token)["cursor"]
        if self.given != given and not epoch and 16 * shard + offset < SIZE:
            segments = self.master.find_ledger("m").spec.segments  # type: ignore[union-attr]
            self.book.change(segments[-1], self.given)
        for member in self.members:  # those that do not start anew are refused
            member.fence = replace(member.fence, lineage=lineage)
            member.grants.clear()
            member.asked = member.reported = 0

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
    status = job.master.dataset_status("m")
    assert status.acknowledged == SIZE
    done = Counter(name for name, _, _ in job.done.values())
    assert {one.name: one.given for one in status.components} == {name: done[name] for name in SIZES}
    assert not any(one.open for one in status.components)
