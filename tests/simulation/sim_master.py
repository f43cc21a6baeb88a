"""A master in the simulation: the real dispatcher in rows of a journal, through all its lives.

Plays the shell around it (long polls, streams, commits before answers, the clock of the dead) on the hub, as
`master.host` and `master.durable` do on an event loop. What is decided is decided by the dispatcher.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sim_hub import Hub
from sim_model import BrokenPromise, History, Position

from edl_torch.core.calls import (
    ConfirmCall,
    LeaseAnswer,
    LeaseCall,
    PassState,
    ProgressCall,
    RegisterCall,
    ReportCall,
    Request,
    RestoreCall,
    SetWeightsCall,
    SnapshotCall,
    StatusCall,
)
from edl_torch.core.changes import Changes, Key
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.persistence import load, update
from edl_torch.core.status import DatasetStatus, MasterStatus
from edl_torch.errors import EdlError, SessionLost, StaleLease, Unsupported
from edl_torch.shard import MixtureSegment

if TYPE_CHECKING:
    from sim_network import Heartbeat, SimCall

COMMIT_S = 0.002
CALL_BACK_S = 0.2
KEPT = 2000  # commits that can be taken back
WAKE_S = 0.02  # news are told to all that wait together
DATASET = "training"


@dataclass(frozen=True)
class LeaveCall(Request[None]):
    """A session says goodbye: `MasterApi.leave`, on a way where it may be late or lost."""

    session: str
    member: int


class SimMaster:
    """`limits` are the dispatcher's. An answer leaves once all that it could have seen is committed."""

    def __init__(self, hub: Hub, model: History, **limits: float) -> None:
        self.hub = hub
        self.model = model
        self.up = False
        self.deaths = 0
        self.tokens: list[tuple[str, Position]] = []
        self._limits = limits
        self._rows: dict[Key, Any] = {}
        self._undo: deque[tuple[float, dict[Key, Any]]] = deque(maxlen=KEPT)  # of each commit: rows of before
        self._ledger_number = 1
        self._nonces = random.Random(1)
        self._changes = Changes()
        self.start()

    @property
    def ledger(self) -> ShardLedger:
        """The dataset's."""
        ledger = self.dispatcher.find_ledger(DATASET)
        assert ledger is not None
        return ledger

    # Lives ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """From the rows."""
        if self.up:
            return
        self.up = True
        rows = dict(sorted(self._rows.items()))
        self.dispatcher: Dispatcher = load(
            rows,
            ledger_id=f"sim{self._ledger_number}",
            now=self.hub.now,
            changes=self._changes,
            **self._limits,
        )
        if self.deaths:  # on a journal that is there, be it empty
            self.dispatcher.rollback.begin_again(self._nonces.randrange(1 << 40))
        self.dispatcher.members.resume(self.hub.now)
        self._version = self.dispatcher.version
        self._streams: dict[str, Heartbeat] = {}
        self._polls: dict[int, tuple[LeaseCall, SimCall]] = {}
        self._poll_number = 0
        self._held: list[tuple[SimCall | None, Any, EdlError | None]] = []
        self._seen: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._adds_up = False  # at the next commit all is counted again: an epoch is over
        self._called_back = -1.0
        self._committing = self._looking = False
        self._life = self.deaths
        self._reap(self._life)

    def kill(self) -> None:
        """As kill -9: what was not committed has never been, and nobody was told of it."""
        if not self.up:
            return
        self.up = False
        self.deaths += 1
        self._changes.take()
        for _, reply in self._polls.values():
            self.hub.after(0.001, reply.fail)
        for held, _, _ in self._held:
            if held is not None:
                self.hub.after(0.001, held.fail)
        for stream in self._streams.values():
            stream.breaks()

    def roll_back(self, *, commits: int = 0, seconds: float = 0.0) -> int:
        """The journal of a dead master goes back: by so many commits, or by all of the last seconds.

        Returns the number of commits that are lost.
        """
        assert not self.up
        lost = 0
        while self._undo and (lost < commits or self._undo[-1][0] > self.hub.now - seconds):
            _, before = self._undo.pop()
            for key, row in before.items():
                self._write(key, row)
            lost += 1
        return lost

    def forget(self) -> None:
        """A dead master had no journal: the next one keeps another ledger, and knows nothing."""
        assert not self.up
        self._rows.clear()
        self._undo.clear()
        self._ledger_number += 1

    # Calls ----------------------------------------------------------------------------------------------

    def receive(self, reply: SimCall, kind: str, call: Any, wait_s: float) -> None:
        """A call arrives."""
        if not self.up:
            self.hub.after(0.001, reply.fail)
            return
        try:
            if kind == "lease":
                self._lease(reply, call, wait_s)
                return
            value = getattr(self, f"_{kind}")(call)
        except EdlError as error:
            self.model.note(self.hub.now, kind, type(error).__name__)
            self._answer(reply, None, error)
        else:
            self._answer(reply, value, None)

    def _answer(self, reply: SimCall | None, value: Any, error: EdlError | None) -> None:
        if self.dispatcher.version != self._version:
            self._version = self.dispatcher.version
            if self._polls and not self._looking:
                self._looking = True
                self.hub.after(WAKE_S + 2e-5 * len(self._polls), self._look, self._life)
        if self._changes or self._held or self._seen:
            self._held.append((reply, value, error))
            if not self._committing:
                self._committing = True
                self.hub.after(COMMIT_S, self._commit, self._life)
        elif reply is not None:
            reply.send(value, error)

    def _status(self, call: StatusCall) -> MasterStatus:
        if call.dataset is None:
            raise Unsupported("nobody reads what a waiting trainer would say of the others")
        return self.dispatcher.observe(call, self.hub.now)

    def _see(self, watch: Callable[..., None], *arguments: Any) -> None:
        """Something happened; the model hears of it when it is committed."""
        self._seen.append((watch, arguments))

    def _commit(self, life: int) -> None:
        if life != self.deaths or not self.up:
            return
        self._committing = False
        before = {}
        for key, row in update(self.dispatcher, self._changes.take()).items():
            before[key] = self._rows.get(key)
            self._write(key, row)
        if before:
            self._undo.append((self.hub.now, before))
        seen, self._seen = self._seen, []
        held, self._held = self._held, []
        for watch, arguments in seen:
            watch(*arguments)
        ledger = self.dispatcher.find_ledger(DATASET)
        if ledger is not None:
            self.model.agree(ledger)
            if self._adds_up:
                self.model.add_up(ledger)
        self._adds_up = False
        for reply, value, error in held:
            if reply is not None:
                reply.send(value, error)

    def _write(self, key: Key, row: Any) -> None:
        if row is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = row

    def _register(self, call: RegisterCall) -> Any:
        self.model.note(self.hub.now, "register", call.session)
        return self.dispatcher.register(call, self.hub.now)

    def _report(self, call: ReportCall) -> Any:
        answer = self.dispatcher.report(call, self.hub.now)
        self.model.note(self.hub.now, call.session, call.request, answer.stale)
        self._see(self.model.reported, call, answer, self.hub.now)
        return answer

    def _confirm(self, call: ConfirmCall) -> Any:
        self.model.note(self.hub.now, "confirm", call.session)
        return self.dispatcher.confirm(call, self.hub.now)

    def _snapshot(self, call: SnapshotCall) -> str:
        token = self.dispatcher.snapshot(call, self.hub.now)
        self._see(lambda: self.tokens.append((token, self.model.position())))
        return token

    def _restore(self, call: RestoreCall) -> int:
        position = next((found for text, found in reversed(self.tokens) if text == call.token), None)
        ledger = self.dispatcher.find_ledger(call.dataset)
        before = ledger and ledger.lineage
        lineage = self.dispatcher.restore(call, self.hub.now)
        self.model.note(self.hub.now, "restore", lineage)
        if lineage != before:  # else it was repeated
            if call.fence.lineage != before:
                raise BrokenPromise(
                    f"a restore in place of lineage {call.fence.lineage} replaced {before}: {call}"
                )
            self._see(self.model.restored, position, lineage)
        return lineage

    def _set_weights(self, call: SetWeightsCall) -> MixtureSegment:
        segment = self.dispatcher.set_weights(call, self.hub.now)
        self.model.note(self.hub.now, "weights", segment.start)
        self._see(self.model.reweighed, call, segment)
        return segment

    def _progress(self, call: ProgressCall) -> DatasetStatus:
        return self.dispatcher.progress(call, self.hub.now)

    def _leave(self, call: LeaveCall) -> None:
        self.model.note(self.hub.now, "leave", call.session, call.member)
        self._see(self.model.released, self.dispatcher.leave(call.session, call.member))
        if self.dispatcher.members.get(call.session) is None:
            self._streams.pop(call.session, None)

    # Leases, and those that wait for one ----------------------------------------------------------------

    def _lease(self, reply: SimCall, call: LeaseCall, wait_s: float) -> None:
        if wait_s <= 0:
            self._leased(call, reply, self.dispatcher.lease(call, self.hub.now))
            return
        self.dispatcher.heard(call, self.hub.now)
        if not self._poll(call, reply):
            self._call_back(call.dataset)
            self._poll_number += 1
            self._polls[self._poll_number] = call, reply
            self.hub.after(wait_s, self._waited, self._life, self._poll_number)
            self._answer(None, None, None)  # it may have closed something

    def _poll(self, call: LeaseCall, reply: SimCall) -> bool:
        answer = self.dispatcher.poll(call, self.hub.now)
        if answer is not None:
            self._leased(call, reply, answer)
        return answer is not None

    def _leased(self, call: LeaseCall, reply: SimCall, answer: LeaseAnswer) -> None:
        tasks = tuple(grant.task for grant in answer.grants)
        self.model.note(self.hub.now, call.session, call.request, answer.epoch, tasks)
        self._see(self.model.leased, call, answer)
        if answer.state is not PassState.OPEN:
            self._see(self.model.epoch_over, answer.epoch)
            self._adds_up = True
        if answer.nothing_yet:
            self._call_back(call.dataset)
        self._answer(reply, answer, None)

    def _waited(self, life: int, number: int) -> None:
        if life != self.deaths or not self.up or number not in self._polls:
            return
        call, reply = self._polls.pop(number)
        try:
            self._leased(call, reply, self.dispatcher.answer(call, self.hub.now))
        except EdlError as error:
            self._answer(reply, None, error)

    def _look(self, life: int) -> None:
        """There is news: every call that waits looks again."""
        if life != self.deaths or not self.up:
            return
        self._looking = False
        for number, (call, reply) in tuple(self._polls.items()):
            try:
                if self._poll(call, reply):
                    del self._polls[number]
            except EdlError as error:
                del self._polls[number]
                self._answer(reply, None, error)

    def forge(self, call: ReportCall) -> None:
        """A report that no trainer sent: of a lease that is another session's, or another attempt."""
        if self.up:
            with suppress(StaleLease):  # of a history that is over: refused as a whole
                self._report(call)
            self._answer(None, None, None)

    # Presence -------------------------------------------------------------------------------------------

    def stream_of(self, session: str) -> Heartbeat | None:
        """The stream that stands."""
        return self._streams.get(session) if self.up else None

    def attend(self, stream: Heartbeat, asked_at: float) -> None:
        """A stream is asked for."""
        if not self.up:
            stream.breaks()
            return
        stream.asked_at = asked_at
        self._streams[stream.session] = stream
        self.dispatcher.members.stream_opened(stream.session, self.hub.now)
        self._ask(stream, asked_at)

    def _ask(self, stream: Heartbeat, asked_at: float) -> None:
        """Ask for a heartbeat, again and again while the stream stands."""
        if self.stream_of(stream.session) is stream and stream.asked_at == asked_at:
            members = self.dispatcher.members
            stream.attending(members.lease_timeout_s, members.progress_timeout_s)
            self.hub.after(members.heartbeat_s, self._ask, stream, asked_at)

    def stream_broke(self, session: str) -> None:
        """A stream ended: its process died, or the connection did."""
        if self.up and session in self._streams:
            self.model.note(self.hub.now, "broke", session)
            self._streams.pop(session).breaks()
            self.dispatcher.members.stream_broke(session, self.hub.now)

    def heartbeat(self, stream: Heartbeat, asked_at: float, progress: int, member: int) -> None:
        """A heartbeat arrives."""
        if not self.up:
            return
        try:
            self.dispatcher.heartbeat(stream.session, member, self.hub.now, progress)
        except SessionLost:
            stream.answered(asked_at, False)
        else:
            stream.answered(asked_at, True)

    def _call_back(self, dataset: str) -> None:
        now = self.hub.now
        if now - self._called_back < CALL_BACK_S:
            return
        self._called_back = now
        for session in self.dispatcher.asked_back(dataset, now):
            if session in self._streams:
                self._streams[session].wanted(dataset)

    def _reap(self, life: int) -> None:
        """What the reaper does at each deadline, at short intervals."""
        if life != self.deaths or not self.up:
            return
        lost = self.dispatcher.expire(self.hub.now)
        if lost:
            self.model.note(self.hub.now, "expired", [item.session for item in lost])
            self._see(self.model.released, lost)
            self._answer(None, None, None)
        self.hub.after(0.25 + 1e-4 * len(self.dispatcher.members), self._reap, life)
