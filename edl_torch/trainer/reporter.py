"""Carries acknowledgements, failures and give-backs to the master, in order and without loss."""

from __future__ import annotations

from edl_torch.core.calls import ReportAnswer, ReportCall
from edl_torch.errors import EdlError, MasterUnavailable, SessionLost
from edl_torch.trainer.actions import Call, Procedure, Wait
from edl_torch.trainer.facts import Answered, Refused, Reporting, Unanswered
from edl_torch.trainer.outbox import Report
from edl_torch.trainer.registrar import Registrar
from edl_torch.trainer.state import State


class Reporter:
    """Sends what is in the outbox: one report at a time."""

    def __init__(self, state: State, registrar: Registrar) -> None:
        self._state = state
        self._registrar = registrar

    def __repr__(self) -> str:
        return f"<Reporter {self._state.outbox}>"

    def send(self) -> Procedure[None]:
        """Send what was noted, where that is a plain function call; else see that it will be sent.

        Raises what sending an earlier report raised.
        """
        outbox = self._state.outbox
        outbox.raise_error()
        outbox.retry()
        if self._state.config.in_process and outbox.sendable:
            yield from self.send_all()
            outbox.raise_error()

    def post(self) -> Procedure[None]:
        """Do as `send`, for callers other than the training loop: what it raises is kept."""
        self._state.outbox.retry()
        if self._state.config.in_process:
            yield from self.send_all()

    def send_all(self) -> Procedure[None]:
        """Send until nothing is left, or somebody else is at it."""
        while self._state.outbox.sendable:
            yield from self.send_one()

    def flush(self) -> Procedure[None]:
        """Wait until the master has answered everything; what it did not answer before is sent again."""
        self._state.outbox.forget_unavailable()
        yield from self.wait_answered(0)

    def wait_answered(self, most: int) -> Procedure[None]:
        """Wait until at most so many notes are unanswered. Raises what a report raised."""
        outbox = self._state.outbox
        outbox.raise_error()
        outbox.retry()
        while outbox.unanswered > most and not self._state.closed:
            if outbox.sendable:
                yield from self.send_one()
            else:
                yield Wait(lambda: not outbox.is_sending or self._state.closed)
            outbox.raise_error()
            outbox.retry()  # another caller may have been told that the master is away, and nobody asks again

    def send_one(self) -> Procedure[None]:
        """Send one report. What it raises is kept for the loop."""
        state = self._state
        report = state.outbox.take(state.fence)
        error: EdlError | None = None
        settled = False
        try:
            yield from self._tell(report)
            settled = True
        except MasterUnavailable as exc:
            error = exc
        except EdlError as exc:
            error, settled = exc, True
        finally:  # also for one who gives up: by Ctrl-C, or torch's word that a loader worker died
            if settled:
                state.outbox.answered()
                if error is not None and report.fence == state.fence:
                    state.outbox.error = error  # of a member of before it is of no interest
            elif (void := state.outbox.unanswered_by(state.fence, error)) is not None:
                state.drop(void)
                state.refused(tuple(void.acknowledgements))

    def _tell(self, report: Report) -> Procedure[None]:
        state = self._state
        try:
            answer = yield from self._ask(report)
        except SessionLost:
            state.refused(tuple(report.acknowledgements))
        else:
            state.registered.answered(report.fence, reported=state.outbox.request)
            state.refused(tuple([task for task in answer.stale if task in report.acknowledgements]))
            if answer.stale:
                state.void(answer.stale)
            if answer.wanted:
                state.yield_to_others()
            if report.fence == state.fence:
                return
            # It was given up meanwhile: the master is told what it answered.
        if not state.closed:
            yield from self._registrar.again(report.fence)

    def _ask(self, report: Report) -> Procedure[ReportAnswer]:
        """Return the master's answer; the audit hears what became of the report."""
        state = self._state
        call = state.call(
            ReportCall,
            report.fence,
            request=state.outbox.request,
            failures=tuple(report.failures),
            acknowledgements=tuple(report.acknowledgements.values()),
            give_backs=tuple(report.give_backs),
        )
        audited = state.config.audited
        if audited:
            # Written down before it is sent: a trainer that dies in between has an intent, never a secret.
            state.facts.append(
                Reporting(
                    failures=call.failures,
                    acknowledgements=call.acknowledgements,
                    give_backs=call.give_backs,
                    way=report.way,
                    returned=report.returned,
                )
            )
        answer: ReportAnswer | None = None
        refused = False
        try:
            answer = yield Call("report", call)
            return answer
        except EdlError as exc:
            refused = not isinstance(exc, MasterUnavailable)
            raise
        finally:
            if audited:
                fact = Unanswered() if not refused else Refused()
                state.facts.append(fact if answer is None else Answered(answer.stale))
