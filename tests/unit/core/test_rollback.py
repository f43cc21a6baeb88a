"""A journal that went back in time: what proves it, what does not, and what is lent from then on.

Trainers of few words call a real dispatcher, which lives in rows. Restarts on the last rows are no rollback,
whatever is repeated or lost on the way; restarts on older rows are found out by the first call of a trainer
that was told something since.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from cases import cases

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    ConfirmCall,
    Fence,
    LeaseAnswer,
    LeaseCall,
    ProgressCall,
    RegisterCall,
    Registration,
    ReportCall,
    RestoreCall,
    SnapshotCall,
)
from edl_torch.core.changes import Changes, Key
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.persistence import Row, dump, load, update
from edl_torch.errors import JournalWentBack, SessionLost, StaleLease
from edl_torch.shard import Source

TIMEOUT_S = 30.0
DATASET = "d"
DEEDS = (*("lease", "wait", "report") * 6, *("confirm", "look", "save") * 3, "back")


class Master:
    """A dispatcher in rows, of which every version is kept. Version 0 is the empty journal."""

    def __init__(self, chance: random.Random) -> None:
        self.now = 0.0
        self.versions: list[dict[Key, Row]] = [{}]
        self._chance = chance
        self._start()

    def _start(self) -> None:
        rows = {key: tuple(json.loads(json.dumps(row))) for key, row in self.versions[-1].items()}
        self.changes = Changes()
        self.dispatcher: Dispatcher = load(
            rows, ledger_id="first", now=self.now, lease_timeout_s=TIMEOUT_S, changes=self.changes
        )
        self.dispatcher.members.resume(self.now)

    @property
    def version(self) -> int:
        """The number of the last commit."""
        return len(self.versions) - 1

    def commit(self) -> None:
        """What has changed is safe: answers may leave."""
        changed = update(self.dispatcher, self.changes.take())
        rows = self.versions[-1] | {key: row for key, row in changed.items() if row is not None}
        for key in [key for key, row in changed.items() if row is None]:
            rows.pop(key, None)
        assert rows == dump(self.dispatcher)
        self.versions.append(rows)

    def restart(self, version: int | None = None) -> None:
        """Killed and started again, on the rows of `version`."""
        if version is not None:
            del self.versions[version + 1 :]
        self._start()
        self.dispatcher.rollback.begin_again(self._chance.randrange(1, 1 << 40))
        self.commit()

    @property
    def lineage(self) -> int:
        ledger = self.dispatcher.find_ledger(DATASET)
        return 0 if ledger is None else ledger.lineage

    @property
    def lent(self) -> int:
        """The number of the last task."""
        ledger = self.dispatcher.find_ledger(DATASET)
        return 0 if ledger is None else ledger.head.next_task - 1


@dataclass
class Trainer:
    """Counts its calls as a session does. `told` is the version of the last thing that it was answered."""

    master: Master
    session: str
    fence: Fence = field(default_factory=Fence)
    held: dict[int, tuple[int, int]] = field(default_factory=dict)  # task -> attempt, end
    request: int = 0
    reports: int = 0
    restores: int = 0
    asked: int = 0
    reported: int = 0
    told: int = 0
    knows_more: bool = False  # than the master, since that went back
    sent: list[Any] = field(default_factory=list)
    applied: dict[tuple[Any, ...], int] = field(default_factory=dict)  # call -> version that has it
    unanswered: tuple[Acknowledgement, ...] | None = None  # of the last report

    def _call(self, kind: Any, **more: Any) -> Any:
        call = kind(
            session=self.session,
            dataset=DATASET,
            fence=self.fence,
            asked=self.asked,
            reported=self.reported,
            **more,
        )
        self.sent.append(call)
        return call

    def _done(self, *what: Any, heard: bool = True) -> bool:
        """The call is committed; the answer may get lost. A repeated one tells of the version of then."""
        self.master.commit()
        version = self.applied.setdefault((*what, self.fence), self.master.version)
        if heard:
            self.told = max(version, self.told)
        return heard

    def register(self) -> None:
        registration = Registration(name=DATASET, sources=(Source(name="", count=600),), records_per_shard=20)
        call = RegisterCall(session=self.session, worker_id="w", batch_size=2, registration=registration)
        before = self.fence
        answer = self.master.dispatcher.register(call, self.master.now)
        if before.ledger and answer.fence.ledger != before.ledger:
            raise StaleLease("another ledger")
        if before.ledger and answer.fence.member == before.member:
            raise JournalWentBack("given up, and back")
        if before.ledger and answer.fence.lineage != before.lineage:
            raise StaleLease("another lineage")
        self.fence = answer.fence
        self.unanswered = None
        self.asked = self.reported = 0  # to this member
        self.held.clear()
        self._done("register")

    def lease(self, *, heard: bool = True, waits: bool = False) -> None:
        call = self._call(LeaseCall, request=self.request + 1, epoch=NEW_PASS, count=1)
        dispatcher, now = self.master.dispatcher, self.master.now
        answer: LeaseAnswer | None = None
        if waits:
            dispatcher.heard(call, now)
            answer = dispatcher.poll(call, now)
        if answer is None:
            answer = (dispatcher.answer if waits else dispatcher.lease)(call, now)
        if self._done("lease", call.request, heard=heard):
            self.request = self.asked = call.request
            self.held |= {grant.task: (grant.attempt, grant.slice.stop) for grant in answer.grants}

    def report(self, *, heard: bool = True) -> None:
        done = self.unanswered
        if done is None:
            some = list(self.held.items())[:2]
            done = tuple(
                Acknowledgement(task=task, attempt=attempt, upto=end) for task, (attempt, end) in some
            )
        self.unanswered = done
        call = self._call(ReportCall, request=self.reports + 1, acknowledgements=done)
        answer = self.master.dispatcher.report(call, self.master.now)
        if self._done("report", call.request, heard=heard):
            self.unanswered = None
            self.reports = self.reported = call.request
            for task in (*(item.task for item in done), *answer.stale):
                self.held.pop(task, None)

    def confirm(self) -> None:
        leases = tuple((task, attempt) for task, (attempt, _) in self.held.items())
        answer = self.master.dispatcher.confirm(self._call(ConfirmCall, leases=leases), self.master.now)
        self.master.commit()
        for task in answer.void:
            self.held.pop(task)

    def look(self) -> None:
        self.master.dispatcher.progress(self._call(ProgressCall), self.master.now)

    def snapshot(self) -> str:
        return self.master.dispatcher.snapshot(self._call(SnapshotCall), self.master.now)

    def restore(self, token: str | None) -> None:
        self.restores += 1
        call = self._call(RestoreCall, request=self.restores, token=token)
        lineage = self.master.dispatcher.restore(call, self.master.now)
        self.fence = replace(self.fence, lineage=lineage)
        self.held.clear()
        self.asked = self.reported = 0  # in this lineage
        self.unanswered = None
        self._done("restore")

    def known_in(self, version: int) -> list[Any]:
        """The calls for leases and reports that this version has applied."""
        kinds = {LeaseCall: "lease", ReportCall: "report"}
        return [
            call
            for call in self.sent
            if type(call) in kinds
            and self.applied.get((kinds[type(call)], call.request, call.fence), version + 1) <= version
        ]

    def repeat(self, chance: random.Random, calls: list[Any] | None = None) -> None:
        """A copy of an earlier call, or of one of `calls`, comes late; nobody hears the answer."""
        call = chance.choice(self.sent if calls is None else calls)
        dispatcher, now = self.master.dispatcher, self.master.now
        match call:
            case LeaseCall():
                dispatcher.lease(call, now)
            case ReportCall():
                dispatcher.report(call, now)
            case ConfirmCall():
                dispatcher.confirm(call, now)
            case RestoreCall():
                dispatcher.restore(call, now)
            case _:
                dispatcher.progress(call, now)


class Job:
    """Trainers come and go; the master dies and comes back, on the rows that it wrote last."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.master = Master(self.chance)
        self.trainers: list[Trainer] = []
        self.tokens: list[str | None] = [None]
        self._count = 0
        for _ in range(3):
            self.join()

    def join(self) -> Trainer:
        self._count += 1
        trainer = Trainer(self.master, f"s{self._count}")
        trainer.register()
        self.trainers.append(trainer)
        return trainer

    def act(self, trainer: Trainer) -> None:
        """One thing that a trainer does; a session that was given up takes part anew, as real ones do."""
        chance = self.chance
        try:
            match chance.choice(DEEDS):
                case "lease" | "wait" as how:
                    trainer.lease(heard=chance.random() < 0.8, waits=how == "wait")
                case "report":
                    trainer.report(heard=chance.random() < 0.8)
                case "confirm":
                    trainer.confirm()
                case "look":
                    trainer.look()
                case "save":
                    self.tokens.append(trainer.snapshot())
                case "back":
                    trainer.restore(chance.choice(self.tokens))
        except SessionLost:
            trainer.register()

    def step(self) -> None:
        """Something happens that proves nothing."""
        master, chance = self.master, self.chance
        trainer = chance.choice(self.trainers)
        match chance.choice(("act",) * 12 + ("repeat", "restart", "time", "dies", "joins", "leaves")):
            case "act":
                try:
                    self.act(trainer)
                except JournalWentBack:
                    raise
                except StaleLease:  # the job went on from a checkpoint without it
                    self.trainers.remove(trainer)
            case "repeat":
                self._repeat(trainer)
            case "restart":
                master.restart()
            case "time":
                master.now += chance.uniform(0, TIMEOUT_S)
                master.dispatcher.expire(master.now)
                master.commit()
            case "dies":
                self.trainers.remove(trainer)
            case "joins":
                self.join()
            case "leaves":
                self.trainers.remove(trainer)
                master.dispatcher.leave(trainer.session, trainer.fence.member)
                master.commit()
        while not self.trainers:
            self.join()

    def _repeat(self, trainer: Trainer) -> None:
        if not trainer.sent:
            return
        try:
            trainer.repeat(self.chance)
        except JournalWentBack:
            raise
        except StaleLease:
            pass
        self.master.commit()

    def repeat_known(self, trainer: Trainer, version: int) -> None:
        """A copy of a call that this version has applied comes late."""
        calls = trainer.known_in(version)
        if calls:
            with suppress(StaleLease):
                trainer.repeat(self.chance, calls)
            self.master.commit()

    def roll_back(self) -> int:
        """Restart on rows of before, and return their version; who was told something since knows more."""
        version = self.chance.randrange(max(0, self.master.version - 40), self.master.version + 1)
        for trainer in self.trainers:
            trainer.knows_more = trainer.told > version
        self.master.restart(version)
        return version


@cases("seed", range(40), range(150))
def test_whatever_is_lost_or_repeated_a_journal_that_is_complete_is_never_taken_for_older(seed: int) -> None:
    job = Job(seed)
    for _ in range(120):
        job.step()
    assert not job.master.dispatcher.suspended


@cases("seed", range(80), range(300))
def test_who_knows_more_than_the_journal_is_found_out_before_anybody_is_lent_a_record(seed: int) -> None:
    job = Job(seed)
    for _ in range(job.chance.randrange(5, 80)):
        job.step()
    version = job.roll_back()
    master = job.master
    for _ in range(job.chance.randrange(0, 12)):  # those who know no more go on, and new ones come
        others = [trainer for trainer in job.trainers if not trainer.knows_more]
        trainer = job.chance.choice(others) if others else job.join()
        try:
            job.act(trainer)
        except JournalWentBack:
            raise
        except StaleLease:
            job.trainers.remove(trainer)
    for trainer in job.trainers:
        if trainer.knows_more and job.chance.random() < 0.3:
            job.repeat_known(trainer, version)
    if job.chance.random() < 0.4:  # those who know more come so late that they were given up
        master.now += 2 * TIMEOUT_S
        master.dispatcher.expire(master.now)
        master.commit()
        if job.chance.random() < 0.5:
            master.restart()
    for trainer in [trainer for trainer in job.trainers if trainer.knows_more]:
        lent = master.lent
        superseded = trainer.fence.lineage < master.lineage
        with pytest.raises(StaleLease if superseded else JournalWentBack):
            job.act(trainer)
        assert master.lent == lent


# What is found out ------------------------------------------------------------------------------------------


@pytest.fixture
def job() -> Job:
    return Job(0)


def older(job: Job) -> tuple[Trainer, Trainer]:
    """Two trainers that were lent something since the version that the master is on now."""
    one, other = job.trainers[:2]
    one.lease()
    version = job.master.version
    one.report()
    other.lease()
    job.master.restart(version)
    return one, other


def test_a_forgotten_registration_is_found_out_though_another_took_its_place(job: Job) -> None:
    version = job.master.version
    late = job.join()
    job.master.restart(version)
    job.join()
    with pytest.raises(JournalWentBack, match="member 4, which the journal never gave"):
        late.lease()


def test_a_late_copy_of_an_old_call_hides_no_forgotten_report_of_a_member_given_up(job: Job) -> None:
    """The copy came to the older journal first, and was taken for a proof that its sender knew no more."""
    one = job.trainers[0]
    one.lease()
    version = job.master.version
    one.report()
    job.master.restart(version)
    job.repeat_known(one, version)
    job.master.now += 2 * TIMEOUT_S
    job.master.dispatcher.expire(job.master.now)
    job.master.commit()
    with pytest.raises(JournalWentBack, match="answer to report 1, and the journal knows none beyond 0"):
        one.look()


def test_once_known_nobody_is_lent_anything_until_the_dataset_is_restored(job: Job) -> None:
    one, other = older(job)
    master = job.master
    with pytest.raises(JournalWentBack):
        one.look()
    master.commit()
    master.restart()  # it is not forgotten
    assert DATASET in master.dispatcher.status(0.0).suspended
    for trainer in (one, other, job.join()):
        for deed in (trainer.lease, trainer.report, trainer.confirm, trainer.look, trainer.snapshot):
            with pytest.raises(JournalWentBack, match="load_state_dict"):
                deed()
    with pytest.raises(JournalWentBack):
        one.restore(None)  # of the ledger that is void
    new = job.trainers[-1]
    new.restore(None)
    new.lease()
    assert new.held
    assert not master.dispatcher.suspended
    for trainer in (one, other):
        with pytest.raises(StaleLease):
            job.act(trainer)


def test_a_restore_ends_the_suspension_of_its_dataset_alone(job: Job) -> None:
    master = job.master
    registration = Registration(name="e", sources=(Source(name="", count=8),))
    call = RegisterCall(session="x", worker_id="w", batch_size=2, registration=registration)
    master.dispatcher.register(call, 0.0)
    one, _ = older(job)
    with pytest.raises(JournalWentBack):
        one.look()
    job.join().restore(None)
    assert set(master.dispatcher.suspended) == {"e"}


def test_a_call_of_another_ledger_proves_nothing(job: Job) -> None:
    one, _ = older(job)
    one.fence = replace(one.fence, ledger="another")
    with pytest.raises(StaleLease) as caught:
        one.look()
    assert caught.type is not JournalWentBack
    assert not job.master.dispatcher.suspended


def test_an_older_state_that_is_accepted_is_another_ledger_and_lineage(job: Job) -> None:
    one, other = older(job)
    dispatcher = job.master.dispatcher
    lineage = job.master.lineage
    dispatcher.rollback.accept_older()
    job.master.commit()
    assert dispatcher.ledger_id != "first"
    assert len(dispatcher.ledger_id) == 32
    assert job.master.lineage > lineage
    assert [ledger.opened_by for ledger in dispatcher.ledgers] == [(0, 0)], "no member has asked for it"
    assert dispatcher.dataset_status(DATASET).todo == dispatcher.dataset_status(DATASET).size
    for trainer in (one, other):
        with pytest.raises(StaleLease):
            job.act(trainer)
    new = job.join()
    new.lease()
    assert new.held


def test_a_suspension_ends_all_members_and_forgets_those_given_up_before(job: Job) -> None:
    master = job.master
    master.restart()
    master.now += 2 * TIMEOUT_S
    master.dispatcher.expire(master.now)
    job.join().lease()
    assert [key for key in dump(master.dispatcher) if key[0] == "departed_members"]
    assert master.dispatcher.dataset_status(DATASET).leased
    master.dispatcher.rollback.suspend("a newer one is known")
    assert {key[0] for key in dump(master.dispatcher)}.isdisjoint({"departed_members", "session", "leases"})
    assert list(master.dispatcher.members) == []
    master.commit()


def test_lineages_of_two_futures_are_never_taken_for_each_other(job: Job) -> None:
    one, other = job.trainers[:2]
    version = job.master.version
    one.restore(None)
    job.master.restart(version)
    other.restore(None)
    with pytest.raises(StaleLease):
        one.lease()


def test_two_starts_on_one_journal_become_unlike_ledgers_for_the_same_reason() -> None:
    found = set()
    for nonce in (5, 6):
        dispatcher = Dispatcher(ledger_id="L")
        dispatcher.rollback.begin_again(nonce)
        dispatcher.rollback.suspend("a reason")
        found.add(dispatcher.ledger_id)
    assert len(found - {"L"}) == 2
