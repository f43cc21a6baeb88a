"""The ledger in any order of events, against a model that tracks every record of every epoch by itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from core_kit import SimulatedTrainer, run_to_the_end
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from ledger_model import (
    AHEAD,
    BAD,
    DROPPED,
    LENT,
    NAMES,
    REMAINDER,
    TRAINED,
    LedgerBesideModel,
    Record,
    records_of,
)

from edl_torch.core.calls import NEW_PASS
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.token import Token
from edl_torch.errors import InvalidArgument, StaleLease
from edl_torch.shard import Slice


class LedgerMachine(LedgerBesideModel):
    """Every rule acts on the ledger and on the model; the invariants compare the two."""

    # Rules ----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.sizes) < len(NAMES))
    @rule(data=st.data(), size=st.integers(1, 5))
    def join(self, data: st.DataObject, size: int) -> None:
        self._join(data.draw(st.sampled_from([n for n in NAMES if n not in self.sizes])), size)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), size=st.integers(1, 5))
    def join_again(self, data: st.DataObject, size: int) -> None:
        self._join(data.draw(st.sampled_from(sorted(self.sizes))), size)

    @precondition(lambda self: self.sizes)
    @rule(
        data=st.data(),
        count=st.integers(1, 4),
        old=st.booleans(),
        drained=st.booleans(),
        ahead=st.booleans(),
    )
    def lease(self, data: st.DataObject, count: int, old: bool, drained: bool, ahead: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.sizes)), label="session")
        epoch = data.draw(st.integers(0, self.ledger.epoch), label="epoch") if old else NEW_PASS
        self._lease(name, epoch, count, drained, ahead)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), count=st.integers(1, 4))
    def lease_and_train_but_a_part_of_a_batch(self, data: st.DataObject, count: int) -> None:
        """What `drop_last` makes of a pass: whole batches are trained on, the rest becomes remainders."""
        name = data.draw(st.sampled_from(sorted(self.sizes)), label="session")
        mine = set(self.live)
        self._lease(name, NEW_PASS, count, drained=False)
        fresh = [lease for task, lease in self.live.items() if task not in mine]
        whole = sum(len(lease.positions) for lease in fresh) // self.sizes[name] * self.sizes[name]
        for lease in fresh:
            cut = lease.start + min(whole, len(lease.positions))
            whole -= cut - lease.start
            self._give_back(lease, cut, remainder=True)
            if lease.positions and data.draw(st.booleans(), label="stepped"):
                self._acknowledge(lease, cut)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        lease = self._a_lease(data)
        upto = data.draw(st.integers(lease.start, lease.stop), label="upto")
        start = data.draw(st.sampled_from([0, *range(lease.start, upto)]), label="start")
        self._acknowledge(lease, upto, start)
        if data.draw(st.booleans(), label="again") and lease.back.isdisjoint(range(start, upto)):
            photo = self._photo()
            self.ledger.acknowledge(lease.session, lease.grant.task, lease.grant.attempt, upto, start=start)
            assert self._photo() == photo, "a repeat changes nothing"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def acknowledge_all_of_a_session(self, data: st.DataObject) -> None:
        name = self._a_lease(data).session
        for lease in [held for held in self.live.values() if held.session == name]:
            self._acknowledge(lease, lease.stop)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        lease = self._a_lease(data)
        position = data.draw(st.integers(lease.start, lease.stop - 1), label="position")
        grant = lease.grant
        self.ledger.fail(lease.session, grant.task, grant.attempt, position, "broken")
        if position in lease.positions:
            self.state[lease.record(position)] = BAD
            lease.positions.remove(position)
            last = self.ledger.quarantine.records[-1]
            assert (last.epoch, last.shard, last.position) == lease.record(position)
            only = Slice(epoch=last.epoch, shard=last.shard, skip=position, limit=1)
            assert self.ledger.plan.indices(only)[0] == (last.name, last.index)
        self._close_if_done(grant.task)
        self._settle_drops()
        photo = self._photo()
        self.ledger.fail(lease.session, grant.task, grant.attempt, position, "broken")
        assert self._photo() == photo, "a repeat changes nothing"

    @precondition(lambda self: self.live)
    @rule(data=st.data(), remainder=st.booleans())
    def give_back(self, data: st.DataObject, remainder: bool) -> None:
        lease = self._a_lease(data)
        start = data.draw(st.integers(lease.done, lease.stop), label="start")
        upto = data.draw(st.none() | st.integers(start, lease.stop), label="upto")
        grant = lease.grant
        self._give_back(lease, start, remainder, upto)
        photo = self._photo()
        self.ledger.give_back(lease.session, grant.task, grant.attempt, start, upto, remainder=remainder)
        if start in lease.back:  # the whole report may come twice, its failures too
            self.ledger.fail(lease.session, grant.task, grant.attempt, start, "broken")
        assert self._photo() == photo, "a repeat changes nothing"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        """A trainer trains nothing more of what it holds than it has handed on, and waits for the verdict."""
        lease = self._a_lease(data)
        self._lease(lease.session, lease.grant.slice.epoch, 1, drained=True)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sizes)), label="session")
        lost = self.ledger.release(name)
        held = [lease for lease in self.live.values() if lease.session == name]
        records = [record for piece in lost for record in records_of(piece)]
        assert sorted(records) == sorted(lease.record(p) for lease in held for p in lease.positions)
        for record in records:
            self.state[record] = AHEAD
        del self.sizes[name]
        for lease in held:
            self._forget(lease.grant.task, self.gone)
        self.gone += [entry for entry in self.closed if entry[0] == name]
        self.closed = [entry for entry in self.closed if entry[0] != name]
        self._settle_drops()

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def repeat_on_closed(self, data: st.DataObject) -> None:
        name, grant = data.draw(st.sampled_from(self.closed), label="closed")
        photo = self._photo()
        self.ledger.acknowledge(name, grant.task, grant.attempt, grant.slice.stop)
        self.ledger.fail(name, grant.task, grant.attempt, grant.slice.skip, "broken")
        self.ledger.give_back(name, grant.task, grant.attempt, grant.slice.skip)
        assert self._photo() == photo, "a repeat changes nothing"

    @precondition(lambda self: self.closed)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        name, _ = data.draw(st.sampled_from(self.closed), label="closed")
        self.ledger.leases.forget_ended(name)
        self.gone += [entry for entry in self.closed if entry[0] == name]
        self.closed = [entry for entry in self.closed if entry[0] != name]

    def _refuse(self, error: type[Exception], name: str, task: int, attempt: int, position: int) -> None:
        photo = self._photo()
        with pytest.raises(error):
            self.ledger.acknowledge(name, task, attempt, position)
        with pytest.raises(error):
            self.ledger.fail(name, task, attempt, position, "broken")
        for remainder in (False, True):
            with pytest.raises(error):
                self.ledger.give_back(name, task, attempt, position, remainder=remainder)
        assert self._photo() == photo, "a refusal changes nothing"

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def zombie(self, data: st.DataObject) -> None:
        name, grant = data.draw(st.sampled_from(self.gone), label="gone")
        self._refuse(StaleLease, name, grant.task, grant.attempt, grant.slice.skip)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def thief(self, data: st.DataObject) -> None:
        lease = self._a_lease(data)
        grant = lease.grant
        self._refuse(StaleLease, "nobody", grant.task, grant.attempt, lease.stop)
        self._refuse(StaleLease, lease.session, grant.task, grant.attempt + 1, lease.stop)
        self._refuse(StaleLease, lease.session, grant.task + 10**6, 1, lease.stop)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), beyond=st.integers(1, 3))
    def out_of_bounds(self, data: st.DataObject, beyond: int) -> None:
        lease = self._a_lease(data)
        name, task, attempt = lease.session, lease.grant.task, lease.grant.attempt
        photo = self._photo()
        with pytest.raises(InvalidArgument):
            self.ledger.acknowledge(name, task, attempt, lease.stop + beyond)
        with pytest.raises(InvalidArgument):
            self.ledger.fail(name, task, attempt, lease.grant.slice.stop + beyond, "broken")
        for position in range(lease.start, lease.done):
            if position not in lease.back:
                with pytest.raises(InvalidArgument):
                    self.ledger.give_back(name, task, attempt, position)
        with pytest.raises(StaleLease):
            self.ledger.lease("nobody", epoch=NEW_PASS, count=1)
        with pytest.raises(InvalidArgument):
            self.ledger.lease(name, epoch=self.spec.num_epochs + 1, count=1)
        assert self._photo() == photo, "a refusal changes nothing"

    @rule()
    def save(self) -> None:
        text = self.ledger.snapshot().encode()
        assert Token.decode(text).encode() == text
        self.saved.append((text, dict(self.state)))
        # A fresh ledger knows from the token alone exactly what has no outcome yet.
        other = ShardLedger(self.spec)
        other.restore(Token.decode(text))
        without = {r for r, state in self.state.items() if state in (AHEAD, LENT, REMAINDER)}
        assert self._all_waiting(other) == without
        assert len(without) == other.backlog.records + other.plan.size * max(
            0, self.spec.num_epochs - other.snapshot().epoch - 1
        )
        assert (other.acknowledged, other.dropped) == (self.ledger.acknowledged, self.ledger.dropped)
        assert list(other.quarantine) == list(self.ledger.quarantine)

    def _all_waiting(self, ledger: ShardLedger) -> set[Record]:
        token = ledger.snapshot()
        waiting = [record for piece in (*token.open, *token.remainders) for record in records_of(piece)]
        plan = ledger.plan
        for epoch in range(token.epoch, self.spec.num_epochs):
            first = token.position if epoch == token.epoch else 0
            for place in range(first, plan.num_windows):
                window = plan.window_at(epoch, place)
                skip = token.offset if epoch == token.epoch and place == first else 0
                records = plan.records_in(epoch, window)
                waiting += [(epoch, window, position) for position in range(skip, records)]
        assert len(waiting) == len(set(waiting)), "a record waits twice"
        return set(waiting)

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        text, state = data.draw(st.sampled_from(self.saved), label="saved")
        lineage = self.ledger.lineage
        self.ledger.restore(Token.decode(text))
        assert self.ledger.lineage == lineage + 1
        self.state = {record: AHEAD if what == LENT else what for record, what in state.items()}
        self.drops = Counter(record[0] for record in self._in(DROPPED))
        self.gone += [(lease.session, lease.grant) for lease in self.live.values()] + self.closed
        self.live.clear()
        self.handed.clear()
        self.closed = []
        self._settle_drops()

    @rule()
    def restart(self) -> None:
        """Another master takes over from the token: no session is known there, all leases are void."""
        token = Token.decode(self.ledger.snapshot().encode())
        self.ledger = ShardLedger(self.spec)
        self.ledger.restore(token)
        self.state = {record: AHEAD if what == LENT else what for record, what in self.state.items()}
        self.live.clear()
        self.handed.clear()
        self.gone, self.closed = (
            [],
            [],
        )  # task ids begin anew: another ledger id fences them, see the dispatcher
        sizes, self.sizes = self.sizes, {}
        for name, size in sizes.items():
            self._join(name, size)
        self._settle_drops()

    @rule()
    def resume(self) -> None:
        """The same master takes up its own journal: what was lent is lent, what was closed is closed."""
        older = self.ledger
        self.ledger = ShardLedger(self.spec)
        leases = [older.leases.find(task) for task in sorted(lease.task for lease in older.leases)]
        self.ledger.resume(
            older.head,
            leases=[replace(lease) for lease in leases if lease is not None],
            waiting={
                n: found for n in older.backlog.numbers() if (found := older.backlog.find(n)) is not None
            },
            quarantine=older.quarantine,
            batch_sizes=self.sizes,
            closed={name: dict(tasks) for name in self.sizes if (tasks := older.leases.ended(name))},
        )
        assert self.ledger.head == older.head
        assert self.ledger.snapshot() == older.snapshot()

    # Invariants -----------------------------------------------------------------------------------------

    @invariant()
    def every_record_is_in_exactly_one_place(self) -> None:
        lent = [lease.record(p) for lease in self.live.values() for p in lease.positions]
        assert len(lent) == len(set(lent)), "two live leases over one record"
        assert set(lent) == self._in(LENT)
        assert self._all_waiting(self.ledger) == self._in(AHEAD, LENT, REMAINDER)

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        ledger = self.ledger
        token = ledger.snapshot()
        begun = {record for record in self._in(AHEAD, REMAINDER) if record[0] <= token.epoch}
        assert ledger.backlog.records == len(begun)
        assert ledger.leased_records == len(self._in(LENT))
        assert sum(lease.open_records for lease in ledger.leases) == len(self._in(LENT))
        assert len(ledger.leases) == len(self.live)
        assert ledger.acknowledged == len(self._in(TRAINED))
        assert ledger.dropped == len(self._in(DROPPED))
        assert len(ledger.participants) == len(self.sizes)
        quarantined = [(q.epoch, q.shard, q.position) for q in ledger.quarantine]
        assert len(quarantined) == len(set(quarantined))
        assert set(quarantined) == self._in(BAD)
        for name in NAMES:
            held = [lease for lease in self.live.values() if lease.session == name]
            open_records = sum(lease.open_records for lease in ledger.leases.of(name))
            assert open_records == sum(len(lease.positions) for lease in held)

    @invariant()
    def finished_means_that_every_record_has_an_outcome(self) -> None:
        assert self.ledger.finished == (not self._in(AHEAD, LENT, REMAINDER))

    @invariant()
    def shards_left_counts_shards_with_records(self) -> None:
        cursor = self.ledger.snapshot().epoch
        left = {r[:2] for r in self._in(AHEAD, LENT, REMAINDER) if r[0] <= cursor}
        assert self.ledger.shards_left == sum(len(self.ledger.plan.shards_in(*window)) for window in left)

    @invariant()
    def an_epoch_begins_when_the_one_before_is_over(self) -> None:
        cursor = self.ledger.snapshot().epoch
        touched = {r[0] for r, state in self.state.items() if state != AHEAD}
        assert all(epoch <= cursor for epoch in touched)
        if self.spec.epoch_barrier and cursor < self.spec.num_epochs:
            waiting_in = {r[0] for r in self._in(AHEAD)}
            assert self.ledger.epoch == min(waiting_in | {cursor}) or self._in(REMAINDER)

    def teardown(self) -> None:
        """From wherever this run stopped, trainers that follow the waiting rules finish the job."""
        if not hasattr(self, "ledger"):
            return
        if not self.sizes:
            self._join("a", 2)
        trainers = []
        for place, (name, size) in enumerate(sorted(self.sizes.items())):
            held = [lease for lease in self.live.values() if lease.session == name]
            idle = bool(place) and place % 3 == 2 and not held  # takes part, and never fetches
            if not idle:
                trainers.append(
                    SimulatedTrainer(
                        self.ledger,
                        name,
                        size,
                        drop_last=bool(place % 2) or size > 3,
                        hold_back=place % 3,
                        held=[(h.grant, sorted(h.positions)) for h in held],
                    )
                )
        before = self.ledger.acknowledged + len(self._in(BAD)) + self.ledger.dropped
        trained = run_to_the_end(self.ledger, trainers)
        total = len(self.state)
        assert self.ledger.acknowledged + len(self._in(BAD)) + self.ledger.dropped == total
        assert before <= total
        assert len(trained) == len(set(trained)), "a record was trained on twice"
        assert set(trained) <= self._in(AHEAD, LENT, REMAINDER)


LedgerMachine.TestCase.settings = settings(
    stateful_step_count=40,
    print_blob=True,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestLedgerMachine = LedgerMachine.TestCase
