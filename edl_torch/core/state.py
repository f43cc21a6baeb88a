"""State of a master: the ledgers of all datasets and all sessions, and how sessions end and datasets go back.

Pure and synchronous: `now` is an argument, the consequences are returned, and `changes` names what a journal
has to write. Calls of trainers are answered by `dispatcher`, which checks that they are of this state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Unpack

from edl_torch.core.calls import FencedCall, Registration, RestoreCall
from edl_torch.core.changes import Changes, Mark, Version, unrecorded
from edl_torch.core.history import End, History, trainer_statuses
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.limits import Limits
from edl_torch.core.members import Member, Members, Patience
from edl_torch.core.quarantine import token_bytes
from edl_torch.core.registration import new_spec, option_differences, reconcile
from edl_torch.core.status import DatasetStatus, EventKind, MasterStatus
from edl_torch.core.token import Token
from edl_torch.errors import JournalWentBack, UnknownDataset
from edl_torch.shard import DatasetSpec, Slice

SHOWN = 20  # records in quarantine of a status that trainers ask for
WAITER_S = 3.0  # a trainer that waits asks again well within this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """Slices that a session lost: it was given up, or it `stalled` and stays."""

    session: str
    worker_id: str
    dataset: str
    slices: tuple[Slice, ...]
    stalled: bool = False

    @classmethod
    def by(
        cls, member: Member, dataset: str, slices: tuple[Slice, ...], *, stalled: bool = False
    ) -> Released:
        """Return what a member lost of a dataset."""
        session, worker_id = member.session, member.worker_id
        return cls(session=session, worker_id=worker_id, dataset=dataset, slices=slices, stalled=stalled)


class _Ledgers(dict[str, ShardLedger]):
    """Ledgers by the names of their datasets. Raises UnknownDataset for another name."""

    def __missing__(self, dataset: str) -> NoReturn:
        raise UnknownDataset(f"the master has no dataset {dataset!r}: register it with a reader or a size")


class MasterState:
    """Ledgers by dataset, and members. `ledger_id` tells its leases from those of all other masters.

    It is durable when it is given `changes`: then a journal writes down every part that changes.
    """

    def __init__(
        self,
        *,
        ledger_id: str,
        changes: Changes | None = None,
        limits: Limits | None = None,
        **patience: Unpack[Patience],
    ) -> None:
        self.ledger_id = self.first_ledger_id = ledger_id
        self.durable = changes is not None
        self.members = Members(**patience)
        self.limits = limits or Limits()
        self._changes = changes
        self._mark = unrecorded if changes is None else changes.mark
        self._version = Version()
        self._ledgers = _Ledgers()
        self._waiters: dict[str, dict[str, float]] = {}  # dataset -> sessions sent away empty, and when
        self.suspended: dict[str, str] = {}  # dataset -> why nothing of it is lent before it is restored
        self.lineage_step = 1  # from the number of a lineage to that of the next
        self.history = History()

    @property
    def version(self) -> int:
        """Number that grows when calls that wait may find something: then they look again."""
        return self._version.count

    # Datasets -----------------------------------------------------------------------------------------

    def define(self, registration: Registration, *, batch_size: int = 1) -> list[str]:
        """Make a dataset before any trainer asks for it, as the command line does.

        One that exists must have the same identity. Its options stand: a trainer may have changed them.
        Returns a line for each option that is another one here.
        """
        ledger = self._ledgers.get(registration.name)
        if ledger is None:
            self.add(new_spec(registration, batch_size))
            return []
        reconcile(ledger.spec, registration, alone=True)
        return option_differences(ledger.spec, registration)

    def add(self, spec: DatasetSpec) -> ShardLedger:
        """Add a new dataset, none of whose records is lent yet. Returns its ledger."""
        mark = unrecorded if self._changes is None else self._changes.of(spec.name)
        ledger = self._ledgers[spec.name] = ShardLedger(spec, mark, self._version)
        mark("dataset")
        mark("head")
        return ledger

    @property
    def ledgers(self) -> Iterable[ShardLedger]:
        """Ledgers of all datasets, in the order in which they were made."""
        return self._ledgers.values()

    def find_ledger(self, dataset: str) -> ShardLedger | None:
        return self._ledgers.get(dataset)

    def open_lineage(
        self, ledger: ShardLedger, position: Token | None, opened_by: tuple[int, int] = (0, 0)
    ) -> None:
        """Take a ledger to a position (None: the beginning) in a new lineage; forget calls of the old one."""
        ledger.restore(position, opened_by, step=self.lineage_step)
        dataset = ledger.spec.name
        self._waiters.pop(dataset, None)
        for number, datasets in self.members.departed_members.items():
            if datasets.pop(dataset, None) is not None:
                self._mark("departed_members", number)
        for member in self.members:  # the numbers of what was answered are those of a lineage
            if member.answers.pop(dataset, None) is not None:
                self._mark("answer", dataset, member.session)
            member.refused.pop(dataset, None)
            if member.reports.pop(dataset, None) is not None:
                self._mark("report", dataset, member.session)
        if self.suspended.pop(dataset, None) is not None:
            self._mark("suspended", dataset)

    # Sessions -----------------------------------------------------------------------------------------

    def leave(self, session: str, member: int, now: float | None = None) -> tuple[Released, ...]:
        """End the session of that `member` at its own request; what it did not train on waits again.

        `now` is for the history alone; without it that has the time of a call before.
        """
        known = self.members.get(session)
        if known is None or known.number != member:
            return ()
        return self.give_up(known, self.history.now if now is None else now)

    def give_up(self, member: Member, now: float) -> tuple[Released, ...]:
        """End a session; all that it held waits again."""
        parts = [self._ledgers[name].participants for name in member.datasets]
        trained = sum(part.throughput.shown(member.session) for part in parts)
        self.members.leave(member.session)
        self._mark("departed_members", member.number)
        self._mark("session", member.session)
        released = []
        for dataset in sorted(member.datasets):
            self._mark("answer", dataset, member.session)
            self._mark("report", dataset, member.session)
            self._waiters.get(dataset, {}).pop(member.session, None)
            slices = self._ledgers[dataset].release(member.session)
            released.append(Released.by(member, dataset, slices))
        self.history.gone(member, _all_of(released), trained, now)
        return tuple(released)

    def void_members(self) -> None:
        """End all sessions, and forget those that ended before: their calls are of another ledger."""
        for member in self.members:
            self.give_up(member, self.history.now)
        for number in self.members.departed_members:
            self._mark("departed_members", number)
        self.members.departed_members.clear()
        self._version.grow()

    def expire(self, now: float) -> tuple[Released, ...]:
        """Give up every session whose time is up, and take the leases of those that are stalled."""
        dead: list[Released] = []
        for member in self.members.dead(now):
            member.dead_because = self.members.cause_of_death(member)
            dead += self.give_up(member, now)
        stalled = [m for m in self.members if self.members.progress_deadline(m) <= now and self._holds(m)]
        return (*dead, *(released for member in stalled for released in self._take_back(member, now)))

    def next_deadline(self, now: float) -> float | None:
        """Return when to call `expire` again if no session is heard of before."""
        dead = self.members.next_deadline()
        if dead is None:
            return None
        idle = now + (self.members.progress_timeout_s or math.inf)  # of those who may get a lease meanwhile
        stalled = (self.members.progress_deadline(m) if self._holds(m) else idle for m in self.members)
        return min(dead, *stalled)

    def _holds(self, member: Member) -> bool:
        for name in member.datasets:  # noqa: SIM110  with every lease call: a generator costs twice as much
            if self._ledgers[name].leases.holds(member.session):
                return True
        return False

    def _take_back(self, member: Member, now: float) -> list[Released]:
        """Take all leases of a stalled member, and nothing else."""
        member.progressed = member.stalled_at = now
        lost = []
        for dataset in sorted(member.datasets):
            slices = self._ledgers[dataset].take_back(member.session)
            answer = member.answers.get(dataset)
            if answer is not None:  # a repeat must not lend it again
                member.answers[dataset] = replace(answer, grants=())
                self._mark("answer", dataset, member.session)
            lost.append(Released.by(member, dataset, slices, stalled=True))
        why = f"its loop did not move on for {self.members.progress_timeout_s:g} s"
        worker = member.worker_id
        self.history.add(EventKind.STALLED, now, worker_id=worker, lost=_all_of(lost), text=why)
        return lost

    # Who waits ----------------------------------------------------------------------------------------

    def wanted(self, dataset: str, session: str, now: float) -> bool:
        """Return whether another trainer was sent away empty a moment ago, and so waits for records."""
        waiters = self._waiters.get(dataset)
        if not waiters:
            return False
        for other, since in reversed(waiters.items()):  # the last to ask comes first
            if now - since > WAITER_S:
                return False
            if other != session:
                return True
        return False

    def asked_back(self, dataset: str, now: float) -> tuple[str, ...]:
        """Return the sessions that hold leases while another trainer waits: they may give some back."""
        ledger = self._ledgers[dataset]
        holders = (member.session for member in self.members if ledger.leases.holds(member.session))
        return tuple(session for session in holders if self.wanted(dataset, session, now))

    # Tokens -------------------------------------------------------------------------------------------

    def token(self, dataset: str) -> str:
        """Return the dataset's position as a token, for observers: it is no trainer's checkpoint."""
        return self._token_of(self._ledgers[dataset])

    def _token_of(self, ledger: ShardLedger) -> str:
        token = ledger.snapshot().encode()
        self.limits.check_token(token)
        return token

    def go_back(
        self,
        dataset: str,
        token: str | None,
        opened_by: tuple[int, int] = (0, 0),
        now: float | None = None,
    ) -> int:
        """Take the dataset back to a token (None: to the beginning), whoever asks. Returns the new lineage.

        `opened_by` is the member that asked and the number of its request; (0, 0) for the master itself.
        `now` is for the history alone, as that of `leave`.
        """
        ledger = self._ledgers[dataset]
        position = None if token is None else self._position(dataset, token)
        self.open_lineage(ledger, position, opened_by)
        at = self.history.now if now is None else now
        self.history.watch(ledger, at).restores += 1
        to = "the beginning" if token is None else f"a checkpoint of {ledger.acknowledged:,} records"
        self.history.add(EventKind.RESTORED, at, dataset=dataset, text=to)
        return ledger.lineage

    def _position(self, dataset: str, token: str) -> Token:
        self.limits.check_token(token)
        position = Token.decode(token)
        bad = position.quarantine
        self.limits.check_quarantine(dataset, records=len(bad), size=token_bytes(bad))
        self.limits.check_slices(len(position.open) + len(position.remainders))
        return position

    # For people ---------------------------------------------------------------------------------------

    def dataset_status(self, dataset: str, now: float | None = None) -> DatasetStatus:
        """Return the dataset's progress, for observers. Without `now` its rate is that of a call before."""
        return self._status_of(self._ledgers[dataset], self.history.now if now is None else now)

    def _status_of(self, ledger: ShardLedger, now: float) -> DatasetStatus:
        """Return the status with the first few records of the quarantine only: trainers ask often."""
        status = ledger.status(self.ledger_id, ledger.quarantine.first(SHOWN))
        return self.history.watch(ledger, now).filled(status, now)

    def epoch_ends(self, now: float) -> list[End]:
        """Note in the history what has come about; to be called when `version` has changed.

        Returns the ends of epochs and datasets.
        """
        return self.history.note_ends(self._ledgers.values(), self.suspended, now)

    def status(self, now: float) -> MasterStatus:
        """Return the state of the master; of all quarantines together as much as one may have."""
        history = self.history
        history.tick(self._ledgers.values(), now)
        self.epoch_ends(now)
        datasets, left = [], self.limits.quarantine_bytes
        for ledger in self._ledgers.values():
            shown = ledger.quarantine.within(left)
            left -= token_bytes(shown)
            status = ledger.status(self.ledger_id, shown)
            datasets.append(history.watch(ledger, now).filled(status, now, picture=True))
        return MasterStatus(
            ledger=self.ledger_id,
            durable=self.durable,
            datasets=tuple(datasets),
            trainers=tuple(trainer_statuses(self.members, self._ledgers, history, now)),
            suspended=dict(self.suspended),
            time=history.wall(now),
            started_at=history.started_at or 0.0,
            events=tuple(history.events),
            departed=tuple(history.departed),
            event_counts={kind.value: count for kind, count in history.counts.items()},
        )

    def __repr__(self) -> str:
        counts = f"datasets={len(self._ledgers)} sessions={len(self.members)}"
        return f"<{type(self).__name__} {self.ledger_id} {counts}>"


def _all_of(released: Iterable[Released]) -> tuple[Slice, ...]:
    return tuple(item for some in released for item in some.slices)


# A journal that went back in time ---------------------------------------------------------------------

LINEAGES = 1 << 20  # how far apart the numbers of lineages may be that follow each other


class Rollback:
    """Check of calls for a rollback of the journal of a state, and suspension of all datasets then."""

    def __init__(self, state: MasterState, mark: Mark) -> None:
        self._state = state
        self._mark = mark
        self._nonce = 0

    def begin_again(self, nonce: int) -> None:
        """Start on a state of before, which may have had a future that is lost.

        What that future named is not named again: `nonce` is a large random number, of this start alone.
        """
        self._nonce = nonce
        self._state.lineage_step = 1 + nonce % LINEAGES
        self._state.members.skip(nonce)
        self._mark("next", "member")
        self._mark("next", "gaps")

    def check(self, call: FencedCall[Any]) -> None:
        """Raise JournalWentBack if this state is older than what the caller was told, or known to be."""
        state = self._state
        own = call.fence.ledger == state.ledger_id
        why = state.suspended.get(call.dataset)
        if why is not None and not (isinstance(call, RestoreCall) and own):
            raise JournalWentBack(why)
        if own:
            found = evidence(call, state.members, state.find_ledger(call.dataset))
            if found:
                raise JournalWentBack(self.suspend(f"a call of session {call.session!r} names {found}"))

    def suspend(self, why: str) -> str:
        """Lend nothing of any dataset until it is restored: the state is older than what trainers were told.

        All leases and members are void at once: from now on this is another ledger. Returns the message for
        trainers.
        """
        self._become_another_ledger(why)
        reason = went_back(why)
        for ledger in self._state.ledgers:
            self._state.suspended[ledger.spec.name] = reason
            self._mark("suspended", ledger.spec.name)
        return reason

    def accept_older(self) -> None:
        """Go on from this state though it may be older than what trainers were told.

        Each dataset gets a new lineage, in another ledger. What the state has forgotten is lent again.
        """
        self._become_another_ledger("accepted")
        for ledger in self._state.ledgers:
            self._state.open_lineage(ledger, ledger.snapshot())

    def _become_another_ledger(self, why: str) -> None:
        state = self._state
        text = f"{state.ledger_id} {self._nonce} {why}"
        state.ledger_id = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]
        self._mark("ledger", "id")
        state.void_members()

    def __repr__(self) -> str:
        return f"<Rollback suspended={len(self._state.suspended)}>"


def evidence(call: FencedCall[Any], members: Members, ledger: ShardLedger | None) -> str:
    """Return the number in the call that was never given, and the known one, in words; '' for none.

    The call is of this master's ledger. `ledger` is that of its dataset, None where there is none of
    the name. A call of an older lineage proves nothing: a restore has made it void, whatever was lost before.
    """
    fence = call.fence
    if ledger is not None and fence.lineage != ledger.lineage:
        return _beyond("lineage", fence.lineage, ledger.lineage)
    member = members.get(call.session)
    if member is None or member.number != fence.member:
        if not members.may_have_given(fence.member):
            return (
                f"member {fence.member}, which the journal never gave: its next one is {members.next_number}"
            )
        known = members.departed_members.get(fence.member, {}).get(call.dataset)
        if known is None:
            return ""  # it registered since the start, or the journal has its end: nothing of it is lost
        asked, reported = known
    else:
        asked, reported = member.asked(call.dataset), member.reports.get(call.dataset, 0)
    return _beyond("the answer to lease call", call.asked, asked) or _beyond(
        "the answer to report", call.reported, reported
    )


def _beyond(what: str, named: int, known: int) -> str:
    return f"{what} {named}, and the journal knows none beyond {known}" if named > known else ""


def went_back(why: str) -> str:
    """Return the message for trainers and people."""
    return (
        f"the master's journal is older than what its trainers were told: {why}. Nothing is lent until the "
        f"dataset is restored: start all trainers again from one checkpoint (load_state_dict, "
        f"load_checkpoint), or from the beginning (load_state_dict(None)). Or start the master once with "
        f"--accept-older-journal: it goes on from the journal, and lends again what that has forgotten"
    )
