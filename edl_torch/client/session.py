"""One trainer's session with its master over one dataset: its parts, and what they tell each other.

It decides nothing about samples or batches; it does not know torch.
"""

from __future__ import annotations

import logging
from pathlib import Path

from edl_torch.audit.log import Audit, AuditLog
from edl_torch.client.confirming import Confirmer
from edl_torch.client.deliveries import Deliveries
from edl_torch.client.description import Description
from edl_torch.client.elastic_pass import ElasticPasses
from edl_torch.client.joining import Joining
from edl_torch.client.leases import LeaseSource, Mode
from edl_torch.client.membership import Answered
from edl_torch.client.plain_pass import Iterations, PlainPasses
from edl_torch.client.port import MasterPort
from edl_torch.client.position import Position
from edl_torch.client.reporter import Reporter
from edl_torch.client.steps import Steps
from edl_torch.client.streams import BrokenStreams
from edl_torch.client.threads import SYSTEM, Threads
from edl_torch.client.tickets import Book, Ticket
from edl_torch.core.calls import Fence, Grant, LeaseId, ReportAnswer
from edl_torch.core.plan import Plan
from edl_torch.errors import MasterUnavailable, ServiceClosed, StaleLease

CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger("edl_torch.client")


class Session:
    """What this process holds of a dataset. Its id is random and new in every process.

    `elastic` is what an `ElasticDataLoader` talks to, `position` what takes tokens and goes back to them; a
    session is the `Host` of loader workers' links.
    """

    def __init__(
        self,
        master: MasterPort,
        description: Description,
        lookahead: int,
        audit_dir: str | Path | None = None,
        threads: Threads = SYSTEM,
    ) -> None:
        self.id = threads.new_id()
        self._threads = threads
        self._audit = Audit() if audit_dir is None else AuditLog(audit_dir, self.id, master.worker_id)
        self.master = master
        self.description = description
        self.steps = Steps(lookahead)
        self.book = Book()
        self.closed = False
        self.checkpoints: dict[str, str] = {}  # by folder: the one that this session loaded or saved last
        self._answered = Answered()
        self._joining = self._make_joining()
        self._reporter = self._make_reporter()
        self._confirmer = Confirmer(
            *(master, self.id, description.name),
            held=self._held,
            on_void=self._on_void,
            on_lost=self._rejoin,
            answered=self._answered,
        )
        self._leases = self._make_leases()
        self._broken = BrokenStreams(self.book, self._leases, self._joining.plan)
        self._plain, self.elastic = self._make_passes()
        self.position = Position(
            *(master, description, self._audit),
            on_lost=self._rejoin,
            joining=self._joining,
            leases=self._leases,
            reporter=self._reporter,
            plain=self._plain,
            elastic=self.elastic,
        )

    def _make_joining(self) -> Joining:
        return Joining(
            *(self.master, self.id, self.description, self._audit),
            on_gone=self._forget,
            on_member=self._follow,
            on_first=self._attend,
            threads=self._threads,
            answered=self._answered,
        )

    def _make_reporter(self) -> Reporter:
        return Reporter(
            *(self.master, self.id, self.description.name, self._on_answer, self._rejoin, self._audit),
            on_refused=self._on_refused,
            threads=self._threads,
            answered=self._answered,
        )

    def _make_leases(self) -> LeaseSource:
        return LeaseSource(
            *(self.master, self.id, self.description.name),
            confirmer=self._confirmer,
            on_grant=self._on_grant,
            on_unwanted=self._on_unwanted,
            on_lost=self._rejoin,
            holds=self._holds,
            threads=self._threads,
            answered=self._answered,
        )

    def _make_passes(self) -> tuple[PlainPasses, ElasticPasses]:
        plain = PlainPasses(
            *(self.description, self._audit),
            book=self.book,
            leases=self._leases,
            reporter=self._reporter,
            confirmer=self._confirmer,
            broken=self._broken,
        )
        elastic = ElasticPasses(
            self.description.name,
            book=self.book,
            steps=self.steps,
            joining=self._joining,
            leases=self._leases,
            reporter=self._reporter,
            confirmer=self._confirmer,
            broken=self._broken,
            plain=plain,
            threads=self._threads,
        )
        return plain, elastic

    def __repr__(self) -> str:
        return f"<Session {self.id[:8]} {self._leases} {self.book}>"

    # Taking part ------------------------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether the dataset is registered."""
        return self._joining.joined

    @property
    def lineage(self) -> int:
        """The lineage that it takes part in; 0 before it joined."""
        return self._joining.membership.lineage

    def plan(self) -> Plan:
        """The dataset as registered; registers it at first use."""
        return self._joining.plan()

    def _attend(self) -> None:
        self._confirmer.watch(self.master.attend(self.id, self._joining.membership.member, self._on_wanted))

    def _follow(self, membership: Fence) -> None:
        self._confirmer.follow(membership)
        self._reporter.follow(membership)  # before the leases: what becomes of new ones is not thrown away
        self._leases.follow(membership, self._forget)

    def _forget(self) -> None:
        """All that was held is void."""
        with self.book.lock:
            self._audit.void(self._may_be_trained)
            if self.book.batches:
                self.position.lost(f"{self.book.batches} batch(es)")
            self.book.clear()
            self.steps.clear()
            self._plain.forget()

    @property
    def _may_be_trained(self) -> Ticket:
        """What the loop has; in a plain pass, where nobody sees that, what was drawn for it."""
        return self.book.handed() if self.in_elastic_mode else self.book.drawn()

    def _rejoin(self, lost: Fence) -> None:
        """The master gave this session up: what it held is others' now, and it takes part anew.

        Raises StaleLease when the master is another one by now, or the dataset went back to a checkpoint.
        """
        self._joining.again(lost)
        if not self.in_elastic_mode:
            # Batches of void leases are on their way, and a report does not say which batch it means: the
            # pass ends, and what is left of it is read in the next one.
            self._leases.close_pass()

    # What the master and the fetcher tell -----------------------------------------------------------------

    def _holds(self) -> bool:
        with self.book.lock:
            return bool(self.book)

    def _held(self) -> tuple[LeaseId, ...]:
        with self.book.lock:
            return self.book.held()

    def _on_grant(self, grant: Grant) -> None:
        self._audit.granted(grant)
        with self.book.lock:
            self.book.grant(grant)

    def _on_unwanted(self, grants: list[Grant]) -> None:
        with self.book.lock:
            self._reporter.note(give_backs=self.book.give_back_undrawn(grants))
        self._reporter.post()  # the caller may be a thread that listens: errors are the loop's to hear

    def _on_answer(self, answer: ReportAnswer) -> None:
        if answer.stale:
            self._on_void(answer.stale)
        if answer.wanted:
            self._leases.yield_to_others()

    def _on_void(self, tasks: tuple[int, ...]) -> None:
        """The master took leases back; their batches are thrown away where they arrive."""
        log.warning("dataset %s: %d lease(s) were taken back", self.description.name, len(tasks))
        with self.book.lock:
            self._audit.void(run for run in self._may_be_trained if run[0] in tasks)
            if batches := self.book.handed_of(tasks):
                self.position.lost(f"{batches} batch(es)")
            self.book.void(tasks)
        self._leases.void(tasks)
        if not self.in_elastic_mode:
            self._leases.close_pass()  # for the reason that `_rejoin` has

    def _on_refused(self, tasks: tuple[int, ...]) -> None:
        self.position.lost(f"batches of {len(tasks)} lease(s)")

    def _on_wanted(self, dataset: str) -> None:
        if dataset == self.description.name:
            self.elastic.end_abandoned()
            self._leases.yield_to_others()

    # What reading processes ask ---------------------------------------------------------------------------

    def watch(self, iterations: Iterations) -> None:
        """Ask `iterations` what iterations over plain DataLoaders deliver, and which are over."""
        self._plain.iterations = iterations

    def begin_stream(
        self, stream: str, mode: Mode, run: str = "", deliveries: Deliveries | None = None
    ) -> tuple[int, Plan]:
        """A reading process begins (see `PlainPasses.begin`). Returns the pass and the dataset."""
        plan = self.plan()
        if mode is Mode.ELASTIC:
            return self._leases.pass_number, plan
        self.elastic.end_unreachable()
        return self._plain.begin(stream, run, deliveries), plan

    def next_grant(self, stream: str, number: int) -> Grant | None:
        """The next lease of a stream."""
        grant = self._leases.next(stream, number)
        with self.book.lock:
            if grant is not None:
                self.book.draw(grant.task, stream)
            if not self.in_elastic_mode and number == self._leases.pass_number:
                self._plain.drew(stream, grant)
        return grant

    def fail_record(self, task: int, position: int, reason: str) -> None:
        """A record cannot be read."""
        with self.book.lock:
            failures = self.book.fail(task, position, reason)
            self._plain.failed(task, position)
            self._reporter.note(failures=failures)
        self._reporter.send()

    def stream_broke(self, stream: str, run: str) -> None:
        """A reading process hung up without a word. While its pass is open that means that it died."""
        try:
            if not self.elastic.abandoned:  # else torch has ended its workers
                self._broken.broke(stream)
        finally:
            self._plain.worker_died(run)

    def broken_streams(self, timeout_s: float) -> dict[str, str]:
        """Reading processes of this pass that died, and what they were at; waits for the first to be seen."""
        return self._broken.wait(timeout_s)

    @property
    def owed(self) -> int:
        """Records of a plain pass that was read to its end for which reports may still come."""
        return self._plain.owed

    def abandon_pass(self) -> None:
        """The loop over a plain pass was left: what it has not reported goes back."""
        self._plain.abandon()

    # What the loop reports --------------------------------------------------------------------------------

    @property
    def in_elastic_mode(self) -> bool:
        """Whether the last pass was one of an ElasticDataLoader."""
        return self._leases.mode is Mode.ELASTIC

    @property
    def exact(self) -> bool:
        """Whether a token taken now says precisely what was trained on."""
        return self.in_elastic_mode or self._plain.exact

    def report_batch(self, batch_size: int | None) -> int:
        """A batch was trained on. Returns how many leases that completed."""
        return self.elastic.report() if self.in_elastic_mode else self._plain.report(batch_size)

    def fail_batch(self, batch_size: int | None, reason: str) -> None:
        """The batch in hand could not be trained on: its records go to quarantine."""
        if self.in_elastic_mode:
            self.elastic.fail_batch(reason)
        else:
            self._plain.fail_batch(batch_size, reason)

    def flush(self) -> None:
        """Wait until the master has answered all reports."""
        self._reporter.flush()

    # The end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back what was not trained on and say goodbye, within `CLOSE_TIMEOUT_S`."""
        deadline = self._threads.clock() + CLOSE_TIMEOUT_S
        self.closed = True
        self._broken.close()
        try:
            self._let_go(deadline)
        except (MasterUnavailable, ServiceClosed, StaleLease):
            # What nobody hears of is taken back when the session is over.
            log.debug("the end of session %s was not answered", self.id, exc_info=True)
        finally:
            self._audit.close()
            if self.joined:
                self.master.leave(self.id, self._joining.membership.member)

    def _let_go(self, deadline: float) -> None:
        try:
            self._leases.close(CLOSE_TIMEOUT_S)
        finally:
            with self.book.lock:
                returned = self.book.handed(untouched=self.steps.untouched)
                self._plain.forget()
                self._reporter.note(give_backs=self.book.give_back_unacknowledged(), returned=returned)
            self._reporter.close(max(0.0, deadline - self._threads.clock()))
