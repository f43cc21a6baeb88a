"""Jobs of trainers that keep audit logs, by the answers of a ledger and by hand, and verdicts on them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path

from fences import fence

from edl_torch.audit.log import AuditLog
from edl_torch.audit.verdict import audit
from edl_torch.core import persistence
from edl_torch.core.calls import NEW_PASS, Acknowledgement, Failure, Fence, GiveBack, Grant
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.token import Token
from edl_torch.errors import StaleLease
from edl_torch.fingerprint import strength_of
from edl_torch.master.journal import Journal, encoded
from edl_torch.shard import DatasetSpec, Slice, Source
from edl_torch.trainer.vocabulary import (
    Answered,
    Dropped,
    Evidence,
    Granted,
    Joined,
    ModelSeen,
    PaddingLearnt,
    Refused,
    Reporting,
    Restored,
    Run,
    TokenTaken,
    Unanswered,
    Uncounted,
    Voided,
)

BATCH = 3
WORD = ModelSeen(  # these jobs are about records, not about models
    at="begin",
    steps=0,
    number=0,
    shape="",
    sharded=False,
    eps=0.0,
    processor="",
    values=b"",
    sums=b"",
    word="a test says so",
)
SPEC = DatasetSpec(
    name="training",
    sources=(Source(name="a.csv", start=5, count=20), Source(name="b.csv", count=5)),
    records_per_shard=8,
    max_bad_records=1000,
)


@dataclass
class Trainer:
    """One session: its log, and the leases that it holds with the position that it is at."""

    log: HandLog
    session: str
    held: dict[int, list] = field(default_factory=dict)  # task -> [grant, next position, stop]
    member: int = 0


class Job:
    """One dataset's ledger, its trainers, and where they log."""

    def __init__(self, directory: Path, spec: DatasetSpec = SPEC, trainers: int = 2) -> None:
        self.directory = directory
        self.spec = spec
        self.sessions = 0
        self.members = 0
        self.ledgers = 0
        self.token: str | None = None
        self.open_ledger()
        self.trainers = [self.new_trainer() for _ in range(trainers)]

    def open_ledger(self) -> None:
        """A master that knows nothing of an earlier one."""
        self.ledgers += 1
        self.ledger_id = f"ledger{self.ledgers}"
        self.ledger = ShardLedger(self.spec)

    def new_trainer(self) -> Trainer:
        """A process starts."""
        self.sessions += 1
        session = f"{self.spec.name}{self.sessions}"
        trainer = Trainer(HandLog(self.directory, session, f"host/rank {self.sessions}"), session)
        self.join(trainer)
        return trainer

    def join(self, trainer: Trainer) -> None:
        """A session takes part (again): what it held is void."""
        trainer.held.clear()
        self.ledger.join(trainer.session, BATCH)
        self.members += 1
        trainer.member = self.members
        trainer.log.joined(
            self.ledger.spec,
            ledger=self.ledger_id,
            lineage=self.ledger.lineage,
            batch_size=BATCH,
            member=trainer.member,
        )
        trainer.log.model(WORD)

    # What happens to a job --------------------------------------------------------------------------------

    def fetch(self, trainer: Trainer) -> bool:
        """Ask for leases."""
        drained = not trainer.held
        epoch, _, grants = self.ledger.lease(trainer.session, epoch=NEW_PASS, count=1, drained=drained)
        if not grants and epoch != NEW_PASS:
            _, _, grants = self.ledger.lease(trainer.session, epoch=epoch, count=1, drained=drained)
        for grant in grants:
            trainer.log.granted(grant)
            trainer.held[grant.task] = [grant, grant.slice.skip, grant.slice.stop]
        return bool(grants)

    def train(
        self, trainer: Trainer, *, answered: bool = True, heard: bool = True, way: Evidence = Evidence.STEP
    ) -> None:
        """Acknowledge a batch; maybe the master does not hear it, or its answer is lost."""
        if not trainer.held:
            return
        task, lease = next(iter(trainer.held.items()))
        grant, position, stop = lease
        lease[1] = upto = min(position + BATCH, stop)
        done = Acknowledgement(task=task, attempt=grant.attempt, upto=upto)
        trainer.log.intent(acknowledgements=[done], way=way)
        stale = self.tell(trainer, done) if heard else []
        if answered:
            trainer.log.answered(stale)
        if upto == stop or stale:
            del trainer.held[task]

    def tell(self, trainer: Trainer, done: Acknowledgement) -> list[int]:
        """The master hears it."""
        try:
            self.ledger.acknowledge(trainer.session, done.task, done.attempt, done.upto)
        except StaleLease:
            return [done.task]
        return []

    def quarantine(self, trainer: Trainer) -> None:
        """The record in hand is bad; the trainer goes on after it."""
        if not trainer.held:
            return
        task, lease = next(iter(trainer.held.items()))
        grant, position, stop = lease
        failure = Failure(task=task, attempt=grant.attempt, position=position, reason="truncated")
        trainer.log.intent(failures=[failure])
        stale = []
        try:
            self.ledger.fail(trainer.session, task, grant.attempt, position, "truncated")
        except StaleLease:
            stale = [task]
        trainer.log.answered(stale)
        lease[1] = position + 1
        if lease[1] == stop or stale:
            del trainer.held[task]

    def return_remainder(self, trainer: Trainer) -> None:
        """The last records of a lease are no whole batch: they go back as remainders."""
        if not trainer.held:
            return
        task, lease = next(iter(trainer.held.items()))
        grant, position, stop = lease
        start = max(position, stop - BATCH + 1)
        back = GiveBack(task=task, attempt=grant.attempt, start=start, remainder=True)
        trainer.log.intent(give_backs=[back])
        stale = []
        try:
            self.ledger.give_back(trainer.session, task, grant.attempt, start, remainder=True)
        except StaleLease:
            stale = [task]
        trainer.log.answered(stale)
        lease[2] = start
        if start == position or stale:
            del trainer.held[task]

    def leave(self, trainer: Trainer) -> None:
        """The loop is left with a batch in hand: that and the rest of its lease go back."""
        if not trainer.held:
            return
        task, (grant, position, stop) = trainer.held.popitem()
        back = GiveBack(task=task, attempt=grant.attempt, start=position)
        had = (task, position, min(position + BATCH, stop))
        trainer.log.intent(give_backs=[back], returned=[had])
        self.ledger.give_back(trainer.session, task, grant.attempt, position)
        trainer.log.answered()

    def cut_off(self, trainer: Trainer) -> None:
        """A trainer is taken for dead with a batch in hand, and finds it out before it reports it."""
        self.ledger.release(trainer.session)
        if trainer.held:
            task, (_, position, stop) = next(iter(trainer.held.items()))
            trainer.log.void([(task, position, min(position + BATCH, stop))])
        self.join(trainer)

    def give_up(self, trainer: Trainer, *, heard: bool) -> None:
        """A trainer's report gets no answer, and repeated it gets the one that its session is over."""
        self.train(trainer, answered=False, heard=heard)
        trainer.log.unanswered()
        self.ledger.release(trainer.session)
        trainer.log.lost()
        self.join(trainer)

    def kill(self, place: int, *, heard: bool) -> None:
        """A trainer is killed between its report and the answer; another process takes its place."""
        trainer = self.trainers[place]
        self.train(trainer, answered=False, heard=heard)
        self.ledger.release(trainer.session)
        self.trainers[place] = self.new_trainer()

    def stop_and_go_on(self, place: int) -> None:
        """A trainer is taken for dead, reports too late, learns of it and takes part anew."""
        trainer = self.trainers[place]
        self.ledger.release(trainer.session)
        self.ledger.join(trainer.session, BATCH)
        while trainer.held:
            self.train(trainer)
        self.join(trainer)

    def checkpoint(self, place: int, *, exact: bool = True) -> str:
        """A trainer takes a token."""
        self.token = self.ledger.snapshot().encode()
        self.trainers[place].log.snapshot(self.token, exact=exact, uncounted=0 if exact else BATCH)
        return self.token

    def overtake(self, place: int) -> None:
        """A trainer goes back to the last token, another saves, which does not know of that: a zombie.

        The master of this job does not see that, and the zombie finds it out later.
        """
        self.restore(place, self.token, others_join=False)
        self.train_batches(2, (self.trainers[place],))
        self.checkpoint(1 - place)
        self.join(self.trainers[1 - place])

    def restore(self, place: int, token: str | None, *, others_join: bool = True) -> None:
        """A trainer takes the job back; the others join the lineage."""
        self.ledger.restore(None if token is None else Token.decode(token))
        self.trainers[place].held.clear()
        self.trainers[place].log.restored(token, lineage=self.ledger.lineage)
        self.trainers[place].log.model(WORD)
        for other, trainer in enumerate(self.trainers):
            if other != place and others_join:
                self.join(trainer)

    def restart(self, token: str | None) -> None:
        """Everything is gone, the master included; all start anew and load the checkpoint."""
        self.open_ledger()
        self.trainers = [self.new_trainer() for _ in self.trainers]
        self.restore(0, token)

    def finish(self) -> None:
        """Train to the end."""
        for _ in range(10_000):
            if self.ledger.finished:
                return
            for trainer in self.trainers:
                while self.fetch(trainer) or trainer.held:
                    self.train(trainer)
        raise AssertionError(f"the job does not end: {self.ledger!r}")

    def train_batches(self, batches: int, trainers: Sequence[Trainer] = ()) -> None:
        """The trainers take turns."""
        trainers = trainers or self.trainers
        for number in range(batches):
            trainer = trainers[number % len(trainers)]
            if not trainer.held:
                self.fetch(trainer)
            self.train(trainer)


def grant_of(task: int, shard: int, skip: int, limit: int, *, epoch: int = 0, attempt: int = 1) -> Grant:
    """A lease, made by hand."""
    cut = Slice(epoch=epoch, shard=shard, skip=skip, limit=limit)
    return Grant(task=task, attempt=attempt, slice=cut)


# A job whose master keeps a journal -------------------------------------------------------------------------


class KeptJob(Job):
    """`state` is the folder of the journal, which stays open, as under a live master, until `close()`."""

    def __init__(self, folder: Path, spec: DatasetSpec = SPEC, trainers: int = 2) -> None:
        self.state = folder / "state"
        self.journal = Journal(self.state)
        super().__init__(folder / "audit", spec, trainers)

    def open_ledger(self) -> None:
        self.ledger_id = self.journal.ledger_id
        self.dispatcher = Dispatcher(ledger_id=self.ledger_id)
        self.ledger = self.dispatcher.add(self.spec)

    def join(self, trainer: Trainer) -> None:
        member = self.dispatcher.members.enter(trainer.session, "host", 0.0)
        member.datasets.add(self.spec.name)
        super().join(trainer)

    def take_over(self, place: int) -> None:
        """The master gives up a trainer that was killed."""
        session = self.trainers[place].session
        self.dispatcher.leave(session, fence(self.dispatcher, session).member)

    def cut_off(self, place: int, *, heard: bool) -> None:
        """A trainer is killed between its report of a batch of `BATCH` records and the answer."""
        self.train(self.trainers[place], answered=False, heard=heard)

    def keep(self) -> None:
        """Write the state as it is now."""
        rows = persistence.dump(self.dispatcher)
        gone = dict.fromkeys(set(self.journal.read()) - set(rows))
        self.journal.write(encoded({**rows, **gone}))

    def close(self) -> None:
        self.journal.close()


__all__ = ["BATCH", "SPEC", "KeptJob"]


# A log that a test writes by hand ---------------------------------------------------------------------------


class HandLog(AuditLog):
    """Says what has happened by calls."""

    def joined(
        self, spec: DatasetSpec, *, ledger: str, lineage: int, batch_size: int, member: int = 0
    ) -> None:
        fence = Fence(ledger=ledger, lineage=lineage, member=member)
        known_by = strength_of(spec.fingerprint)
        self.write(Joined(spec=spec, fence=fence, batch_size=batch_size, known_by=known_by))

    def granted(self, grant: Grant) -> None:
        self.write(Granted(grant))

    def intent(
        self,
        *,
        failures: Iterable[Failure] = (),
        acknowledgements: Iterable[Acknowledgement] = (),
        give_backs: Iterable[GiveBack] = (),
        way: Evidence = Evidence.STEP,
        returned: Iterable[Run] = (),
    ) -> None:
        self.write(
            Reporting(
                failures=tuple(failures),
                acknowledgements=tuple(acknowledgements),
                give_backs=tuple(give_backs),
                way=way,
                returned=tuple(returned),
            )
        )

    def answered(self, stale: Iterable[int] = ()) -> None:
        self.write(Answered(tuple(stale)))

    def unanswered(self) -> None:
        self.write(Unanswered())

    def lost(self) -> None:
        self.write(Refused())

    def dropped(
        self, acknowledgements: Iterable[Acknowledgement], returned: Iterable[Run], *, on_its_way: bool
    ) -> None:
        told = tuple(acknowledgements)
        self.write(Dropped(acknowledgements=told, returned=tuple(returned), on_its_way=on_its_way))

    def void(self, runs: Iterable[Run]) -> None:
        self.write(Voided(tuple(runs)))

    def uncounted(self, records: int) -> None:
        self.write(Uncounted(records))

    def padding(self, batches: int) -> None:
        self.write(PaddingLearnt(batches))

    def snapshot(self, token: str, *, exact: bool = True, uncounted: int = 0, half_stepped: int = 0) -> None:
        self.write(TokenTaken(token=token, exact=exact, uncounted=uncounted, half_stepped=half_stepped))

    def model(self, seen: ModelSeen) -> None:
        self.write(seen)

    def restored(self, token: str | None, *, lineage: int) -> None:
        self.write(Restored(token=token, lineage=lineage))


# Trainers written by hand -----------------------------------------------------------------------------------


SMALL = replace(SPEC, sources=(Source(name="a.csv", start=100, count=16),))


def one(folder, **options):
    (verdict,) = audit([folder], **options)
    return verdict


def changed(verdict, **values):
    """A verdict with other values: for tests of its words."""
    other = copy(verdict)
    vars(other).update(values)
    return other


def findings(verdict, kind):
    found = [f.records for f in verdict.findings if f.kind == kind]
    return [(r.epoch, r.name, r.start, r.end) for r in found]


def by(verdict, kind):
    return [f.by for f in verdict.findings if f.kind == kind]


class Writer:
    """A trainer written by hand: leases and acknowledgements of any kind."""

    def __init__(self, folder, session="s", spec=SMALL, lineage=1, ledger="L", member=1):
        self.log = HandLog(folder, session, session)
        self.log.joined(spec, ledger=ledger, lineage=lineage, batch_size=BATCH, member=member)
        self.log.model(WORD)

    def take(self, task, shard, skip, limit, *, epoch=0):
        self.log.granted(grant_of(task, shard, skip, limit, epoch=epoch))

    def say(self, task, *upto, answered=True, stale=(), way=Evidence.STEP):
        for position in upto:
            done = Acknowledgement(task=task, attempt=1, upto=position)
            self.log.intent(acknowledgements=[done], way=way)
            if answered:
                self.log.answered(stale)

    def give_back(self, task, start, had):
        """The loop is left with positions `start` to `had` in hand."""
        back = GiveBack(task=task, attempt=1, start=start)
        self.log.intent(give_backs=[back], returned=[(task, start, had)])
        self.log.answered()

    def whole(self, task, shard, skip=0, limit=8, *, epoch=0, **options):
        self.take(task, shard, skip, limit, epoch=epoch)
        self.say(task, skip + limit, **options)
