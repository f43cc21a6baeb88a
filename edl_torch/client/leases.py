"""Fetches leases for the passes of one trainer over one dataset, and deals them to its loader workers.

Leases are asked for only while a pass is open; a few are fetched ahead where the master is another process.
It does not know what a record is, nor when one has been trained on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum

from edl_torch.client.confirming import Confirmer
from edl_torch.client.membership import Answered
from edl_torch.client.port import MasterPort
from edl_torch.client.threads import SYSTEM, Thread, Threads
from edl_torch.core.calls import NEW_PASS, Fence, Grant, LeaseAnswer, LeaseCall, PassState
from edl_torch.errors import SessionLost

POLL_S = 1.0  # the longest single wait: so a closed pass or Ctrl-C is noticed soon


class Mode(Enum):
    """Who ends a pass: `ElasticDataLoader`, which waits for the epoch's verdict, or the one who fetches."""

    ELASTIC = "elastic"
    PLAIN = "plain"


class LeaseSource:
    """The leases of the pass that is open. `holds()` says whether the trainer has unacknowledged records."""

    def __init__(
        self,
        port: MasterPort,
        session: str,
        dataset: str,
        *,
        confirmer: Confirmer,
        on_grant: Callable[[Grant], None],
        on_unwanted: Callable[[list[Grant]], None],
        on_lost: Callable[[Fence], None],
        holds: Callable[[], bool],
        threads: Threads = SYSTEM,
        answered: Answered | None = None,
    ) -> None:
        self._membership = Fence()
        self._port = port
        self._session = session
        self._dataset = dataset
        self._confirmer = confirmer
        self._on_grant = on_grant
        self._on_unwanted = on_unwanted
        self._on_lost = on_lost
        self._holds = holds
        self._threads = threads
        self._answered = answered or Answered()
        self._changed = threads.condition()
        self._ready: deque[Grant] = deque()
        self._reserved: dict[str, deque[Grant]] = {}  # the rest of a bundle, for the stream that began it
        self._streams: set[str] = set()
        self._pass = 0
        self._open = False
        self._mode = Mode.PLAIN
        self._epoch = NEW_PASS
        self._joins = True  # whichever epoch runs
        self._state = PassState.OPEN
        self._granted = 0  # leases of this pass
        self._asking = False
        self._answers = 0
        self._dry_answers = 0  # of those, the ones without a lease
        self._request = 0  # the last one whose answer has come
        self._lost_in = 0  # the pass that made the one after it, if its answer did not come
        self._ahead = not port.in_process
        self._error: Exception | None = None
        self._closed = False
        self._thread: Thread | None = None

    def __repr__(self) -> str:
        state = f"open epoch={self._epoch}" if self._open else "closed"
        return f"<LeaseSource pass={self._pass} {state} ready={len(self._ready)}>"

    @property
    def pass_number(self) -> int:
        """The number of the pass that is open, or was last."""
        return self._pass

    @property
    def mode(self) -> Mode:
        """Who ends the pass that is open, or who ended the last one; PLAIN before the first."""
        return self._mode

    @property
    def is_open(self) -> bool:
        """Whether a pass is open."""
        return self._open

    @property
    def epoch(self) -> int:
        """The epoch of the pass that is open, or was last; NEW_PASS while it has none."""
        return self._epoch

    @property
    def read_nothing(self) -> bool:
        """Whether the pass has had no lease at all."""
        return not self._granted

    def follow(self, membership: Fence, forget: Callable[[], None]) -> None:
        """Ask as this member from now on; what was fetched before is void, and `forget` lets go of it.

        At once: a lease of the old member that arrives later is not taken, and one of the new member is not
        forgotten, which would be on loan for ever.
        """
        with self._changed:
            self._membership = membership
            self._ready.clear()
            self._reserved.clear()
            forget()

    def void(self, tasks: tuple[int, ...]) -> None:
        """The master took these leases back: nobody draws them any more."""
        with self._changed:
            self._ready = deque(grant for grant in self._ready if grant.task not in tasks)
            for stream, reserved in self._reserved.items():
                self._reserved[stream] = deque(grant for grant in reserved if grant.task not in tasks)
            self._changed.notify_all()

    # Passes ---------------------------------------------------------------------------------------------

    def open(self, mode: Mode, epoch: int = NEW_PASS) -> int:
        """Begin a pass; one that is open is closed first. Returns its number.

        With an `epoch` it is over when that epoch is, though nothing of it was read.
        """
        self.close_pass()
        with self._changed:
            self._pass += 1
            self._open, self._mode = True, mode
            self._epoch, self._state, self._granted = epoch, PassState.OPEN, 0
            self._joins = epoch == NEW_PASS
            self._ahead = not self._port.in_process
            self._error = None
            self._streams.clear()
            return self._pass

    def close_pass(self) -> None:
        """End the pass: leases that nobody drew go back, and waiting streams get None."""
        with self._changed:
            self._open = False
            undrawn = self._take_ready()
            for reserved in self._reserved.values():
                undrawn += reserved
            self._reserved.clear()
            self._changed.notify_all()
        if undrawn:
            self._on_unwanted(undrawn)

    def yield_to_others(self) -> None:
        """Another trainer waits: give back what is not drawn and fetch nothing ahead in this pass any more.

        The rest of a bundle stays with the stream that began it: without it there would be no whole batch.
        """
        with self._changed:
            self._ahead = False
            undrawn = self._take_ready()
        if undrawn:
            self._on_unwanted(undrawn)

    def _take_ready(self) -> list[Grant]:
        ready = list(self._ready)
        self._ready.clear()
        return ready

    def wait_for_more(self) -> bool:
        """With no batch left to hand out, wait for the master's verdict: True when there is more to read.

        Raises what the master or the transport raise.
        """
        number = self._pass
        while self._open and self._pass == number:
            with self._changed:
                if self._ready:
                    return True
                if self._is_over():
                    return False
                mine = self._begin_ask()
            if mine:
                self._ask(POLL_S, drained=True)
                if self._waits_for_itself():
                    return False
        return False

    def look_for_more(self, wait_s: float = 0.0) -> bool:
        """With no batch left to hand out, ask the master once, and wait for `wait_s` at most.

        True when there is more to read.
        """
        with self._changed:
            if self._ready or self._is_over() or not self._open:
                return bool(self._ready)
            mine = self._begin_ask()
        if mine:
            self._ask(wait_s, drained=True)
        return bool(self._ready)

    @property
    def is_over(self) -> bool:
        """Whether the master has said that the pass's epoch is over, or all of them."""
        with self._changed:
            return self._is_over()

    def _waits_for_itself(self) -> bool:
        """Whether there is no pass to be had, and this trainer holds records that others may wait for."""
        no_pass = self._epoch == NEW_PASS and self._state is PassState.OPEN
        return no_pass and not self._ready and self._holds()

    def _is_over(self) -> bool:
        if self._joins and self._state is PassState.EPOCH_OVER and not self._granted:
            # Nothing was read: join the epoch that runs now.
            self._epoch, self._state = NEW_PASS, PassState.OPEN
        return self._state is not PassState.OPEN

    # Leases ---------------------------------------------------------------------------------------------

    def next(self, stream: str, number: int) -> Grant | None:
        """The next lease for a stream of pass `number`; None when it has nothing more to fetch now.

        Waits only while nothing is to be had, the epoch is not over, and this trainer holds nothing.
        """
        self._start_thread()
        while True:
            with self._changed:
                self._streams.add(stream)
                if self._error is not None:
                    error, self._error = self._error, None
                    raise error
                grant = self._draw(stream, number)
                if grant is not None or not self._may_get_more(number):
                    self._changed.notify_all()
                    return grant
                patient = self._mode is Mode.PLAIN and not self._holds()
                dry = self._dry_answers
                mine = self._begin_ask()
            if mine:
                self._ask(POLL_S if patient else 0.0)
            if not patient and self._dry_answers != dry:
                return None

    def _draw(self, stream: str, number: int) -> Grant | None:
        if number != self._pass or not self._open:
            return None
        reserved = self._reserved.get(stream)
        if reserved:
            return reserved.popleft()
        if not self._ready:
            return None
        grant = self._ready.popleft()
        while grant.bundle and self._ready and self._ready[0].bundle == grant.bundle:
            self._reserved.setdefault(stream, deque()).append(self._ready.popleft())
        return grant

    def _may_get_more(self, number: int) -> bool:
        return self._open and number == self._pass and not self._closed and not self._is_over()

    def _await_answer(self) -> None:
        seen = self._answers
        self._changed.wait_for(lambda: self._answers != seen or not self._open or self._closed)

    # Asking ---------------------------------------------------------------------------------------------

    def _begin_ask(self) -> bool:
        """Take the right to ask: one call at a time. The condition is held."""
        if self._asking:
            self._await_answer()
            return False
        self._asking = True
        return True

    def _ask(self, wait_s: float, *, drained: bool = False) -> None:
        with self._changed:
            # Repeated, it gets the answer of then: leases that no other call would ever tell us of.
            number, member = self._lost_in or self._pass, self._membership
            self._lost_in = number
            presented = self._confirmer.presented
            call = LeaseCall(
                session=self._session,
                dataset=self._dataset,
                fence=member,
                request=self._request + 1,
                epoch=self._epoch,
                count=max(1, len(self._streams) - len(self._ready)) if self._ahead else 1,
                drained=drained,
                ahead=self._mode is Mode.ELASTIC and not drained,
                **self._answered.of(member),
            )
        unwanted: list[Grant] = []
        try:
            answer = self._port.lease(call, wait_s)
            self._answered.leased(member, call.request)
            with self._changed:
                self._request, self._lost_in = call.request, 0
                if member == self._membership:  # else they are void
                    unwanted = self._take_in(answer, number, presented)
        except SessionLost:
            self._on_lost(member)
        finally:
            with self._changed:
                self._asking = False
                self._answers += 1
                self._changed.notify_all()
        if unwanted:
            self._on_unwanted(unwanted)

    def _take_in(self, answer: LeaseAnswer, number: int, presented: int) -> list[Grant]:
        """Returns what no pass wants: that of the call is over. The condition is held."""
        for grant in answer.grants:
            self._on_grant(grant)
        if answer.grants:
            self._confirmer.granted(presented)
        if number != self._pass or not self._open:
            return list(answer.grants)
        self._epoch, self._state = answer.epoch, answer.state
        self._granted += len(answer.grants)
        self._ready += answer.grants
        self._dry_answers += not answer.grants
        return []

    # Fetching ahead ---------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        if self._thread is None and not self._port.in_process:
            self._thread = self._threads.thread(self._fetch_ahead, "edl-leases")
            self._thread.start()

    def _fetch_ahead(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._wants_ahead())
                if self._closed:
                    return
                self._asking = True
            try:
                self._ask(0.0)
            except Exception as exc:  # noqa: BLE001  the top of a thread: the next to ask hears of it
                with self._changed:
                    self._error, self._ahead = exc, False
                    self._changed.notify_all()
            else:
                self._rest_when_dry()

    def _wants_ahead(self) -> bool:
        return (
            self._open
            and self._ahead
            and not self._asking
            and bool(self._granted)
            and self._state is PassState.OPEN
            and len(self._ready) < max(1, len(self._streams))
        )

    def _rest_when_dry(self) -> None:
        with self._changed:
            if not self._ready:
                self._ahead = False  # the rest of the pass is fetched when it is asked for

    def close(self, timeout_s: float) -> None:
        """End the pass and the thread."""
        try:
            self.close_pass()
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join(timeout_s)
