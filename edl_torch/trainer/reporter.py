"""Carries acknowledgements, failures and give-backs to the master, in order and without loss."""

from __future__ import annotations

from edl_torch.core.calls import ReportAnswer, ReportCall
from edl_torch.errors import EdlError, MasterUnavailable, SessionLost
from edl_torch.trainer.outbox import Report
from edl_torch.trainer.registrar import Registrar
from edl_torch.trainer.state import State
from edl_torch.trainer.vocabulary import (
    Answered,
    Call,
    Procedure,
    Refused,
    Reporting,
    Telling,
    Unanswered,
    Wait,
)


class Reporter:
    """Sends what is in the outbox: one report at a time."""

    def __init__(self, state: State, registrar: Registrar) -> None:
        self._state = state
        self._registrar = registrar

    def __repr__(self) -> str:
        return f"<Reporter {self._state.outbox}>"

    @property
    def is_due(self) -> bool:
        """Whether the loop, which has noted acknowledgements or nothing, must `send`."""
        state, outbox = self._state, self._state.outbox
        if outbox.error is not None or outbox.phase is Telling.STALLED:
            return True
        return state.config.in_process and state.now >= outbox.may_wait_until and outbox.sendable

    def send(self) -> Procedure[None]:
        """Send what was noted, or, where calls take time, leave it to another thread. Raises what a report
        led to; what was not answered may be sent again."""
        state = self._state
        while state.outbox.prepare() and state.config.in_process:
            yield from self.send_one()

    def post(self) -> Procedure[None]:
        """Do as `send`, for callers other than the training loop: what it raises is kept."""
        outbox = self._state.outbox
        outbox.retry()
        while self._state.config.in_process and outbox.sendable:
            yield from self.send_one()

    def flush(self) -> Procedure[None]:
        """Wait until the master has answered everything; what it did not answer before is sent again."""
        self._state.outbox.forget_unavailable()
        yield from self.wait_answered(0)

    def wait_answered(self, most: int) -> Procedure[None]:
        """Wait until at most so many notes are unanswered. Raises what a report raised."""
        outbox = self._state.outbox
        outbox.raise_error()
        while outbox.unanswered > most and not self._state.closed:
            # Another caller may have been told that the master is away, and nobody else would ask again.
            if outbox.prepare():
                yield from self.send_one()
            else:
                yield Wait(lambda: not outbox.is_sending or self._state.closed)
            outbox.raise_error()

    def send_one(self) -> Procedure[None]:
        """Send one report. What it raises is kept for the loop."""
        report = self._state.outbox.take(self._state.registered.fence)
        answer: ReportAnswer | None = None
        error: EdlError | None = None
        try:
            answer = yield Call(self._call(report))
        except EdlError as exc:
            error = exc
        finally:  # also for one who gives up: by Ctrl-C, or torch's word that a loader worker died
            if answer is None:
                self._note_unanswered(report, error)
        if answer is not None and self._is_all(report, answer):
            self._state.outbox.answered()
        elif answer is not None or isinstance(error, SessionLost):
            yield from self._register_again(report)

    def _call(self, report: Report) -> ReportCall:
        state = self._state
        failures, give_backs = tuple(report.failures), tuple(report.give_backs)
        acknowledgements = tuple(report.acknowledgements.values())
        if state.config.audited:
            # Written down before it is sent: a trainer that dies in between has an intent, never a secret.
            state.facts.append(
                Reporting(
                    failures=failures,
                    acknowledgements=acknowledgements,
                    give_backs=give_backs,
                    way=report.way,
                    returned=report.returned,
                )
            )
        return state.call(
            ReportCall,
            report.fence,
            request=state.outbox.request,
            failures=failures,
            acknowledgements=acknowledgements,
            give_backs=give_backs,
        )

    def _is_all(self, report: Report, answer: ReportAnswer) -> bool:
        """Take in an answer. False where the member that it is for was given up meanwhile."""
        state = self._state
        if state.config.audited:
            state.facts.append(Answered(answer.stale))
        state.registered.answered(report.fence, reported=state.outbox.request)
        if answer.stale:
            state.refused(tuple([task for task in report.tasks if task in answer.stale]))
            state.void(answer.stale)
        state.outbox.may_wait_until = state.now + state.config.report_delay_s
        if answer.wanted:
            state.release_undrawn()
        return report.fence == state.registered.fence

    def _note_unanswered(self, report: Report, error: EdlError | None) -> None:
        """Note that no answer came, or that the report was refused as a whole."""
        state = self._state
        refused = error is not None and not isinstance(error, MasterUnavailable)
        if state.config.audited:
            state.facts.append(Refused() if refused else Unanswered())
        if isinstance(error, SessionLost):
            # The report counts as on its way until the trainer has registered anew.
            state.refused(report.tasks)
        elif refused:
            state.outbox.answered()
            self._keep_error(report, error)
        else:
            self._stall(report, error)

    def _register_again(self, report: Report) -> Procedure[None]:
        """Register anew where the member that sent a report was given up."""
        error: EdlError | None = None
        settled = self._state.closed
        try:
            if not settled:
                yield from self._registrar.again(report.fence)
                settled = True
        except EdlError as exc:
            error, settled = exc, not isinstance(exc, MasterUnavailable)
        finally:
            if settled:
                self._state.outbox.answered()
                self._keep_error(report, error)
            else:
                self._stall(report, error)

    def _keep_error(self, report: Report, error: EdlError | None) -> None:
        """Keep an error for the loop; one of a member of before is of no interest."""
        if error is not None and report.fence == self._state.fence:
            self._state.outbox.error = error

    def _stall(self, report: Report, error: EdlError | None) -> None:
        """Keep the report, to be sent again; it is dropped where it is another member's."""
        state = self._state
        if (void := state.outbox.unanswered_by(state.fence, error)) is not None:
            state.drop(void)
            state.refused(void.tasks)
