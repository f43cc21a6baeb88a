"""One trainer's session with its master over one dataset: leases, accounting and reports put together.

It decides nothing about samples or batches; it does not know torch.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import warnings
from pathlib import Path

from edl_torch.audit.log import Audit, AuditLog
from edl_torch.client.confirming import Confirmer
from edl_torch.client.counting import StreamCounts
from edl_torch.client.description import Description
from edl_torch.client.leases import LeaseSource, Mode
from edl_torch.client.membership import Membership
from edl_torch.client.port import MasterPort
from edl_torch.client.reporter import Reporter
from edl_torch.client.steps import Steps
from edl_torch.client.tickets import Book, Ticket
from edl_torch.core.calls import Grant, HeldLease, RegisterAnswer, RegisterCall, Registration, ReportAnswer
from edl_torch.core.plan import Plan
from edl_torch.core.token import Token
from edl_torch.errors import AccountingError, ConcurrentIteration, InvalidArgument, StaleLease, UnknownDataset
from edl_torch.shard import Shard

CLOSE_TIMEOUT_S = 5.0
OWN_STREAM = "main"  # what is read in the trainer's own process
NO_PASS = 0  # passes are numbered from 1
SILENT_PASSES = 3  # plain passes in a row that read and report nothing: the loop would go on for ever


log = logging.getLogger("edl_torch.client")


class Session:
    """What this process holds of a dataset. Its id is random and new in every process."""

    def __init__(
        self,
        master: MasterPort,
        description: Description,
        lookahead: int,
        audit_dir: str | Path | None = None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self._audit = Audit() if audit_dir is None else AuditLog(audit_dir, self.id, master.worker_id)
        self.master = master
        self.description = description
        self.steps = Steps(lookahead)
        self.book = Book()
        self._lock = threading.RLock()  # guards book, steps, counts
        self._joining = threading.Lock()
        self._counts = StreamCounts(description.batch_size)
        self._beginning = threading.Lock()
        self._begun: set[str] = set()  # plain streams of the open pass
        self._ran_out = False  # a plain stream read to its end
        self._silent_passes = 0
        self._run = ""  # the plain DataLoader's iteration that reads the open pass
        self._runs: set[str] = set()  # all of them so far
        self._plan: Plan | None = None
        self._membership = Membership()
        self._mode = Mode.PLAIN
        self._exhausted = False  # every batch of the pass was handed out
        self._hung_up = threading.Condition(self._lock)
        self._broken: dict[str, str] = {}  # streams that died in this pass, and the records that they were at
        self.closed = False
        name = description.name
        self._reporter = Reporter(master, self.id, name, self._on_answer, self._rejoin, self._audit)
        self._leases = LeaseSource(
            master,
            self.id,
            name,
            on_grant=self._on_grant,
            on_unwanted=self._on_unwanted,
            on_lost=self._rejoin,
            holds=self._holds,
        )
        self._confirmer = Confirmer(
            master, self.id, name, held=self._held, on_void=self._on_void, on_lost=self._rejoin
        )

    def __repr__(self) -> str:
        return f"<Session {self.id[:8]} {self._leases} {self.book}>"

    # Joining --------------------------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether the dataset is registered."""
        return self._plan is not None

    def plan(self) -> Plan:
        """The dataset as registered; registers it at first use."""
        with self._joining:
            if self._plan is None:
                answer = self._register()
                self._plan = Plan(answer.spec)
                self._follow(answer.ledger, answer.lineage)
                self._note_joined(answer)
                self._confirmer.watch(self.master.attend(self.id, self._on_wanted))
            return self._plan

    def _register(self) -> RegisterAnswer:
        sources = self.description.sources()
        if sources is not None:
            return self._register_as(self.description.in_full(sources))
        try:
            return self._register_as(self.description.by_name())
        except UnknownDataset:
            sources = self.description.fallback_sources()
            if sources is None:
                raise
        return self._register_as(self.description.in_full(sources))

    def _register_as(self, registration: Registration) -> RegisterAnswer:
        return self.master.register(
            RegisterCall(
                session=self.id,
                worker_id=self.master.worker_id,
                batch_size=self.description.batch_size,
                registration=registration,
            )
        )

    def _note_joined(self, answer: RegisterAnswer) -> None:
        self._audit.joined(
            answer.spec,
            ledger=answer.ledger,
            lineage=answer.lineage,
            batch_size=self.description.batch_size,
        )

    def _follow(self, ledger: str, lineage: int) -> None:
        number = self._membership.number + 1
        self._membership = Membership(ledger=ledger, lineage=lineage, number=number)
        self._forget()
        self._leases.follow(self._membership)
        self._reporter.follow(self._membership)
        self._confirmer.follow(self._membership)

    def _forget(self) -> None:
        """All that was held is void."""
        with self._lock:
            self.book.clear()
            self.steps.clear()
            self._counts = StreamCounts(self.description.batch_size)

    def _rejoin(self, lost: Membership) -> None:
        """The master gave this session up: what it held is others' now, and it takes part anew.

        Raises StaleLease when the master is another one by now, or the dataset went back to a checkpoint.
        """
        self._join_again(lost)
        if self._mode is Mode.PLAIN:
            # Batches of void leases are on their way, and a report does not say which batch it means: the
            # pass ends, and what is left of it is read in the next one.
            self._leases.close_pass()

    def _join_again(self, lost: Membership) -> None:
        with self._joining:
            if lost != self._membership:
                return  # another call has found it out before
            self._forget()
            try:
                answer = self._register_as(self.description.by_name())
            except UnknownDataset as exc:
                raise StaleLease(self._forgotten("does not know this dataset")) from exc
            if answer.ledger != lost.ledger:
                raise StaleLease(self._forgotten(f"keeps ledger {answer.ledger}, not {lost.ledger}"))
            if answer.lineage != lost.lineage:
                raise StaleLease(
                    f"{self.description.name!r} was taken back to a checkpoint: this trainer's leases are "
                    f"void. Restart it from the checkpoint that the others use"
                )
            self._follow(answer.ledger, answer.lineage)
            self._note_joined(answer)

    def _forgotten(self, what: str) -> str:
        return (
            f"the master of {self.description.name!r} is another one than before, it {what}: this trainer's "
            f"leases are void. Restart all trainers from one checkpoint (load_state_dict), or from the "
            f"beginning; a master with `--state DIR` survives its own restart"
        )

    # What the master and the fetcher tell ------------------------------------------------------------------

    def _holds(self) -> bool:
        with self._lock:
            return bool(self.book)

    def _held(self) -> tuple[HeldLease, ...]:
        with self._lock:
            return self.book.held()

    def _on_grant(self, grant: Grant) -> None:
        self._audit.granted(grant)
        with self._lock:
            self.book.grant(grant)

    def _on_unwanted(self, grants: list[Grant]) -> None:
        with self._lock:
            self._reporter.note(give_backs=self.book.give_back_undrawn(grants))
        self._reporter.send()

    def _on_answer(self, answer: ReportAnswer) -> None:
        if answer.stale:
            self._on_void(answer.stale)
        if answer.wanted:
            self._leases.yield_to_others()

    def _on_void(self, tasks: tuple[int, ...]) -> None:
        """The master took leases back; their batches are thrown away where they arrive."""
        log.warning("dataset %s: %d lease(s) were taken back", self.description.name, len(tasks))
        with self._lock:
            self.book.void(tasks)
        self._leases.void(tasks)
        if self._mode is Mode.PLAIN:
            self._leases.close_pass()  # for the reason that `_rejoin` has

    def _on_wanted(self, dataset: str) -> None:
        if dataset == self.description.name:
            self._leases.yield_to_others()

    # Passes of ElasticDataLoader --------------------------------------------------------------------------

    def open_pass(self) -> int:
        """Begin a pass whose end the master decides. Returns its number."""
        if self._leases.is_open and self._mode is Mode.ELASTIC:
            raise ConcurrentIteration(
                f"dataset {self.description.name!r} is being iterated already: finish, break out of or "
                f"close() the first iterator before opening another"
            )
        self.plan()
        self._finish_plain_pass()
        with self._lock:
            self.steps.passed_on()
        self.batch_requested()
        self._mode = Mode.ELASTIC
        self._exhausted = False
        self._broken.clear()
        return self._leases.open(Mode.ELASTIC)

    def more_to_read(self) -> bool:
        """With every batch handed out: wait for the master's verdict. True when there is more to read."""
        self._exhausted = True
        self.give_back_undelivered()
        self._reporter.flush()
        more = self._leases.wait_for_more()
        self._exhausted = not more
        if not more:
            self._check_stuck()
        return more

    def give_back_undelivered(self) -> None:
        """Return what loader workers drew and no batch brought."""
        with self._lock:
            self._reporter.note(give_backs=self.book.give_back_undelivered())
        self._reporter.send()

    def _check_stuck(self) -> None:
        """Records that only this trainer can finish would make `while not service.finished` spin for ever."""
        if self._leases.is_open and self._leases.read_nothing and self.book:
            raise AccountingError(
                f"{self.book.batch_records} record(s) of {self.description.name!r} were handed out after the "
                f"last optimizer.step() and nothing else is left: step on them at the end of an epoch, or "
                f"call service.report_batch_done() if they count as trained on"
            )

    @property
    def pass_epoch(self) -> int:
        """The epoch of the pass that is open, or was last; NEW_PASS before the first one."""
        return self._leases.epoch

    def in_pass(self, number: int) -> bool:
        """Whether pass `number` is open."""
        return self._leases.is_open and number == self._leases.pass_number

    def close_pass(self, number: int) -> None:
        """The loop ended: an unfinished batch in hand and all that was not delivered go back."""
        if not self.in_pass(number):
            return
        finished = self._exhausted
        self._leases.close_pass()
        if finished:
            return
        with self._lock:
            in_hand = self.steps.in_hand if self.steps.attached else self.book.batches
            self._reporter.note(give_backs=self.book.withdraw(in_hand))
            self.steps.withdrawn(in_hand)
        self._reporter.send()

    # Batches --------------------------------------------------------------------------------------------

    def hand(self, ticket: Ticket) -> bool:
        """A batch goes to the loop. False when it must be thrown away.

        Whatever happens to this trainer from now on, this batch is all that another may have to repeat.
        """
        self._reporter.flush()
        self._confirmer.moved_on()
        self._confirmer.ensure()
        with self._lock:
            if self.book.hand(ticket):
                self.steps.handed()
                return True
            self._reporter.note(give_backs=self.book.discard(ticket))
        self._reporter.send()
        return False

    def crumble(self, ticket: Ticket) -> None:
        """A partial batch is not to be trained: back to the master, until it fills one."""
        with self._lock:
            self._reporter.note(give_backs=self.book.crumble(ticket))
        self._reporter.send()

    def batch_requested(self) -> None:
        """The loop asks for the next batch: without an optimizer it is done with those before."""
        self._confirmer.moved_on()
        if not self.steps.attached:
            self.settle(self.steps.ahead)

    def stepped(self, optimizer: int) -> None:
        """An attached optimizer stepped."""
        self._confirmer.moved_on()
        with self._lock:
            if self._exhausted:
                self.steps.exhausted_step()
            self.steps.stepped(optimizer)
            keep = self.steps.keep
        self.settle(keep)

    def settle(self, keep: int) -> int:
        """Acknowledge all handed batches but the last `keep`. Returns how many leases that completed."""
        with self._lock:
            acknowledgements = self.book.settle(keep)
            completed = sum(done.task not in self.book for done in acknowledgements)
            self._reporter.note(acknowledgements=acknowledgements)
        self._reporter.send()
        return completed

    def report_elastic(self) -> int:
        """The loop says that it is done with the batch in hand. Returns how many leases that completed."""
        with self._lock:
            self.steps.reported()
        return self.settle(self.steps.ahead)

    def flush(self) -> None:
        """Wait until the master has answered all reports."""
        self._reporter.flush()

    # Passes of a plain DataLoader, and of fetch_shard ------------------------------------------------------

    def begin_stream(self, stream: str, mode: Mode, run: str = "") -> tuple[int, Plan]:
        """A reading process begins. Returns the number of the pass that it takes part in, and the dataset.

        `run` names one iteration over a plain DataLoader, the same in all its workers: a worker that begins
        after its iteration has been given up gets the number of no pass. Without a `run` the trainer's own
        stream always begins a pass, and another process does when it begins for the second time.
        """
        plan = self.plan()
        if mode is Mode.ELASTIC:
            return self._leases.pass_number, plan
        with self._beginning:
            if self._leases.is_open and self._mode is Mode.ELASTIC:
                raise ConcurrentIteration(
                    f"an ElasticDataLoader iterates {self.description.name!r}: end it before reading "
                    f"otherwise"
                )
            if run in self._runs and not self._joins(stream, run):
                return NO_PASS, plan
            if not self._joins(stream, run):
                self._open_plain_pass(run)
            with self._lock:
                self._begun.add(stream)
                return self._leases.pass_number, plan

    def _joins(self, stream: str, run: str) -> bool:
        if not self._leases.is_open or stream == OWN_STREAM:
            return False
        return run == self._run if run else stream not in self._begun

    def _open_plain_pass(self, run: str) -> None:
        self._finish_plain_pass()
        self._mode, self._run = Mode.PLAIN, run
        self._broken.clear()
        self._leases.open(Mode.PLAIN)
        if run:
            self._runs.add(run)

    def _finish_plain_pass(self) -> None:
        """What a plain pass left unreported was never trained on, as far as anybody can tell."""
        if self._mode is not Mode.PLAIN or not self._begun:
            return
        self._leases.close_pass()
        with self._lock:
            unreported = self.book.records
            silent = self._ran_out and unreported > 0 and not self._counts.reports
            self._silent_passes = self._silent_passes + 1 if silent else 0
            self._ran_out = False
            self._reporter.note(give_backs=self.book.give_back_unacknowledged())
            self._begun.clear()
            self._counts = StreamCounts(self.description.batch_size)
        self._reporter.send()
        if self._silent_passes >= SILENT_PASSES:
            raise AccountingError(
                f"{self._silent_passes} passes over {self.description.name!r} went by without a report, and "
                f"{unreported} record(s) were read each time: call service.report_batch_done() after each "
                f"batch, leave out drop_last at a plain DataLoader, or use ElasticDataLoader"
            )
        if unreported:
            warnings.warn(
                f"a pass over {self.description.name!r} ended with {unreported} record(s) that were not "
                f"reported as trained on; they are read again. Call service.report_batch_done() after each "
                f"batch, or use ElasticDataLoader",
                stacklevel=2,
            )

    def next_grant(self, stream: str, number: int) -> Grant | None:
        """The next lease of a stream."""
        grant = self._leases.next(stream, number)
        if grant is None:
            self._ran_out = True
        else:
            with self._lock:
                self.book.draw(grant.task, stream)
                if self._mode is Mode.PLAIN:
                    self._counts.grant(stream, grant)
        return grant

    def stream_broke(self, stream: str) -> None:
        """A reading process hung up. While its pass is open that means that it died."""
        with self._hung_up:
            if self._leases.is_open and not self.closed:
                self._broken.setdefault(stream, self._whereabouts(stream))
                log.warning("loader %s ended before its pass: %s", stream, self._broken[stream])
            self._hung_up.notify_all()

    def _whereabouts(self, stream: str) -> str:
        with self._lock:
            shards = [self.plan().shard(part) for part in self.book.unhanded(stream)]
        *before, at = map(describe_shard, shards) if shards else ("no record",)
        return f"{at} (before them {', '.join(before)}, not delivered yet)" if before else at

    def broken_streams(self, timeout_s: float) -> dict[str, str]:
        """Reading processes of this pass that died, and what they were at; waits for the first to be seen."""
        with self._hung_up:
            self._hung_up.wait_for(lambda: self._broken, timeout_s)
            return dict(self._broken)

    def fail_record(self, task: int, position: int, reason: str) -> None:
        """A record cannot be read."""
        with self._lock:
            failures = self.book.fail(task, position, reason)
            self._counts.fail(task, position)
            self._reporter.note(failures=failures)
        self._reporter.send()

    def report_plain(self, batch_size: int | None) -> int:
        """A batch of a plain loop was trained on. Returns how many leases that completed."""
        with self._lock:
            runs = self._counts.report(batch_size)
            done = {task: after for task, _, after in runs}
            acknowledgements = [
                a for task, upto in done.items() for a in self.book.acknowledge(task, upto).values()
            ]
            completed = sum(a.task not in self.book for a in acknowledgements)
            self._reporter.note(acknowledgements=acknowledgements)
        self._reporter.send()
        self._confirmer.moved_on()
        self._confirmer.ensure()  # the loop takes its next batch without asking here
        return completed

    def fail_batch(self, batch_size: int | None, reason: str) -> None:
        """The batch in hand could not be trained on: its records go to quarantine."""
        with self._lock:
            if self._mode is Mode.ELASTIC:
                failures = self.book.fail_batch(reason, self.steps.ahead)
                self.steps.failed()
            else:
                if not self._counts.exact:
                    raise InvalidArgument(
                        "with several loader workers a plain DataLoader's batch does not say where it came "
                        "from, so err_msg cannot name its records: use ElasticDataLoader"
                    )
                runs = self._counts.report(batch_size)
                failures = [f for t, a, b in runs for p in range(a, b) for f in self.book.fail(t, p, reason)]
            self._reporter.note(failures=failures)
        self._reporter.send()

    @property
    def in_elastic_mode(self) -> bool:
        """Whether the last pass was one of an ElasticDataLoader."""
        return self._mode is Mode.ELASTIC

    @property
    def exact(self) -> bool:
        """Whether a token taken now says precisely what was trained on."""
        return self._mode is Mode.ELASTIC or self._counts.exact

    # Tokens ---------------------------------------------------------------------------------------------

    def snapshot(self) -> str:
        """Acknowledge what the loop is done with, the batch in hand included, and take the token."""
        self.plan()
        self.settle(self.steps.keep if self.steps.attached else self.steps.ahead)
        self.flush()
        token = self.master.snapshot(self.description.name)
        self._audit.snapshot(token)
        return token

    def restore(self, token: str | None) -> None:
        """Go back to a token; what is in flight is thrown away."""
        if token is not None and not self.joined:
            self.description.follow(Token.decode(token))
        self.plan()
        self._leases.close_pass()
        self.flush()
        lineage = self.master.restore(self.description.name, token)
        self._audit.restored(token, lineage=lineage)
        self._follow(self._membership.ledger, lineage)
        with self._lock:
            self._begun.clear()

    def close(self) -> None:
        """Give back what was not trained on and say goodbye, within `CLOSE_TIMEOUT_S`."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self.closed = True
        try:
            self._leases.close(CLOSE_TIMEOUT_S)
            with self._lock:
                self._reporter.note(give_backs=self.book.give_back_unacknowledged())
            self._reporter.close(max(0.0, deadline - time.monotonic()))
        finally:
            self._audit.close()
            if self.joined:
                self.master.leave(self.id)


def describe_shard(shard: Shard) -> str:
    """The shard's records, for people."""
    some = "some of " if shard.shuffled else ""
    return f"{some}records {shard.start} to {shard.end - 1} of {shard.name!r}"
