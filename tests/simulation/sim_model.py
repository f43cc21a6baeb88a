"""The promises, watched from outside: what the master granted, was told and answered, record by record.

Kept from calls and answers alone, never from the ledger's own state, but for the totals that must agree. One
byte a record and epoch; the work for a call is that of its own records.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from edl_torch.core.calls import (
    Fence,
    Grant,
    LeaseAnswer,
    LeaseCall,
    ReportAnswer,
    ReportCall,
    SetWeightsCall,
)
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.plan import Plan
from edl_torch.core.state import Released
from edl_torch.shard import MixtureSegment, Slice
from edl_torch.trainer.vocabulary import Ticket

WAITING, LENT, DONE, BAD = range(4)


class BrokenPromise(AssertionError):
    """Says which promise, and of which records."""


@dataclass(slots=True)
class Held:
    """A lease as the calls and answers say that it stands: `base` is where its window begins."""

    session: str
    attempt: int
    epoch: int
    shard: int
    base: int
    stop: int
    open: set[int]  # positions without outcome that were not given back
    returned: set[int] = field(default_factory=set)

    def pieces(self) -> set[Slice]:
        """What goes back when it is taken back now."""
        firsts = sorted(position for position in self.open if position - 1 not in self.open)
        afters = sorted(position + 1 for position in self.open if position + 1 not in self.open)
        return {
            Slice(epoch=self.epoch, shard=self.shard, skip=first, limit=after - first)
            for first, after in zip(firsts, afters, strict=True)
        }


@dataclass(slots=True)
class Position:
    """The outcomes at the moment of a token."""

    records: dict[int, bytes]
    done: int
    bad: int


class History:
    """Hears all that a master and its trainers say and judges nothing; `steps` is the digest of it."""

    def __init__(self) -> None:
        self.steps = hashlib.blake2b(digest_size=16)

    def note(self, *what: object) -> None:
        """Part of the history that one seed fixes."""
        self.steps.update(repr(what).encode())

    def leased(self, call: LeaseCall, answer: LeaseAnswer) -> None:
        """A lease call was answered."""

    def begun(self, fence: Fence, cut: Slice, plan: Plan) -> None:
        """A trainer begins to read what it was lent."""

    def reweighed(self, call: SetWeightsCall, segment: MixtureSegment) -> None:
        """A change of weights was carried out, or repeated."""

    def handed(self, session: str, ticket: Ticket) -> None:
        """A batch goes to a training loop."""

    def trained(self, ticket: Ticket) -> None:
        """A training loop is done with a batch."""

    def reported(self, call: ReportCall, answer: ReportAnswer, now: float) -> None:
        """A report was applied."""

    def released(self, lost: Iterable[Released]) -> None:
        """Sessions died, left or stalled."""

    def position(self) -> Position:
        """What a token that is taken now stands for."""
        return Position({}, 0, 0)

    def restored(self, position: Position | None, lineage: int) -> None:
        """The dataset went back."""

    def agree(self, ledger: ShardLedger) -> None:
        """Something was committed."""

    def epoch_over(self, epoch: int) -> None:
        """The master said that an epoch's pass is over."""

    def add_up(self, ledger: ShardLedger) -> None:
        """After that."""


class Model(History):
    """One dataset's records. Every method raises BrokenPromise."""

    def __init__(self, plan: Plan, batch: int) -> None:
        super().__init__()
        self.plan = plan
        self.batch = batch
        self.lineage = 1
        self.leases: dict[int, Held] = {}
        self.done = self.bad = self.lent = 0
        self.last_outcome_at = 0.0
        self.trained_records = 0  # of all trainers' loops
        self._per_shard = plan.spec.records_per_shard
        self._records: dict[int, bytearray] = {}
        self._by_session: dict[str, set[int]] = defaultdict(set)
        self._finished_by: dict[int, str] = {}  # leases that ended with outcomes only: task -> session
        self._trained: dict[int, set[int]] = {}  # lease -> positions that a loop is done with
        self._over: set[int] = set()
        self._told: dict[str, tuple[int, tuple[int, ...]]] = {}  # of the last report: request, refused

    def _expect(self, holds: object, promise: str, *details: object) -> None:
        if not holds:
            raise BrokenPromise(f"{promise}: {' '.join(map(str, details))}")

    def _of(self, epoch: int) -> bytearray:
        records = self._records.get(epoch)
        if records is None:
            records = self._records[epoch] = bytearray(self.plan.size)
        return records

    # Lending --------------------------------------------------------------------------------------------

    def leased(self, call: LeaseCall, answer: LeaseAnswer) -> None:
        """A lease call was answered; a repeated answer lends nothing new."""
        self._expect(call.fence.lineage == self.lineage, "a call of another lineage was answered", call)
        for grant in answer.grants:
            self._grant(call.session, grant)

    def _grant(self, session: str, grant: Grant) -> None:
        known = self.leases.get(grant.task)
        if known is not None or grant.task in self._trained:
            owner = known.session if known else self._finished_by.get(grant.task, session)
            self._expect(owner == session, "one lease for two sessions", grant, owner, session)
            return
        cut = grant.slice
        base = cut.shard * self._per_shard
        if self.plan.window > 1:
            base = self.plan.records_before(cut.epoch, self.plan.window_position(cut.epoch, cut.shard))
        first, after = base + cut.skip, base + cut.stop
        records = self._of(cut.epoch)
        if records.count(WAITING, first, after) != cut.limit:
            raise BrokenPromise(f"lent again while lent or done: {grant} {bytes(records[first:after])!r}")
        records[first:after] = bytes((LENT,)) * cut.limit
        self.lent += cut.limit
        self.leases[grant.task] = Held(
            *(session, grant.attempt, cut.epoch, cut.shard, base, cut.stop), set(range(cut.skip, cut.stop))
        )
        self._by_session[session].add(grant.task)
        self._trained[grant.task] = set()

    # Training -------------------------------------------------------------------------------------------

    def handed(self, session: str, ticket: Ticket) -> None:
        """A batch goes to a training loop: its leases must be the session's, whatever it slept through."""
        if self.lineage == 1:  # after a restore others may train on until they hear of it
            for task, first, after in ticket:
                held = self.leases.get(task)
                mine = (
                    held is not None and held.session == session and held.open.issuperset(range(first, after))
                )
                self._expect(mine, "a batch of a lost lease was handed out", session, task, held)

    def trained(self, ticket: Ticket) -> None:
        """A training loop is done with a batch."""
        for task, first, after in ticket:
            self._trained[task].update(range(first, after))
            self.trained_records += after - first

    # Outcomes -------------------------------------------------------------------------------------------

    def reported(self, call: ReportCall, answer: ReportAnswer, now: float) -> None:
        """A report was applied."""
        self._expect(call.fence.lineage == self.lineage, "a call of another lineage was answered", call)
        stale = answer.stale
        request, told = self._told.get(call.session, (0, ()))
        if 0 < call.request == request:
            self._expect(stale == told, "a repeated report was answered otherwise", call, told, stale)
            return
        self._told[call.session] = max(request, call.request), told if call.request < request else stale
        for failure in call.failures:
            held = self._judge(call.session, failure.task, failure.attempt, stale)
            if held is not None:
                self._fail(failure.task, held, failure.position)
        for done in call.acknowledgements:
            held = self._judge(call.session, done.task, done.attempt, stale)
            if held is not None and not held.open.isdisjoint(range(done.start, done.upto)):
                self._acknowledge(done.task, held, done.start, done.upto)
                self.last_outcome_at = now
        for back in call.give_backs:
            held = self._judge(call.session, back.task, back.attempt, stale)
            if held is not None:
                self._give_back(back.task, held, back.start, held.stop if back.upto is None else back.upto)

    def _judge(self, session: str, task: int, attempt: int, stale: tuple[int, ...]) -> Held | None:
        """The lease, where it is this session's; else the master must have refused."""
        held = self.leases.get(task)
        if held is not None and held.session == session and held.attempt == attempt:
            self._expect(task not in stale, "a live lease's outcome was refused", session, task)
            return held
        ended_well = self._finished_by.get(task) == session
        self._expect(task in stale or ended_well, "a late outcome was not refused", session, task, attempt)
        return None

    def _acknowledge(self, task: int, held: Held, start: int, upto: int) -> None:
        told = set(range(start, upto))
        self._expect(told <= self._trained[task], "acknowledged, not trained", held, start, upto)
        self._expect(told.isdisjoint(held.returned), "acknowledged after it went back", held, start, upto)
        fresh = told & held.open
        self._settle(held, fresh, DONE)
        self.done += len(fresh)
        self._end_if_done(task, held)

    def _fail(self, task: int, held: Held, position: int) -> None:
        if position in held.open:
            self._settle(held, {position}, BAD)
            self.bad += 1
            self._end_if_done(task, held)

    def _give_back(self, task: int, held: Held, start: int, upto: int) -> None:
        back = held.open.intersection(range(start, upto))
        held.returned |= back
        self._settle(held, back, WAITING)
        self._end_if_done(task, held)

    def _settle(self, held: Held, positions: set[int], state: int) -> None:
        """Take positions out of a lease: their records are in this state now."""
        records = self._of(held.epoch)
        for position in positions:
            if records[held.base + position] != LENT:
                raise BrokenPromise(f"two outcomes for a record: {held} {position}")
            records[held.base + position] = state
        held.open -= positions
        self.lent -= len(positions)

    def _end_if_done(self, task: int, held: Held) -> None:
        if not held.open and task in self.leases:
            del self.leases[task]
            self._by_session[held.session].discard(task)
            self._finished_by[task] = held.session

    def released(self, lost: Iterable[Released]) -> None:
        """Sessions died, left or stalled: what had no outcome comes back, no more and no less."""
        for item in lost:
            mine = [self.leases.pop(task) for task in sorted(self._by_session.pop(item.session, ()))]
            expected = {piece for held in mine for piece in held.pieces()}
            self._expect(set(item.slices) == expected, "not the rest came back", item, expected)
            for held in mine:
                self._settle(held, held.open.copy(), WAITING)

    # Checkpoints ----------------------------------------------------------------------------------------

    def position(self) -> Position:
        """What a token that is taken now stands for."""
        lent_waits = bytes((WAITING, WAITING, DONE, BAD, *range(4, 256)))
        records = {epoch: bytes(states.translate(lent_waits)) for epoch, states in self._records.items()}
        return Position(records, self.done, self.bad)

    def restored(self, position: Position | None, lineage: int) -> None:
        """The dataset went back; all leases are void."""
        self._expect(lineage > self.lineage, "a restore did not open a lineage", lineage)
        position = position or Position({}, 0, 0)
        self.lineage, self.done, self.bad, self.lent = lineage, position.done, position.bad, 0
        self._records = {epoch: bytearray(states) for epoch, states in position.records.items()}
        self.leases.clear()
        self._by_session.clear()
        self._finished_by.clear()
        self._over.clear()
        self._told.clear()

    # Sums -----------------------------------------------------------------------------------------------

    def agree(self, ledger: ShardLedger) -> None:
        """Every record that has come up has one place: an outcome, a lease, or the queue."""
        self._expect(ledger.acknowledged == self.done, "the ledger counts other acknowledgements", ledger)
        self._expect(len(ledger.quarantine) == self.bad, "the ledger counts other bad records", ledger)
        epochs = min(ledger.head.epoch + 1, self.plan.spec.num_epochs)
        placed = self.done + self.bad + self.lent + ledger.dropped + ledger.backlog.records
        self._expect(
            placed == epochs * self.plan.size,
            "records were lost or doubled",
            *(f"{placed} of {epochs * self.plan.size}", ledger, f"lent {self.lent}"),
        )

    def epoch_over(self, epoch: int) -> None:
        """The master said that an epoch's pass is over: look at each of its records, once."""
        if epoch < 0 or epoch in self._over:
            return
        self._over.add(epoch)
        records = self._of(epoch)
        waiting = records.count(WAITING)
        self._expect(waiting < self.batch, "an epoch ended with records that wait", epoch, waiting)

    def add_up(self, ledger: ShardLedger) -> None:
        """Count all over again: outcomes record by record, and leases."""
        counted = sum(states.count(DONE) for states in self._records.values())
        self._expect(counted == self.done, "outcomes do not add up", counted, self.done)
        lent = sum(len(held.open) for held in self.leases.values())
        held = sum(lease.open_records for lease in ledger.leases)
        self._expect(lent == self.lent == held == ledger.leased_records, "leases do not add up", lent, ledger)

    def finished(self, ledger: ShardLedger) -> None:
        """The job is over: each record of each epoch has exactly one outcome."""
        self.agree(ledger)
        self._expect(ledger.finished and not self.leases, "the end with leases that live", ledger)
        for epoch in range(self.plan.spec.num_epochs):
            records = self._of(epoch)
            self._expect(not records.count(LENT), "the end with records that are lent", epoch)
            dropped = records.count(WAITING)
            self._expect(dropped < self.batch, "the end with records that wait", epoch, dropped)
        total = self.done + self.bad + ledger.dropped
        self._expect(total == self.plan.size * self.plan.spec.num_epochs, "not all records", total)
