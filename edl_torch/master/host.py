"""Host of a dispatcher on one event loop: long polls, session streams and the expiry of sessions.

One loop, so no locks: between two awaits nobody else touches the dispatcher. `servicer` speaks grpc.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar, cast

from edl_torch.core.calls import LeaseAnswer, LeaseCall, RegisterCall, Request, RestoreCall, StatusCall
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.limits import printable
from edl_torch.core.state import Released
from edl_torch.core.status import MasterStatus
from edl_torch.errors import EdlError, JournalError
from edl_torch.master.durable import GroupCommit

A = TypeVar("A")
T = TypeVar("T")

log = logging.getLogger("edl_torch.master")

MAX_WAIT_S = 30.0  # of one lease call
LOOK_AGAIN_S = 1.0  # a waiting call looks at least so often, and so stays known as waiting
CALL_BACK_S = 0.2  # between two rounds of `wanted` events of a dataset
REAPER_PAUSE_S = 1.0  # after a failure of the reaper itself
STOPPED_S = 1.0  # a master that wakes so late was stopped itself, or its machine was; it looks as often


class SessionStream:
    """Messages for one session: a set of datasets, so that a slow reader costs no memory."""

    def __init__(self) -> None:
        self._wanted: dict[str, None] = {}
        self._news = asyncio.Event()
        self.ended = False

    def want(self, dataset: str) -> None:
        """Tell the session that another trainer waits for records of the dataset."""
        self._wanted[dataset] = None
        self._news.set()

    def end(self) -> None:
        self.ended = True
        self._news.set()

    async def next(self, until: float | None = None) -> str | None:
        """Return the next wanted dataset; None at the end, or where there is none `until` a loop's time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not (self._wanted or self.ended):
                    self._news.clear()
                    await self._news.wait()
        return self._wanted.popitem()[0] if self._wanted and not self.ended else None


class MasterHost:
    """Dispatcher with the calls and streams that wait on it. `start()` and `close()` run on its loop.

    With `commits` whatever it answers is to go through `durably`.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        clock: Callable[[], float] = time.monotonic,
        commits: GroupCommit | None = None,
    ) -> None:
        self.dispatcher = dispatcher
        self._commits = commits
        self._clock = clock
        self._version = dispatcher.version
        self._ledger_id = dispatcher.ledger_id
        self._changed = asyncio.Event()
        self._streams: dict[str, SessionStream] = {}
        self._called_back: dict[str, float] = {}
        self._deadlines_changed = asyncio.Event()
        self._reaps_at: float | None = None  # None: whenever a deadline comes up
        self._reaper: asyncio.Task[None] | None = None
        self._woke_at = -math.inf  # by time.monotonic(): when this process last went on after a stop
        dispatcher.history.set_wall(clock(), time.time())
        self.draining = False  # about to stop

    def start(self) -> None:
        """Begin to expire sessions; those known from before get their full time to come back."""
        self.dispatcher.members.resume(self._clock())
        self._log_ends()
        self._reaper = asyncio.create_task(self._reap(), name="edl-reaper")

    def drain(self) -> None:
        """Answer every waiting call with what there is, and end every stream: the master is about to stop."""
        self.draining = True
        for stream in self._streams.values():
            stream.end()
        self.wake()

    async def close(self) -> None:
        """End the task that `start` began, and commit what is left."""
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
        if self._commits is not None:
            await self._commits.close()

    # The journal ----------------------------------------------------------------------------------------

    def durably(self, answering: Awaitable[T]) -> Awaitable[T]:
        """Return the answer, or raise the refusal, once all that it could have seen is committed.

        Raises MasterUnavailable when that cannot be: whoever asked will repeat the call.
        """
        return answering if self._commits is None else _once_committed(answering, self._commits)

    async def committed(self) -> None:
        """Wait until all that has happened so far is in the journal."""
        if self._commits is not None:
            await self._commits.committed()

    @property
    def failure(self) -> JournalError | None:
        """Reason why nothing can be answered any more, or None."""
        return None if self._commits is None else self._commits.failure

    async def failed(self) -> None:
        """Wait for `failure`."""
        if self._commits is None:
            await asyncio.get_running_loop().create_future()
        else:
            await self._commits.failed()

    # Calls ----------------------------------------------------------------------------------------------

    def apply(self, action: Callable[[Dispatcher, float], T]) -> T:
        """Let the dispatcher act at the present time, and wake the calls that wait."""
        try:
            return action(self.dispatcher, self._clock())
        finally:
            version = self.dispatcher.version
            if version != self._version:
                self._version = version
                self._log_ends()
                self.wake()
            if self._commits is not None:
                self._commits.changed()
            if self._ledger_id != self.dispatcher.ledger_id:
                self._ledger_id = self.dispatcher.ledger_id
                log.error("suspended: %s", printable(next(iter(self.dispatcher.suspended.values()), "")))

    def _log_ends(self) -> None:
        for ledger, epoch, seconds in self.dispatcher.epoch_ends(self._clock()):
            name, epochs = printable(ledger.spec.name), ledger.spec.num_epochs or "endless"
            bad = len(ledger.quarantine)
            counts = f"acknowledged={ledger.acknowledged} quarantined={bad} dropped={ledger.dropped}"
            if epoch is None:
                log.info("finished dataset=%s epochs=%s %s", name, epochs, counts)
            else:
                log.info(
                    "epoch over dataset=%s epoch=%d of=%s seconds=%.1f %s",
                    *(name, epoch, epochs, seconds, counts),
                )

    async def call(self, request: Request[A], wait_s: float = 0.0) -> A:
        """Answer a call; one for leases waits up to `wait_s` while there are none and the pass is open."""
        if isinstance(request, LeaseCall):
            return cast("A", await self._lease(request, wait_s))
        return self._answer(request)

    def status(self) -> MasterStatus:
        """Return the state of the master, for people."""
        return self._answer(StatusCall())

    @property
    def last_event(self) -> int:
        """Number of the last event of the status."""
        return self.dispatcher.history.latest

    def _answer(self, request: Request[A]) -> A:
        if isinstance(request, StatusCall):
            self.dispatcher.history.set_wall(self._clock(), time.time())
        answer: Any = self.apply(lambda dispatcher, now: dispatcher.call(request, now))
        if isinstance(request, RegisterCall):
            self._reap_within(self.dispatcher.members.lease_timeout_s)
            log.info(
                "registered dataset=%s worker=%s session=%s",
                *map(printable, (answer.spec.name, request.worker_id, request.session)),
            )
        elif isinstance(request, RestoreCall):
            log.info(
                "restored dataset=%s session=%s lineage=%d before=%d to=%s",
                *(printable(request.dataset), printable(request.session), answer, request.fence.lineage),
                "the beginning" if request.token is None else "a checkpoint",
            )
        return cast("A", answer)

    async def _lease(self, call: LeaseCall, wait_s: float) -> LeaseAnswer:
        if wait_s > 0:
            answer = await self._poll(call, wait_s)
            if answer is not None:
                return answer
            answer = self.apply(lambda dispatcher, now: dispatcher.answer(call, now))
        else:
            answer = self.apply(lambda dispatcher, now: dispatcher.lease(call, now))
        if answer.nothing_yet:
            self._call_back(call.dataset)
        return answer

    async def _poll(self, call: LeaseCall, wait_s: float) -> LeaseAnswer | None:
        self.apply(lambda dispatcher, now: dispatcher.heard(call, now))
        deadline = self._clock() + min(wait_s, MAX_WAIT_S)
        while (left := deadline - self._clock()) > 0 and not self.draining:
            answer = self.apply(lambda dispatcher, now: dispatcher.poll(call, now))
            if answer is not None:
                return answer
            self._call_back(call.dataset)
            await _set_within(self._changed, min(left, LOOK_AGAIN_S))
        return None

    def leave(self, session: str, member: int) -> None:
        """End the session of that `member`."""
        log_released(self.apply(lambda dispatcher, now: dispatcher.leave(session, member, now)), "left")
        if self.dispatcher.members.get(session) is not None:
            return  # another member by now
        stream = self._streams.pop(session, None)
        if stream is not None:
            stream.end()

    def wake(self) -> None:
        """Let every waiting call look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float | None) -> None:
        """Wait until a waiting call should look again, or for so long."""
        await _set_within(self._changed, timeout_s)

    # Streams --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def attending(self, session: str) -> Iterator[SessionStream]:
        """The session's stream stands while this is open. A newer one of the same session replaces it."""
        older = self._streams.get(session)
        self.dispatcher.limits.check_stream(session, streams=len(self._streams) + (older is None))
        stream = SessionStream()
        if older is not None:
            older.end()
        self._streams[session] = stream
        if self.draining:
            stream.end()
        self.apply(lambda dispatcher, now: dispatcher.members.stream_opened(session, now))
        try:
            yield stream
        finally:
            self._detach(session, stream)

    def _detach(self, session: str, stream: SessionStream) -> None:
        if self._streams.get(session) is not stream:
            return  # replaced, or the session has left
        del self._streams[session]
        if not self.draining:
            log.info("stream broke session=%s", printable(session))
            self.apply(lambda dispatcher, now: dispatcher.members.stream_broke(session, now))
            self._reap_within(self.dispatcher.members.grace_s)

    def _call_back(self, dataset: str) -> None:
        """Tell the others that a trainer waits: they may hold leases of which nothing was drawn."""
        now = self._clock()
        if now - self._called_back.get(dataset, float("-inf")) < CALL_BACK_S:
            return
        self._called_back[dataset] = now
        for session in self.dispatcher.asked_back(dataset, now):
            stream = self._streams.get(session)
            if stream is not None:
                stream.want(dataset)

    # The dead -------------------------------------------------------------------------------------------

    async def _reap(self) -> None:
        while True:
            try:
                await self._reap_once()
            except Exception:  # the task must outlive any single failure: nobody else frees the leases
                log.exception("reaper failed; it goes on")
                await asyncio.sleep(REAPER_PAUSE_S)

    def _reap_within(self, seconds: float) -> None:
        """Somebody may be dead so soon. Each look is at every session, so none is made without need."""
        if self._reaps_at is None or self._clock() + seconds < self._reaps_at:
            self._deadlines_changed.set()

    async def _reap_once(self) -> None:
        self._deadlines_changed.clear()
        self._reaps_at = deadline = self.dispatcher.next_deadline(self._clock())
        wait_s = math.inf if deadline is None else max(0.0, deadline - self._clock())
        await self._wait(wait_s, self._deadlines_changed)
        # The silence may have been this process' own: what trainers said meanwhile is heard first.
        while (left := self._woke_at + self.dispatcher.members.heartbeat_s - time.monotonic()) > 0:
            await self._wait(left, asyncio.Event())
        released = self.apply(lambda dispatcher, now: dispatcher.expire(now))
        log_released(tuple(item for item in released if not item.stalled), "expired")
        log_released(tuple(item for item in released if item.stalled), "stalled")

    async def _wait(self, seconds: float, event: asyncio.Event) -> None:
        """Wait so long, or until the event is set, and note where this process was stopped meanwhile."""
        until = time.monotonic() + seconds
        while not event.is_set() and (left := until - (begun := time.monotonic())) > 0:
            step = min(left, STOPPED_S)
            await _set_within(event, step)
            if time.monotonic() - begun > step + STOPPED_S:
                self._woke_at = time.monotonic()

    def __repr__(self) -> str:
        return f"<MasterHost {self.dispatcher!r} streams={len(self._streams)}>"


async def _once_committed(answering: Awaitable[T], commits: GroupCommit) -> T:
    try:
        answer = await answering
    except EdlError:
        await commits.committed()
        raise
    await commits.committed()
    return answer


async def _set_within(event: asyncio.Event, timeout_s: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


def log_released(released: tuple[Released, ...], why: str) -> None:
    """Log a line for each dataset that lost a trainer."""
    for item in released:
        records = sum(s.limit for s in item.slices)
        log.info(
            "released dataset=%s worker=%s session=%s why=%s slices=%d records=%d",
            *map(printable, (item.dataset, item.worker_id, item.session)),
            *(why, len(item.slices), records),
        )
