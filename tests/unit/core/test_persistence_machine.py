"""What is written of each change, against all there is: after any call the journal holds the whole state."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from core_kit import Trainer, first_of, whole
from fences import fence
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from statuses import sessions_of

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    Failure,
    GiveBack,
    LeaseCall,
    RegisterCall,
    Registration,
    ReportCall,
)
from edl_torch.core.changes import Changes
from edl_torch.core.codec import object_of
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.leases import Lease
from edl_torch.core.persistence import Rows, dump, load, update
from edl_torch.core.status import DatasetStatus
from edl_torch.errors import EdlError
from edl_torch.master.journal import Journal, encoded
from edl_torch.shard import DatasetSpec, Source

SESSIONS = ("a", "b", "c")
DATASETS = ("training", "Prüf\0ung\ud800")
TIMEOUT_S = 30.0
IN_MEMORY = Path("/dev/shm")  # thousands of commits, each of which would wait for a disk

sessions = st.sampled_from(SESSIONS)
datasets = st.sampled_from(DATASETS)


def plain(rows: Mapping[Any, Any]) -> dict[Any, Any]:
    """Rows as JSON brings them back."""
    return {key: json.loads(json.dumps(row)) for key, row in rows.items()}


def shown_of(dispatcher: Dispatcher) -> list[DatasetStatus]:
    """What is shown of the datasets, without what counts from the master's start on."""
    since_start = ("returned_slices", "returned_records", "given_back", "checkpoints", "restores", "rate")
    return [replace(one, **dict.fromkeys(since_start, 0)) for one in dispatcher.status(0).datasets]


class PersistenceMachine(RuleBasedStateMachine):
    """Any calls, sensible or not; refusals are answers too."""

    @initialize(
        per=st.integers(1, 6),
        barrier=st.booleans(),
        window=st.none() | st.integers(1, 4),
        size=st.integers(1, 40),
    )
    def begin(self, per: int, barrier: bool, window: int | None, size: int) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=IN_MEMORY if IN_MEMORY.is_dir() else None)
        self.journal = Journal(Path(self.folder.name))
        self.changes = Changes()
        self.dispatcher = Dispatcher(
            ledger_id=self.journal.ledger_id, lease_timeout_s=TIMEOUT_S, grace_s=1.0, changes=self.changes
        )
        self.options = {"records_per_shard": per, "epoch_barrier": barrier, "shuffle_window": window}
        self.size = size
        self.now = 0.0
        self.lineages = dict.fromkeys(DATASETS, 1)
        self.grants: list[tuple[str, str, Any]] = []
        self.tokens: list[tuple[str, str]] = []
        for dataset in DATASETS:
            self.register("a", dataset, 2, 2, 20)
            self.register("b", dataset, 3, None, None)

    def _try(self, action: Any) -> Any:
        try:
            return action()
        except EdlError as error:
            note(f"-> {error!r}")
            return None

    # Rules ----------------------------------------------------------------------------------------------

    @rule(
        session=sessions,
        dataset=datasets,
        batch=st.integers(1, 4),
        epochs=st.none() | st.integers(0, 3),
        bad=st.none() | st.integers(0, 5),
    )
    def register(self, session: str, dataset: str, batch: int, epochs: int | None, bad: int | None) -> None:
        registration = Registration(
            name=dataset,
            sources=(Source(name="x\udcff", start=3, count=self.size),),
            num_epochs=epochs,
            max_bad_records=bad,
            **self.options,
        )
        call = RegisterCall(
            session=session, worker_id=f"w\0{session}", batch_size=batch, registration=registration
        )
        self._try(lambda: self.dispatcher.register(call, self.now))

    @rule(
        session=sessions,
        dataset=datasets,
        count=st.sampled_from((1, 1, 2, 3, 0)),
        epoch=st.sampled_from((NEW_PASS, NEW_PASS, NEW_PASS, 0, 1)),
        drained=st.booleans(),
        poll=st.booleans(),
    )
    def lease(self, session: str, dataset: str, count: int, epoch: int, drained: bool, poll: bool) -> None:
        known = self.dispatcher.members.get(session)
        call = LeaseCall(
            session=session,
            dataset=dataset,
            fence=fence(self.dispatcher, session, self.lineages[dataset]),
            request=1 if known is None else known.asked(dataset) + 1,
            epoch=epoch,
            count=count,
            drained=drained,
        )
        do = self.dispatcher.poll if poll else self.dispatcher.lease
        answer = self._try(lambda: do(call, self.now))
        if answer is not None:
            self.grants += [(session, dataset, grant) for grant in answer.grants]

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), newer=st.booleans())
    def report(self, data: st.DataObject, newer: bool) -> None:
        session, dataset, _ = data.draw(st.sampled_from(self.grants), label="of")
        mine = [grant for s, d, grant in self.grants if (s, d) == (session, dataset)][-6:]

        def some(make: Any, most: int) -> tuple[Any, ...]:
            picked = data.draw(st.lists(st.sampled_from(mine), max_size=most))
            ends = [(g, data.draw(st.integers(g.slice.skip, g.slice.stop))) for g in picked]
            return tuple(make(grant, position) for grant, position in ends)

        call = ReportCall(
            session=session,
            dataset=dataset,
            fence=fence(self.dispatcher, session, self.lineages[dataset]),
            request=self._reported(session, dataset) + newer,
            failures=some(
                lambda g, p: Failure(task=g.task, attempt=g.attempt, position=p, reason="\ud800\0"), 2
            ),
            acknowledgements=some(lambda g, p: Acknowledgement(task=g.task, attempt=g.attempt, upto=p), 4),
            give_backs=some(
                lambda g, p: GiveBack(task=g.task, attempt=g.attempt, start=p, remainder=bool(p % 2)), 2
            ),
        )
        before = plain(dump(self.dispatcher))
        if self._try(lambda: self.dispatcher.report(call, self.now)) is None:
            assert plain(dump(self.dispatcher)) == before, "a refused report changes nothing"

    @precondition(lambda self: self._live())
    @rule(data=st.data(), what=st.sampled_from(("train", "train", "give back", "return_remainder", "fail")))
    def outcome(self, data: st.DataObject, what: str) -> None:
        """One sensible outcome of a lease that lives."""
        dataset, lease = data.draw(st.sampled_from(self._live()), label="of")
        call = ReportCall(
            session=lease.session,
            dataset=dataset,
            fence=fence(self.dispatcher, lease.session, self.lineages[dataset]),
            request=self._reported(lease.session, dataset) + 1,
        )
        named = {"task": lease.task, "attempt": lease.attempt}
        position = data.draw(st.integers(lease.done, lease.stop), label="position")
        match what:
            case "train":
                call = replace(call, acknowledgements=(Acknowledgement(**named, upto=position),))
            case "fail":
                position = min(position, lease.stop - 1)
                call = replace(call, failures=(Failure(**named, position=position, reason="\ud800\0"),))
            case _:
                back = GiveBack(**named, start=position, remainder=what == "return_remainder")
                call = replace(call, give_backs=(back,))
        self.dispatcher.report(call, self.now)

    def _reported(self, session: str, dataset: str) -> int:
        """The number of the session's last report."""
        known = self.dispatcher.members.get(session)
        return 0 if known is None else known.reports.get(dataset, 0)

    def _live(self) -> list[tuple[str, Lease]]:
        ledgers = [(name, self.dispatcher.find_ledger(name)) for name in DATASETS]
        found = [
            (name, ledger.leases.find(task))
            for name, ledger in ledgers
            if ledger
            for task in sorted(lease.task for lease in ledger.leases)
        ]
        return [(name, lease) for name, lease in found if lease is not None]

    @precondition(lambda self: self._live())
    @rule(session=sessions, sure=st.integers(0, 3))
    def leave(self, session: str, sure: int) -> None:
        if not sure:
            self.dispatcher.leave(session, fence(self.dispatcher, session).member)

    @rule(session=sessions, seconds=st.floats(0, 12))
    def time_passes(self, session: str, seconds: float) -> None:
        if seconds < 2:
            self.dispatcher.members.stream_broke(session, self.now)
        self.now += seconds
        self.dispatcher.expire(self.now)

    @rule(dataset=datasets)
    def save(self, dataset: str) -> None:
        self.tokens.append((dataset, self.dispatcher.token(dataset)))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), dataset=datasets, saved=st.booleans())
    def restore(self, data: st.DataObject, dataset: str, saved: bool) -> None:
        tokens = [token for name, token in self.tokens if name == dataset]
        token = data.draw(st.sampled_from(tokens)) if saved and tokens else None
        self.lineages[dataset] = self.dispatcher.go_back(dataset, token)

    @rule()
    def restart(self) -> None:
        """Kill and start again: another dispatcher that answers as this one would have."""
        self.journal.close()
        self.journal = Journal(Path(self.folder.name))
        self.changes = Changes()
        self.now += 1000
        older, self.dispatcher = (
            self.dispatcher,
            load(
                self.journal.read(),
                ledger_id=self.journal.ledger_id,
                now=self.now,
                lease_timeout_s=TIMEOUT_S,
                changes=self.changes,
            ),
        )
        newer = self.dispatcher
        assert not self.changes
        assert newer.ledger_id == older.ledger_id
        assert newer.members.next_deadline() in (None, self.now + TIMEOUT_S)
        assert shown_of(newer) == shown_of(older)
        for dataset in DATASETS:
            assert newer.token(dataset) == older.token(dataset)
            assert sessions_of(newer, dataset) == sessions_of(older, dataset)
            self._same_leases(older.find_ledger(dataset), newer.find_ledger(dataset))
        for member in older.members:
            assert newer.members.get(member.session).answers == member.answers
            assert newer.members.get(member.session).reports == member.reports
            for dataset, answer in member.answers.items():
                self._same_answer(member.session, dataset, answer)

    def _same_leases(self, older: Any, newer: Any) -> None:
        assert [lease.task for lease in newer.leases] == [lease.task for lease in older.leases]
        assert [newer.leases.find(task) for task in sorted(lease.task for lease in newer.leases)] == [
            older.leases.find(task) for task in sorted(lease.task for lease in older.leases)
        ]
        assert [newer.leases.unhanded(epoch) for epoch in range(4)] == [
            older.leases.unhanded(epoch) for epoch in range(4)
        ]
        assert [newer.leases.holds(session) for session in SESSIONS] == [
            older.leases.holds(session) for session in SESSIONS
        ]

    def _same_answer(self, session: str, dataset: str, answer: Any) -> None:
        call = LeaseCall(
            session=session,
            dataset=dataset,
            fence=fence(self.dispatcher, session, self.lineages[dataset]),
            request=answer.request,
            epoch=NEW_PASS,
            count=1,
        )
        assert self.dispatcher.poll(call, self.now) == answer

    # What must hold -------------------------------------------------------------------------------------

    @invariant()
    def what_changed_is_all_that_changed(self) -> None:
        if not hasattr(self, "journal"):
            return
        self.journal.write(encoded(update(self.dispatcher, self.changes.take())))
        assert plain(self.journal.read()) == plain(dump(self.dispatcher))

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
            self.folder.cleanup()


PersistenceMachine.TestCase.settings = settings(
    stateful_step_count=40,
    print_blob=True,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPersistenceMachine = PersistenceMachine.TestCase


def test_rows_that_make_no_sense_are_refused() -> None:
    lease = {("leases", "d", "nobody", 0): ((1, 1, 0, 0, 0, 1, 1, 0, ()),)}
    spec = object_of(DatasetSpec(name="d", sources=(Source(name="", count=4),), records_per_shard=2))
    rows = {("dataset", "d"): (0, spec), ("head", "d"): (1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0)}
    assert load(rows, ledger_id="l", now=0.0).dataset_status("d").todo == 4
    with pytest.raises(ValueError, match="nobody"):
        load(rows | lease, ledger_id="l", now=0.0)
    with pytest.raises(LookupError):
        load({("dataset", "d"): (0, spec)}, ledger_id="l", now=0.0)
    with pytest.raises(LookupError):
        load({("surprise", "d"): (0,)}, ledger_id="l", now=0.0)


def written(dispatcher: Dispatcher, changes: Changes, before: Rows) -> Rows:
    """The rows of before, and what has changed since: all there is."""
    rows = before | update(dispatcher, changes.take())
    assert {key: row for key, row in rows.items() if row is not None} == dump(dispatcher)
    return rows


def three_records(name: str) -> Registration:
    return Registration(name=name, sources=(Source(name="", count=3),), records_per_shard=3)


def test_remainders_that_are_dropped_are_written() -> None:
    """Too rare among random calls: nothing of the epoch may be left but less than a batch."""
    changes = Changes()
    dispatcher = Dispatcher(ledger_id="l", changes=changes)
    a = Trainer(dispatcher, "a", batch_size=2)
    a.register(three_records("training"))
    batch, rest = first_of(a), first_of(a)
    a.report(GiveBack(task=rest.task, attempt=1, start=2, remainder=True))
    rows = written(dispatcher, changes, {})
    a.report(whole(batch))
    a.lease(epoch=0, drained=True)
    assert dispatcher.dataset_status("training").dropped == 1
    written(dispatcher, changes, rows)


def test_a_report_of_a_session_that_takes_part_elsewhere_leaves_nothing_behind() -> None:
    """Found by the machine: given up, back for another dataset, and a late report was on its way."""
    changes = Changes()
    dispatcher = Dispatcher(ledger_id="l", changes=changes)
    a, b = Trainer(dispatcher, "a"), Trainer(dispatcher, "b")
    a.register(three_records("training"))
    b.register(three_records("other"))
    assert b.report(Acknowledgement(task=1, attempt=1, upto=2)).stale == (1,)
    rows = written(dispatcher, changes, {})
    assert ("report", "training", "b") not in rows
    dispatcher.leave("b", b.member)
    written(dispatcher, changes, rows)
