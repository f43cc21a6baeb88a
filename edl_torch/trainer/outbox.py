"""Outcomes that go to the master: what is noted, what was sent, and what no master has answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from edl_torch.core.calls import UNREGISTERED, Acknowledgement, Failure, Fence, GiveBack
from edl_torch.errors import EdlError, MasterUnavailable
from edl_torch.trainer.vocabulary import TELLING, Evidence, Run, Telling


@dataclass(slots=True)
class Report:
    """Outcomes for one call. Several notes become one: failures, acknowledgements, then give-backs."""

    failures: list[Failure] = field(default_factory=list)
    # By task and end: one that goes on where another ends is one with it.
    acknowledgements: dict[tuple[int, int], Acknowledgement] = field(default_factory=dict)
    give_backs: list[GiveBack] = field(default_factory=list)
    returned: tuple[Run, ...] = ()  # of what is given back, the records that the loop had
    way: int = 0  # of the acknowledgements: the `Evidence` that proves the least
    notes: int = 0  # how many notes it is made of
    fence: Fence = UNREGISTERED  # of the member that sends it, once it is sent

    @property
    def tasks(self) -> tuple[int, ...]:
        """Tasks that it acknowledges records of."""
        return tuple(dict.fromkeys([task for task, _ in self.acknowledgements]))

    def __repr__(self) -> str:
        return f"<Report {len(self.failures)} {len(self.acknowledgements)} {len(self.give_backs)}>"


class Outbox:
    """The reports of one trainer, one call at a time.

    A report that no master answered is kept, and sent again before the next one under the same number: it may
    be known. When the trainer registers anew, what was not sent is void.
    """

    def __init__(self) -> None:
        self.phase = Telling.IDLE
        self.request = 0
        self.may_wait_until = -inf  # acknowledgements, for more of them
        self.error: Exception | None = None  # what a report led to; the next one that is asked for raises it
        self.raised: Exception | None = None  # the last one of these
        self._unsent = Report()
        self._sent: Report | None = None  # on its way, or to be sent again

    def __repr__(self) -> str:
        return f"<Outbox {self.phase.name} request={self.request} unanswered={self.unanswered}>"

    @property
    def unanswered(self) -> int:
        """How many notes the master has not answered."""
        return self._unsent.notes + (0 if self._sent is None else self._sent.notes)

    @property
    def is_sending(self) -> bool:
        """Whether a report is on its way."""
        return self.phase is Telling.SENDING

    @property
    def sendable(self) -> bool:
        """Whether there is something to send, and nothing on its way."""
        return self.phase is Telling.IDLE and (self._unsent.notes > 0 or self._sent is not None)

    def note(
        self,
        *,
        failures: Sequence[Failure] = (),
        acknowledgements: Sequence[Acknowledgement] = (),
        give_backs: Sequence[GiveBack] = (),
        way: Evidence = Evidence.STEP,
        returned: Sequence[Run] = (),
    ) -> None:
        """Keep what has happened for the next report."""
        if not (failures or acknowledgements or give_backs):
            return
        report = self._unsent
        report.notes += 1
        report.failures += failures
        report.give_backs += give_backs
        if returned:
            report.returned += tuple(returned)
        if acknowledgements:
            report.way = max(report.way, way)
            for done in acknowledgements:
                before = report.acknowledgements.pop((done.task, done.start), None)
                if before is not None:
                    done.start = before.start
                report.acknowledgements[done.task, done.upto] = done

    def retry(self) -> None:
        """Let what was not answered be sent again: somebody asks for it."""
        if self.phase is Telling.STALLED:
            self.phase = TELLING[self.phase, Telling.IDLE]

    def forget_unavailable(self) -> None:
        """Forget that the master was away: the attempt to come says whether it is there now."""
        if isinstance(self.error, MasterUnavailable):
            self.error = None

    def prepare(self) -> bool:
        """Raise what an earlier report led to, once; let what was not answered be sent again. Return whether
        there is something to send now."""
        if self.error is not None or self.phase is Telling.STALLED:
            self.raise_error()
            self.retry()
        return self.sendable

    def raise_error(self) -> None:
        """Raise what an earlier report led to, once."""
        if self.error is not None:
            self.raised, self.error = self.error, None
            raise self.raised

    # Sending ----------------------------------------------------------------------------------------------

    def take(self, fence: Fence) -> Report:
        """Begin to send: the report that was not answered, else all that was noted since."""
        self.phase = TELLING[self.phase, Telling.SENDING]
        if self._sent is None:
            self._sent, self._unsent = self._unsent, Report()
            self._sent.fence = fence
            self.request += 1
        return self._sent

    def answered(self) -> None:
        """The report on its way was answered, or refused."""
        self.phase = TELLING[self.phase, Telling.IDLE]
        self._sent = None

    def unanswered_by(self, fence: Fence, error: EdlError | None) -> Report | None:
        """The report on its way was not answered. Returns it where it is not of this `fence`, and so void."""
        sent = self._sent
        if sent is not None and sent.fence != fence:
            self.answered()
            return sent
        self.phase = TELLING[self.phase, Telling.STALLED]
        self.error = error or self.error
        return None

    def void(self) -> list[Report]:
        """Forget what was not sent, or not answered: it is another member's. Returns it."""
        void = [self._unsent]
        self._unsent = Report()
        if self._sent is not None and self.phase is not Telling.SENDING:
            void.append(self._sent)
            self._sent = None
        self.retry()
        return void
