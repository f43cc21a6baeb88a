"""Passes of a plain `DataLoader`, and of `fetch_shard`: who takes part in one, and what its reports prove.

Nobody says when such a pass ends: it is over when the next one begins. It does not know torch.
"""

from __future__ import annotations

import threading
import warnings
from typing import Protocol

from edl_torch.audit.log import Audit
from edl_torch.audit.way import Way
from edl_torch.client.confirming import Confirmer
from edl_torch.client.counting import StreamCounts
from edl_torch.client.deliveries import Deliveries
from edl_torch.client.description import Description
from edl_torch.client.leases import LeaseSource, Mode
from edl_torch.client.reporter import Reporter
from edl_torch.client.streams import BrokenStreams
from edl_torch.client.tickets import Book
from edl_torch.core.calls import Grant
from edl_torch.errors import AccountingError, ConcurrentIteration, InvalidArgument

OWN_STREAM = "main"  # what is read in the trainer's own process
NO_PASS = 0  # passes are numbered from 1
SILENT_PASSES = 3  # plain passes in a row that read and report nothing: the loop would go on for ever


class Iterations(Protocol):
    """Iterations over plain DataLoaders, numbered in the order in which this process began them.

    A run names one of them, as its workers do.
    """

    @property
    def newest(self) -> int:
        """The number of the one that began last."""
        ...

    def number(self, run: str) -> int:
        """The number of an iteration; 0 where another process began it."""
        ...

    def is_over(self, run: str) -> bool:
        """Whether this process has given the iteration up, or come to its end."""
        ...

    def deliveries(self, run: str) -> Deliveries | None:
        """What the iteration delivers; None where it cannot be seen."""
        ...

    def worker_died(self, run: str) -> None:
        """A worker of the iteration was killed."""
        ...


class NoIterations:
    """Those of a trainer whose records nobody reads through a DataLoader."""

    newest = 0

    def number(self, run: str) -> int:
        return 0

    def is_over(self, run: str) -> bool:
        return False

    def deliveries(self, run: str) -> Deliveries | None:
        return None

    def worker_died(self, run: str) -> None:
        return


class PlainPasses:
    """The plain passes of one session, one after the other. The book's lock guards the counts too.

    `iterations` are those whose workers may come.
    """

    def __init__(
        self,
        description: Description,
        audit: Audit,
        *,
        book: Book,
        leases: LeaseSource,
        reporter: Reporter,
        confirmer: Confirmer,
        broken: BrokenStreams,
    ) -> None:
        self._description = description
        self._audit = audit
        self._book = book
        self._leases = leases
        self._reporter = reporter
        self._confirmer = confirmer
        self._broken = broken
        self.iterations: Iterations = NoIterations()
        self._counts = StreamCounts(description.batch_size)
        self._counting = False  # reports outside a pass, and of leases that are void, prove nothing
        self._beginning = threading.Lock()
        self._begun: set[str] = set()  # plain streams of the open pass
        self._ran_out = False  # a stream read to its end
        self._silent_passes = 0
        self._run = ""  # the plain DataLoader's iteration that reads the open pass
        self._runs: set[str] = set()  # all of them so far
        self._oldest = 0  # the first number of an iteration that may still begin a pass

    def __repr__(self) -> str:
        return f"<PlainPasses streams={len(self._begun)} silent={self._silent_passes} {self._counts}>"

    # Beginning and end ------------------------------------------------------------------------------------

    def begin(self, stream: str, run: str, deliveries: Deliveries | None = None) -> int:
        """A reading process begins. Returns the number of the pass that it takes part in.

        `run` names one iteration over a plain DataLoader, and which time its workers begin, the same in all
        of them: a worker that begins after its iteration has been given up gets the number of no pass.
        Without a `run` the trainer's own stream always begins a pass, of which it knows the `deliveries`, and
        another process does when it begins for the second time.
        """
        with self._beginning:
            if run and self._is_late(run):
                return NO_PASS
            if self._leases.is_open and self._leases.mode is Mode.ELASTIC:
                raise ConcurrentIteration(
                    f"an ElasticDataLoader iterates {self._description.name!r}: end it before reading "
                    f"otherwise"
                )
            if not self._joins(stream, run):
                self._open(stream, run, deliveries)
            with self._book.lock:
                if run != self._run:
                    self._counts.lose_sight()  # another process reads too: what it hands on cannot be seen
                self._begun.add(stream)
                return self._leases.pass_number

    def _is_late(self, run: str) -> bool:
        if run in self._runs:
            return not self._leases.is_open or run != self._run
        key, _, time = run.rpartition(" ")
        older = time == "1" and 0 < self.iterations.number(key) < self._oldest
        return older or self.iterations.is_over(key)

    def _joins(self, stream: str, run: str) -> bool:
        if not self._leases.is_open or stream == OWN_STREAM:
            return False
        return run == self._run if run else stream not in self._begun

    def _open(self, stream: str, run: str, deliveries: Deliveries | None) -> None:
        self.finish()
        self._run = run
        self._broken.clear()
        if run:
            self._runs.add(run)
            key = run.rpartition(" ")[0]
            deliveries = self.iterations.deliveries(key)
            self._oldest = max(self._oldest, self.iterations.number(key))
        elif stream == OWN_STREAM:
            self._oldest = self.iterations.newest + 1
        with self._book.lock:
            self._counts = StreamCounts(self._description.batch_size, deliveries)
            self._counting = True
        self._leases.open(Mode.PLAIN)

    @property
    def owed(self) -> int:
        """Records of a pass that was read to its end for which reports may still come."""
        with self._book.lock:
            return self._book.records if self._begun and self._ran_out else 0

    def abandon(self) -> None:
        """The loop was left: no reports will come for what it has read."""
        self.finish(abandoned=True)

    def finish(self, *, abandoned: bool = False) -> None:
        """What a plain pass left unreported was never trained on, as far as anybody can tell."""
        if self._leases.mode is not Mode.PLAIN or not self._begun:
            return
        self._leases.close_pass()
        with self._book.lock:
            unreported = self._book.records
            silent = self._ran_out and unreported > 0 and not self._counts.reports and not abandoned
            self._silent_passes = self._silent_passes + 1 if silent else 0
            self._ran_out = False
            self._reporter.note(give_backs=self._book.give_back_unacknowledged())
            self._begun.clear()
            self.forget()
        self._reporter.send()
        if self._silent_passes >= SILENT_PASSES:
            raise AccountingError(
                f"{self._silent_passes} passes over {self._description.name!r} went by without a report, and "
                f"{unreported} record(s) were read each time: call service.report_batch_done() after each "
                f"batch, leave out drop_last at a plain DataLoader, or use ElasticDataLoader"
            )
        if unreported and not abandoned:
            warnings.warn(
                f"a pass over {self._description.name!r} ended with {unreported} record(s) that were not "
                f"reported as trained on; they are read again. Call service.report_batch_done() after each "
                f"batch, or use ElasticDataLoader",
                stacklevel=2,
            )

    def worker_died(self, run: str) -> None:
        """A worker of a DataLoader was killed."""
        self.iterations.worker_died(run.rpartition(" ")[0])

    def restored(self) -> None:
        """The dataset went back to a token: there is no pass to finish."""
        with self._book.lock:
            self._begun.clear()

    # Counting; the book's lock is held ----------------------------------------------------------------------

    def forget(self) -> None:
        """All that was held is void."""
        self._audit.uncounted(self._counts.uncounted)
        self._counts = StreamCounts(self._description.batch_size)
        self._counting = False

    def drew(self, stream: str, grant: Grant | None) -> None:
        """A stream of a plain pass drew a lease, or read to its end."""
        if grant is None:
            self._ran_out = True
            self._counts.end(stream)
        else:
            self._counts.grant(stream, grant)

    def failed(self, task: int, position: int) -> None:
        """A record cannot be read."""
        self._counts.fail(task, position)

    # Reports ----------------------------------------------------------------------------------------------

    @property
    def uncounted(self) -> int:
        """Records that were reported, and nobody can say which ones they are."""
        return self._counts.uncounted

    @property
    def exact(self) -> bool:
        """Whether reports say precisely which records were trained on."""
        return self._counts.exact

    def report(self, batch_size: int | None) -> int:
        """A batch was trained on. Returns how many leases that completed."""
        with self._book.lock:
            runs = self._counts.report(batch_size) if self._counting else []
            done = {task: after for task, _, after in runs}
            made = [self._book.acknowledge(task, upto) for task, upto in done.items()]
            acknowledgements = [a for a in made if a is not None]
            completed = sum(a.task not in self._book for a in acknowledgements)
            way = Way.REPORT if self._counts.exact else Way.COUNT
            self._reporter.note(acknowledgements=acknowledgements, way=way)
        self._reporter.send()
        self._confirmer.moved_on()
        self._confirmer.ensure()  # the loop takes its next batch without asking here
        return completed

    def fail_batch(self, batch_size: int | None, reason: str) -> None:
        """The batch in hand could not be trained on: its records go to quarantine."""
        with self._book.lock:
            if not self._counts.exact:
                raise InvalidArgument(
                    "with several loader workers a plain DataLoader's batch does not say where it came "
                    "from, so err_msg cannot name its records: use ElasticDataLoader"
                )
            runs = self._counts.report(batch_size) if self._counting else []
            failures = [f for t, a, b in runs for p in range(a, b) for f in self._book.fail(t, p, reason)]
            self._reporter.note(failures=failures)
        self._reporter.send()
