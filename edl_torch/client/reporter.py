"""Carries acknowledgements, failures and give-backs to the master, in order and without loss.

With a master in the same process a report is a call; else one thread sends, several reports at once when
they come faster than answers. It does not know why something is acknowledged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from edl_torch.client.port import MasterPort
from edl_torch.core.calls import Acknowledgement, Failure, GiveBack, ReportAnswer, ReportCall
from edl_torch.errors import EdlError, MasterUnavailable, SessionLost


class Reporter:
    """One dataset's reports.

    `on_answer` hears every answer; `on_lost` is called when the master does not know the session any more,
    which makes what was reported void.
    """

    def __init__(
        self,
        port: MasterPort,
        session: str,
        dataset: str,
        on_answer: Callable[[ReportAnswer], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._ledger, self._lineage = "", 0
        self._port = port
        self._session = session
        self._dataset = dataset
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._failures: list[Failure] = []
        self._acknowledgements: dict[int, Acknowledgement] = {}
        self._give_backs: list[GiveBack] = []
        self._request = 0
        self._submitted = 0  # reports handed in
        self._answered = 0  # of those, reports that the master has answered
        self._error: EdlError | None = None
        self._sending = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(
        self,
        *,
        failures: Iterable[Failure] = (),
        acknowledgements: Iterable[Acknowledgement] = (),
        give_backs: Iterable[GiveBack] = (),
    ) -> None:
        """Hand in what has happened. Raises what sending an earlier report raised."""
        with self._changed:
            self._raise_error()
            self._failures += failures
            self._acknowledgements.update((done.task, done) for done in acknowledgements)
            self._give_backs += give_backs
            if not self._pending:
                return
            self._submitted += 1
            self._changed.notify_all()
        self._start()

    def _start(self) -> None:
        if self._port.in_process:
            while self._send_next(wait=False):
                pass
            with self._changed:
                self._raise_error()
        elif self._thread is None:
            self._thread = threading.Thread(target=self._run, name="edl-reporter", daemon=True)
            self._thread.start()

    @property
    def _pending(self) -> bool:
        return bool(self._failures or self._acknowledgements or self._give_backs)

    def wait_answered(self, lag: int, timeout_s: float | None = None) -> bool:
        """Wait until at most `lag` reports are unanswered. False when the time was not enough."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._submitted - self._answered <= lag or self._error is not None, timeout_s
            )
            self._raise_error()
            return done

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the master has answered everything."""
        return self.wait_answered(0, timeout_s)

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        while self._send_next(wait=True):
            pass

    def _send_next(self, *, wait: bool) -> bool:
        taken = self._take(wait=wait)
        if taken is None:
            return False
        call, submitted = taken
        try:
            self._report(call)
        except EdlError as exc:
            self._sent(submitted, exc)
        else:
            self._sent(submitted, None)
        return True

    def _report(self, call: ReportCall) -> None:
        try:
            answer = self._port.report(call)
        except SessionLost:
            if not self._closed:
                self._on_lost()
        else:
            self._on_answer(answer)

    def _take(self, *, wait: bool) -> tuple[ReportCall, int] | None:
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._pending or self._closed)
            if not self._pending or self._sending:
                return None
            self._sending = True
            self._request += 1
            call = ReportCall(
                session=self._session,
                dataset=self._dataset,
                ledger=self._ledger,
                lineage=self._lineage,
                request=self._request,
                failures=tuple(self._failures),
                acknowledgements=tuple(self._acknowledgements.values()),
                give_backs=tuple(self._give_backs),
            )
            self._drop_pending()
            return call, self._submitted

    def _drop_pending(self) -> None:
        self._failures.clear()
        self._acknowledgements.clear()
        self._give_backs.clear()

    def _sent(self, submitted: int, error: EdlError | None) -> None:
        with self._changed:
            self._sending = False
            self._answered = submitted
            if error is not None:
                self._error = error
            self._changed.notify_all()

    def follow(self, ledger: str, lineage: int) -> None:
        """Another lineage begins: what was not sent is of no interest any more."""
        with self._changed:
            self._drop_pending()
            self._answered = self._submitted
            self._ledger, self._lineage = ledger, lineage
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Send what is left, for at most `timeout_s`, and end the thread."""
        try:
            self.flush(timeout_s)
        except MasterUnavailable:
            pass  # the master takes the leases back by itself
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            if self._thread is not None:
                self._thread.join(timeout_s)
