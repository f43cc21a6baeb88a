"""Carries acknowledgements, failures and give-backs to the master, in order and without loss.

With a master in the same process a report is a call; else one thread sends, several reports at once when
they come faster than answers. It does not know why something is acknowledged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from edl_torch.audit.log import Audit, Run
from edl_torch.audit.way import Way
from edl_torch.client.membership import Answered
from edl_torch.client.port import MasterPort
from edl_torch.client.threads import SYSTEM, Thread, Threads
from edl_torch.core.calls import Acknowledgement, Failure, Fence, GiveBack, ReportAnswer, ReportCall
from edl_torch.errors import EdlError, MasterUnavailable, ServiceClosed, SessionLost, StaleLease

log = logging.getLogger("edl_torch.client")


class Outbox:
    """What is to be told. Several reports become one call: failures, acknowledgements, then give-backs."""

    __slots__ = ("acknowledgements", "failures", "give_backs", "returned", "way")

    def __init__(self) -> None:
        self.failures: list[Failure] = []
        self.acknowledgements: dict[int, Acknowledgement] = {}  # by task: the later one says it all
        self.give_backs: list[GiveBack] = []
        self.returned: tuple[Run, ...] = ()  # of what is given back, the records that the loop had
        self.way = 0  # of the acknowledgements: the `Way` that proves the least

    def __bool__(self) -> bool:
        return bool(self.acknowledgements or self.failures or self.give_backs)

    def __repr__(self) -> str:
        return f"<Outbox {len(self.failures)} {len(self.acknowledgements)} {len(self.give_backs)}>"

    def add(
        self,
        failures: Iterable[Failure],
        acknowledgements: Iterable[Acknowledgement],
        give_backs: Iterable[GiveBack],
        way: int = 0,
        returned: Sequence[Run] = (),
    ) -> None:
        """Tell this too."""
        if way > self.way:
            self.way = way
        if returned:
            self.returned = (*self.returned, *returned)
        self.failures += failures
        for done in acknowledgements:
            self.acknowledgements[done.task] = done
        self.give_backs += give_backs


Taken = tuple[Outbox, int, Fence]  # what is told, the reports noted by then, and as whom


class Reporter:
    """One dataset's reports. A report that no master answered is kept, and sent again before the next one.

    `on_answer` hears every answer; `on_lost` is called when the master does not know the session any more,
    which makes what was reported void. `on_refused` hears of tasks whose acknowledgements came too late, or
    were never sent because of that.
    """

    def __init__(
        self,
        port: MasterPort,
        session: str,
        dataset: str,
        on_answer: Callable[[ReportAnswer], None],
        on_lost: Callable[[Fence], None],
        audit: Audit | None = None,
        on_refused: Callable[[tuple[int, ...]], None] | None = None,
        threads: Threads = SYSTEM,
        answered: Answered | None = None,
    ) -> None:
        self._membership = Fence()
        self._port = port
        self._session = session
        self._dataset = dataset
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._audit = audit or Audit()
        self._on_refused = on_refused
        self._threads = threads
        self._told = answered or Answered()
        self._changed = threads.condition()
        self._outbox = Outbox()
        self._kept: tuple[Outbox, int] | None = None  # what no master answered, and the reports noted by then
        self._request = 0
        self._noted = 0  # reports noted
        self._waiting = 0  # callers that wait for answers
        self._answered = 0  # of those, reports that the master has answered
        self._error: Exception | None = None
        self._sending = False
        self._stalled = False  # the master did not answer: send again only when asked to
        self._closed = False
        self._thread: Thread | None = None

    def __repr__(self) -> str:
        return f"<Reporter request={self._request} unanswered={self._noted - self._answered}>"

    def note(
        self,
        *,
        failures: Sequence[Failure] = (),
        acknowledgements: Sequence[Acknowledgement] = (),
        give_backs: Sequence[GiveBack] = (),
        way: Way = Way.UNKNOWN,
        returned: Sequence[Run] = (),
    ) -> None:
        """Keep what has happened for `send`. Never raises and never waits: call it under the book's lock, so
        that the master hears things in the order in which they happened."""
        if not (failures or acknowledgements or give_backs):
            return
        with self._changed:
            self._outbox.add(failures, acknowledgements, give_backs, way if acknowledgements else 0, returned)
            self._noted += 1

    def send(self) -> None:
        """Send what was noted. Raises what sending an earlier report raised."""
        with self._changed:
            self._raise_error()
            taken = self._begin()
        self._send_here(taken)
        if self._error is not None:
            with self._changed:
                self._raise_error()

    def post(self) -> None:
        """Send what was noted, for callers other than the training loop: what it raises is kept."""
        with self._changed:
            taken = self._begin()
        self._send_here(taken)

    def _begin(self) -> Taken | None:
        """What the caller is to send, with a master in the same process; else the thread does. The lock is
        held."""
        self._stalled = False
        if not self._anything:
            return None
        if self._port.in_process:
            return self._take()
        self._wake_thread()
        return None

    def _wake_thread(self) -> None:
        if self._thread is not None:
            self._changed.notify_all()
            return
        self._thread = self._threads.thread(self._run, "edl-reporter")
        self._thread.start()

    def wait_answered(self, lag: int, timeout_s: float | None = None) -> bool:
        """Wait until at most `lag` reports are unanswered. False when the time was not enough."""
        if self._noted - self._answered <= lag and self._error is None:
            return True  # as for most batches; a look without the lock is as good as one a moment earlier
        self.send()
        if timeout_s is None:  # where the thread has not begun: that saves two changes of threads
            with self._changed:
                taken = self._take()
            self._send_here(taken)
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(
                    lambda: self._few_unanswered(lag) or self._error or self._closed, timeout_s
                )
            finally:
                self._waiting -= 1
            self._raise_error()
            return self._few_unanswered(lag)

    def _few_unanswered(self, lag: int) -> bool:
        return self._noted - self._answered <= lag

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the master has answered everything; what it did not answer before is sent again."""
        if self._noted == self._answered and self._error is None:
            return True
        with self._changed:
            if self._stalled and isinstance(self._error, MasterUnavailable):
                self._error = None  # of then: this attempt says whether the master is there now
        return self.wait_answered(0, timeout_s)

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        try:
            while (taken := self._next()) is not None:
                self._send_one(*taken)
        except Exception as exc:  # noqa: BLE001  the top of a thread: whoever waits for it must hear of it
            with self._changed:
                self._thread = None  # the next report gets another
                self._error = exc
                self._changed.notify_all()

    def _next(self) -> Taken | None:
        """Wait for something to send; None at the end."""
        with self._changed:
            while not self._closed:
                taken = self._take()
                if taken is not None:
                    return taken
                self._changed.wait_for(lambda: self._closed or self._sendable)
            return self._take()

    def _send_here(self, taken: Taken | None) -> None:
        """In the thread of the caller, until nothing is left."""
        while taken is not None:
            self._send_one(*taken)
            if not self._outbox:
                return
            with self._changed:
                taken = self._take()

    def _send_one(self, outbox: Outbox, noted: int, membership: Fence) -> None:
        error: EdlError | None = None
        settled = False
        try:
            self._report(outbox, membership)
            settled = True
        except EdlError as exc:
            error, settled = exc, not isinstance(exc, MasterUnavailable)
        finally:  # in the loop's own thread: Ctrl-C, or torch's word that a loader worker died
            if settled:
                self._sent(noted, membership, error)
            else:
                self._keep(outbox, noted, membership, error)

    def _report(self, outbox: Outbox, membership: Fence) -> None:
        call = ReportCall(
            session=self._session,
            dataset=self._dataset,
            fence=membership,
            request=self._request,
            failures=tuple(outbox.failures),
            acknowledgements=tuple(outbox.acknowledgements.values()),
            give_backs=tuple(outbox.give_backs),
            **self._told.of(membership),
        )
        # Written down before it is sent: a trainer that dies in between has an intent, never a secret.
        self._audit.intent(
            failures=call.failures,
            acknowledgements=call.acknowledgements,
            give_backs=call.give_backs,
            way=outbox.way,
            returned=outbox.returned,
        )
        answer = self._ask(call)
        if answer is not None:
            self._told.reported(membership, call.request)
            if answer.stale:
                self._refused(tuple(task for task in answer.stale if task in outbox.acknowledgements))
            self._on_answer(answer)
            if membership != self._membership and not self._closed:
                self._on_lost(membership)  # it was given up meanwhile: the master is told what it answered
            return
        self._refused(tuple(outbox.acknowledgements))
        if not self._closed:
            self._on_lost(membership)

    def _ask(self, call: ReportCall) -> ReportAnswer | None:
        """The master's answer; the audit hears what became of the intent. None: we are not known any more."""
        answer: ReportAnswer | None = None
        refused = False
        try:
            answer = self._port.report(call)
            return answer
        except EdlError as exc:
            refused = not isinstance(exc, MasterUnavailable)
            if isinstance(exc, SessionLost):
                return None
            raise
        finally:  # whatever else has ended the call
            if answer is not None:
                self._audit.answered(answer.stale)
            elif refused:
                self._audit.lost()
            else:
                self._audit.unanswered()

    def _refused(self, tasks: tuple[int, ...]) -> None:
        if tasks and self._on_refused is not None:
            self._on_refused(tasks)

    @property
    def _sendable(self) -> bool:
        return self._anything and not self._sending and not self._stalled

    @property
    def _anything(self) -> bool:
        return bool(self._outbox) or self._kept is not None

    def _take(self) -> Taken | None:
        """What is to be sent now: one report at a time. The lock is held."""
        if not self._sendable:
            return None
        self._sending = True
        self._request += 1
        if self._kept is not None:
            (outbox, noted), self._kept = self._kept, None
        else:
            outbox, self._outbox, noted = self._outbox, Outbox(), self._noted
        return outbox, noted, self._membership

    def _sent(self, noted: int, membership: Fence, error: Exception | None) -> None:
        with self._changed:
            self._sending = False
            self._answered = max(noted, self._answered)
            if error is not None and membership == self._membership:
                self._error = error  # of a member of before it is of no interest, as what was not sent
            if self._waiting or self._outbox:
                self._changed.notify_all()

    def _keep(self, outbox: Outbox, noted: int, membership: Fence, error: Exception | None) -> None:
        with self._changed:
            self._sending = False
            is_void = membership != self._membership
            if is_void:
                self._drop(outbox)
            else:
                self._stalled = True
                self._request -= 1  # sent again it is the same report, and nothing else: it may be known
                self._kept = outbox, noted
                self._error = error or self._error
            self._changed.notify_all()
        if is_void:
            self._refuse_unsent(outbox)

    def follow(self, membership: Fence) -> None:
        """The trainer takes part anew: what was not sent is void, and acknowledgements of it are refused."""
        with self._changed:
            void = [self._outbox, *([self._kept[0]] if self._kept else [])]
            for outbox in void:
                self._drop(outbox)
            self._outbox, self._kept = Outbox(), None
            self._answered = self._noted
            self._membership = membership
            self._changed.notify_all()
        self._refuse_unsent(*void)

    def _refuse_unsent(self, *void: Outbox) -> None:
        self._refused(tuple(task for outbox in void for task in outbox.acknowledgements))

    def _drop(self, outbox: Outbox) -> None:
        """Nobody will hear of it: others train on its records. The lock is held."""
        acknowledgements = outbox.acknowledgements.values()
        self._audit.dropped(acknowledgements, outbox.returned, on_its_way=self._sending)

    def close(self, timeout_s: float) -> None:
        """Send what is left and end the thread, within `timeout_s`. What a master does not answer it takes
        back by itself when the session ends."""
        deadline = self._threads.clock() + timeout_s
        try:
            self.flush(timeout_s)
        except (MasterUnavailable, ServiceClosed, StaleLease):
            log.debug("the last report of session %s was not answered", self._session, exc_info=True)
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join(max(0.0, deadline - self._threads.clock()))
