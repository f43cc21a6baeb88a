"""Passes of a plain `DataLoader`, and of `fetch_shard`: who takes part in one, and what its reports prove.

Nobody says when such a pass ends: it is over when the next one begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from edl_torch.errors import AccountingError, InvalidArgument
from edl_torch.trainer.counting import Deliveries, StreamCounts
from edl_torch.trainer.inflight import Mode
from edl_torch.trainer.registrar import Confirmer
from edl_torch.trainer.reporter import Reporter
from edl_torch.trainer.state import State
from edl_torch.trainer.vocabulary import Evidence, Procedure, Wait, Warn

OWN_STREAM = "main"  # what is read in the trainer's own process
NO_PASS = 0  # passes are numbered from 1
SILENT_PASSES = 3  # plain passes in a row that read and report nothing: the loop would go on for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A process begins to read a plain pass.

    `run` names one iterator of a plain DataLoader, the same in all of its workers, and `begun` says which
    time they begin, as those that persist do for each iteration; '' and 0 in a process that is none of its
    workers. Iterators are numbered in the order in which the trainer's process made them: `number` is that
    of this one (0: it was made elsewhere), `newest` that of the last one.
    """

    stream: str
    run: str = ""
    begun: int = 0
    number: int = 0
    newest: int = 0
    is_over: bool = False  # the iteration was given up, or came to its end
    deliveries: Deliveries | None = None  # what reaches the loop, where that is seen

    @property
    def iteration(self) -> tuple[str, int]:
        """The iteration over the plain DataLoader that it is a part of."""
        return self.run, self.begun


class PlainPasses:
    """The plain passes of one trainer, one after the other."""

    def __init__(self, state: State, reporter: Reporter, confirmer: Confirmer) -> None:
        self._state = state
        self._reporter = reporter
        self._confirmer = confirmer
        self._silent_passes = 0
        self._iteration = ("", 0)  # the plain DataLoader's that reads the open pass
        self._iterations: set[tuple[str, int]] = set()  # all of them so far
        self._oldest = 1  # the first number of an iteration that may still begin a pass
        self._beginning = False  # a process is about to begin a pass: others wait

    def __repr__(self) -> str:
        plain = self._state.plain
        return f"<PlainPasses streams={len(plain.begun)} silent={self._silent_passes} {plain.counts}>"

    # Beginning and end ------------------------------------------------------------------------------------

    def begin(self, reading: Reading) -> Procedure[int]:
        """Return the number of the pass in which a process that begins to read takes part.

        A worker that begins after its iteration has been given up gets the number of no pass. Without a `run`
        the trainer's own stream always begins a pass, and another process does when it begins for the second
        time.
        """
        while self._beginning:
            yield Wait(lambda: not self._beginning)
        if self.is_late(reading):
            return NO_PASS
        state, plain = self._state, self._state.plain
        if not self._joins(reading):
            self._beginning = True
            try:
                yield from self._open(reading)
            finally:
                self._beginning = False
        if reading.iteration != self._iteration and plain.counts is not None:
            plain.counts.lose_sight()  # another process reads too: what it hands on cannot be seen
        plain.begun.add(reading.stream)
        return state.supply.current.number

    def is_late(self, reading: Reading) -> bool:
        """Whether its iteration has been given up since."""
        current = self._state.supply.current
        if not reading.run:
            return False
        if reading.iteration in self._iterations:
            is_open = current.is_open and current.mode is Mode.PLAIN
            return not is_open or reading.iteration != self._iteration
        return (reading.begun == 1 and 0 < reading.number < self._oldest) or reading.is_over

    def _joins(self, reading: Reading) -> bool:
        current = self._state.supply.current
        if not current.is_open or current.mode is Mode.ELASTIC or reading.stream == OWN_STREAM:
            return False
        if reading.run:
            return reading.iteration == self._iteration
        return reading.stream not in self._state.plain.begun

    def _open(self, reading: Reading) -> Procedure[None]:
        state = self._state
        yield from self.finish()
        self._iteration = reading.iteration
        if reading.run:
            self._iterations.add(reading.iteration)
            self._oldest = max(self._oldest, reading.number)
        elif reading.stream == OWN_STREAM:
            self._oldest = reading.newest + 1
        state.plain.counts = StreamCounts(state.config.batch_size, reading.deliveries)
        state.close_pass()
        state.supply.open(Mode.PLAIN)

    @property
    def owed(self) -> int:
        """Records of a pass that was read to its end for which reports may still come."""
        plain = self._state.plain
        return self._state.inflight.records if plain.begun and plain.ran_out else 0

    def finish(self, *, abandoned: bool = False) -> Procedure[None]:
        """End a plain pass: what it left unreported was never trained on, as far as anybody can tell.

        `abandoned` says that the loop was left: no reports will come for what it has read.
        """
        state, plain = self._state, self._state.plain
        if state.supply.current.mode is not Mode.PLAIN or not plain.begun:
            return
        state.close_pass()
        unreported = state.inflight.records
        silent = plain.ran_out and bool(unreported) and not plain.is_reported and not abandoned
        self._silent_passes = self._silent_passes + 1 if silent else 0
        plain.ran_out = False
        state.outbox.note(give_backs=state.inflight.give_back_unacknowledged())
        plain.begun.clear()
        state.forget_counts()
        yield from self._reporter.send()
        if self._silent_passes >= SILENT_PASSES:
            raise AccountingError(
                f"{self._silent_passes} passes over {state.config.dataset!r} went by without a report, and "
                f"{unreported} record(s) were read each time: call service.report_batch_done() after each "
                f"batch, leave out drop_last at a plain DataLoader, or use ElasticDataLoader"
            )
        if unreported and not abandoned:
            yield Warn(
                f"a pass over {state.config.dataset!r} ended with {unreported} record(s) that were not "
                f"reported as trained on; they are read again. Call service.report_batch_done() after each "
                f"batch, or use ElasticDataLoader"
            )

    # Reports ----------------------------------------------------------------------------------------------

    def report(self, batch_size: int | None) -> Procedure[int]:
        """Note that a batch was trained on. Returns how many leases that completed."""
        state = self._state
        proved = state.plain.report(batch_size)
        state.measuring.reported(sum(after - first for _, first, after in proved))
        acknowledgements = state.inflight.acknowledge([tuple(proved)])
        completed = sum(task not in state.inflight for task in {run[0] for run in proved})
        way = Evidence.REPORT if state.plain.exact else Evidence.COUNT
        state.outbox.note(acknowledgements=acknowledgements, way=way)
        yield from self._reporter.send()
        yield from self._confirmer.moved_on()  # the loop takes its next batch without asking here
        return completed

    def fail_batch(self, batch_size: int | None, reason: str) -> Procedure[None]:
        """Put the batch in hand into quarantine: it could not be trained on."""
        state = self._state
        if not state.plain.exact:
            raise InvalidArgument(
                "with several loader workers a plain DataLoader's batch does not say where it came "
                "from, so err_msg cannot name its records: use ElasticDataLoader"
            )
        state.quarantine(state.plain.report(batch_size), reason)
        yield from self._reporter.send()
