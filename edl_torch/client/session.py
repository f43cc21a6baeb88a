"""One trainer's session with its master: the shell around the pure trainer.

It holds one lock while the trainer decides, and none while it acts. It decides nothing itself.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import get_ident
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from edl_torch.audit.log import AuditLog
from edl_torch.client.description import Description
from edl_torch.client.elastic import ElasticSession
from edl_torch.client.iterations import NoIterations, PlainIterations
from edl_torch.client.liveness import LivenessFeed
from edl_torch.client.lockstep import FollowedMaster
from edl_torch.client.model import Model
from edl_torch.client.neighbours import sessions
from edl_torch.client.optimizers import Optimizers
from edl_torch.client.position import SessionPosition
from edl_torch.core.calls import Grant
from edl_torch.core.master_api import MasterApi
from edl_torch.core.plan import Plan
from edl_torch.errors import MasterUnavailable, ServiceClosed, StaleLease
from edl_torch.system.cuts import cut_off, is_own
from edl_torch.system.user_warnings import warn_user
from edl_torch.trainer.actions import Action, Attend, Call, Describe, LookAround, Procedure, Register, Wait
from edl_torch.trainer.deliveries import Deliveries
from edl_torch.trainer.facts import Logged
from edl_torch.trainer.liveness import Liveness
from edl_torch.trainer.plain import Reading
from edl_torch.trainer.state import Config
from edl_torch.trainer.supply import Mode
from edl_torch.trainer.tickets import ticket_size
from edl_torch.trainer.trainer import Trainer

CLOSE_TIMEOUT_S = 5.0

_NO_LOCK = nullcontext()

log = logging.getLogger("edl_torch.client")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Session:
    """What this process holds of a dataset. Its id is random and new in every process.

    `elastic` is what an `ElasticDataLoader` talks to, `position` what takes tokens and goes back to them; the
    session is the `Host` of loader workers' links.
    """

    def __init__(
        self,
        master: MasterApi,
        description: Description,
        lookahead: int | None,
        audit_dir: str | Path | None,
    ) -> None:
        self.id = uuid.uuid4().hex
        self.master = master
        self.description = description
        self.closed = False
        self._deciding = False  # a decision is under way, or was cut off
        self._given_up: list[Procedure[Any]] = []  # to be closed before anything else is decided
        self.loop_thread = 0  # that of the loop which asked or told it something last
        config = Config(
            session=self.id,
            dataset=description.name,
            batch_size=description.batch_size,
            lookahead=lookahead,
            in_process=master.in_process,
            report_delay_s=master.report_delay_s,
            keeps_ledger=master.keeps_ledger,
            audited=audit_dir is not None,
            follows_data=description.data_changed is not None,
        )
        self.trainer = Trainer(config, Liveness())
        self._audit = None if audit_dir is None else AuditLog(audit_dir, self.id, master.worker_id)
        self._lock = threading.RLock()  # the one lock of the session; a condition's own `with` runs Python
        self._changed = threading.Condition(self._lock)
        self._waiting: list[Wait] = []
        self._clock: Callable[[], float] = time.monotonic  # that of liveness, where it is ever in doubt
        self._worker: threading.Thread | None = None
        self._may_need_worker = not master.in_process
        self._iterations: PlainIterations = NoIterations()
        self.elastic = ElasticSession(self)
        self.position = SessionPosition(self)
        self.optimizers = Optimizers(self.elastic)
        self.model = None if audit_dir is None else Model()
        sessions.add(self)

    def __repr__(self) -> str:
        return f"<Session {self.trainer!r}>"

    # Running procedures -------------------------------------------------------------------------------------

    def run(self, procedure: Procedure[T]) -> T:
        """Run a procedure of the trainer in the calling thread. Returns, or raises, what it does."""
        try:
            action = self.do(procedure.send, None)
            while True:
                # What it has waited for still holds when it goes on.
                with self._lock if isinstance(action, Wait) else _NO_LOCK:
                    resume: Callable[[Any], Action]
                    try:
                        resume, answer = procedure.send, self._act(action)
                    except Exception as exc:  # noqa: BLE001  the procedure handles it
                        resume, answer = procedure.throw, exc
                    action = self.do(resume, answer)
        except StopIteration as end:
            result: T = end.value
            return result
        except BaseException:  # Ctrl-C too, wherever it came
            self._given_up.append(procedure)
            if not self.cut:
                self.do(_nothing)
            raise

    def do(self, decide: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Let the trainer decide something at once. Returns, or raises, what `decide` does.

        Raises ServiceClosed where a signal's handler has cut an earlier decision off (`system.cuts`).
        """
        state = self.trainer.state
        with self._lock:
            if self._deciding:
                self._refuse()
            self._deciding = True
            try:
                while self._given_up:
                    self._given_up.pop().close()  # what it had begun is undone
                state.now = self._clock()
                try:
                    answer = decide(*arguments)
                finally:
                    if state.facts or self._waiting or self._may_need_worker:
                        self._decided()
            except StopIteration:
                self._deciding = False
                raise
            except BaseException as exc:
                self._deciding = not (exc in arguments or exc is state.outbox.raised or is_own(exc))
                raise
            self._deciding = False
            return answer

    def _refuse(self) -> NoReturn:
        self._changed.notify_all()  # who waits for a decision is told, too
        raise ServiceClosed(cut_off(f"a decision about dataset {self.description.name!r}"))

    @property
    def cut(self) -> bool:
        """Whether a decision was cut off, so that nothing goes on from here."""
        with self._lock:
            return self._deciding

    def end(self, procedure: Procedure[None]) -> None:
        """Run a procedure that ends something; nothing after a cut: the master takes all back."""
        if not self.cut:
            self.run(procedure)

    def _decided(self) -> None:
        """Write down what has happened, and wake the threads that wait for it. The lock is held."""
        if self.trainer.state.facts:
            self._write_down()
        if self._may_need_worker and self.trainer.has_work:
            self._may_need_worker = False
            self._worker = threading.Thread(target=self._work, name="edl-calls", daemon=True)
            self._worker.start()
        for wait in self._waiting:
            if wait.ready():
                self._changed.notify_all()
                return

    def _write_down(self) -> None:
        facts, self.trainer.state.facts = self.trainer.state.facts, []
        for fact in facts:
            if isinstance(fact, Logged):
                log.warning("%s", fact.text)
            elif self._audit is not None:
                self._audit.write(fact)

    def see_model(self, at: str) -> None:
        """Write down what the model is now, where there is a log; `ModelSeen` has the moments."""
        seen = None if self.model is None else self.model.look(at, self.optimizers.alive())
        if seen is not None:
            self.do(self.trainer.state.facts.append, seen)

    # Actions ------------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> Any:
        if isinstance(action, Call):
            return self.master.call(action.request, action.wait_s)
        if isinstance(action, Register):
            return self.description.register(self.master, self.id, again=action.again)
        if isinstance(action, Attend):
            return self._attend(action.member)
        if isinstance(action, Describe):
            beginning = self.description.beginning()
            return "" if beginning is None else beginning.encode()
        if isinstance(action, LookAround):
            return sessions.neighbours(self)
        if isinstance(action, Wait):
            return self._wait(action)
        warn_user(action.text)
        return None

    def _wait(self, wait: Wait) -> Any:
        self._waiting.append(wait)
        try:
            return self._changed.wait_for(lambda: self._deciding or wait.ready(), wait.timeout_s)
        finally:
            self._waiting.remove(wait)

    def _attend(self, member: int) -> bool:
        liveness = self.trainer.state.liveness
        assert liveness is not None
        feed = LivenessFeed(liveness, self.trainer.state.measuring, self._changed, self._wanted, self._tell)
        clock = self.master.attend(self.id, member, feed)
        self._clock = clock or self._clock
        return clock is not None

    def _wanted(self, dataset: str) -> None:
        """Give back what is not in use: another trainer waits for records. Called from any thread."""
        if dataset == self.description.name:
            self.elastic.end_abandoned_silently()
            self.end(self.trainer.wanted())

    def _tell(self) -> None:
        """The master wants to know all before it answers somebody. Called from any thread."""
        if self.master.report_delay_s and self.trainer.state.outbox.unanswered:
            self.end(self.trainer.reporter.post())

    def _work(self) -> None:
        try:
            self.run(self.trainer.work())
        except Exception as exc:  # noqa: BLE001  the top of a thread: whoever waits for it must hear of it
            with self._changed:
                self._may_need_worker = True  # the next report gets another
                self.trainer.fail(exc)
                self._changed.notify_all()

    # Taking part --------------------------------------------------------------------------------------------

    @property
    def joined(self) -> bool:
        """Whether the dataset is registered."""
        return self.trainer.state.registered.plan is not None

    @property
    def lineage(self) -> int:
        """The lineage that it takes part in; 0 before it registered."""
        return self.trainer.state.fence.lineage

    @property
    def records(self) -> int:
        """Records leased and not yet acknowledged."""
        return self.do(lambda: self.trainer.state.inflight.records)

    @property
    def drawn_records(self) -> int:
        """Records that its loop, which was not left, has begun to read, and has not finished with."""
        if self.elastic.abandoned:
            return 0
        return self.do(lambda: ticket_size(self.trainer.state.inflight.drawn()))

    def shares_data(self, other: Session) -> bool:
        """Whether both take part in one dataset of one master."""
        mine, its = self.trainer.state, other.trainer.state
        same = mine.fence.ledger == its.fence.ledger and mine.fence.lineage == its.fence.lineage
        return same and mine.config.dataset == its.config.dataset

    def plan(self) -> Plan:
        """The dataset as registered; registers it at first use."""
        return self.trainer.state.registered.plan or self.run(self.trainer.registrar.plan())

    def follow(self) -> None:
        """Leave the master: another rank holds the leases of what this one trains on."""
        if self.joined:
            self.master.leave(self.id, self.trainer.state.fence.member)
        if self._audit is not None:
            self._audit.close()
            self._audit = self.model = None
        self.master = FollowedMaster(self.master)
        self.do(self.trainer.follow)

    # What reading processes ask -----------------------------------------------------------------------------

    def watch(self, iterations: PlainIterations) -> None:
        """Ask `iterations` what iterations over plain DataLoaders deliver, and which are over."""
        self._iterations = iterations

    def begin_stream(
        self,
        stream: str,
        mode: Mode,
        run: str = "",
        begun: int = 0,
        deliveries: Deliveries | None = None,
    ) -> tuple[int, Plan]:
        """Begin a stream of a process that reads. Returns the number of its pass, and the dataset."""
        if mode is Mode.ELASTIC:
            return self.run(self.trainer.begin_stream())
        self.elastic.end_abandoned_silently()
        return self.run(self.trainer.begin_plain(self._reading(stream, run, begun, deliveries)))

    def _reading(self, stream: str, run: str, begun: int, deliveries: Deliveries | None) -> Reading:
        known = self._iterations
        known.check(run)
        return Reading(
            stream=stream,
            run=run,
            begun=begun,
            number=known.number(run),
            newest=known.newest,
            is_over=bool(run) and known.is_over(run),
            deliveries=known.deliveries(run) if run else deliveries,
        )

    def next_grant(self, stream: str, number: int) -> Grant | None:
        """The next lease of a stream."""
        return self.run(self.trainer.leasing.next(stream, number))

    def fail_record(self, task: int, position: int, reason: str) -> None:
        """Put a record into quarantine that cannot be read."""
        self.run(self.trainer.fail_record(task, position, reason))

    def stream_broke(self, stream: str, run: str, ended_by: str) -> None:
        """Note that a reading process ended by an error, or hung up without a word: it died if its pass is
        open."""
        try:
            if not self.elastic.abandoned and not self.closed:  # else torch has ended its workers
                self.run(self.trainer.stream_broke(stream, ended_by))
        finally:
            self._iterations.worker_died(run)

    def broken_streams(self, timeout_s: float) -> dict[str, str]:
        """Reading processes of this pass that died, and what they were at; waits for the first to be seen."""
        return self.run(self.trainer.broken_streams(timeout_s))

    # What a plain loop reports ------------------------------------------------------------------------------

    @property
    def owed(self) -> int:
        """Records of a plain pass that was read to its end for which reports may still come."""
        return self.do(lambda: self.trainer.plain.owed)

    @property
    def exact(self) -> bool:
        """Whether a token taken now says precisely what was trained on."""
        return self.do(lambda: self.trainer.state.exact)

    def abandon_pass(self) -> None:
        """Give back what a loop over a plain pass, which was left, has not reported."""
        self.run(self.trainer.plain.finish(abandoned=True))

    def report_batch(self, batch_size: int | None) -> int:
        """Note that a batch was trained on. Returns how many leases that completed."""
        self.loop_thread = get_ident()
        return self.run(self.trainer.report(batch_size))

    def fail_batch(self, batch_size: int | None, reason: str) -> None:
        """Put the records of the batch in hand, which could not be trained on, into quarantine."""
        self.run(self.trainer.fail_batch(batch_size, reason))

    def flush(self) -> None:
        """Wait until the master has answered all reports."""
        self.run(self.trainer.reporter.flush())

    # The end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back what was not trained on and say goodbye, within `CLOSE_TIMEOUT_S`."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self.closed = True
        try:
            self.end(self.trainer.close(CLOSE_TIMEOUT_S))
            if not self.cut:
                self.see_model("end")
        except (MasterUnavailable, ServiceClosed, StaleLease):
            # What nobody hears of is taken back when the session is over.
            log.debug("the end of session %s was not answered", self.id, exc_info=True)
        finally:
            self.optimizers.close()
            if self._worker is not None and self._worker is not threading.current_thread():
                self._worker.join(max(0.0, deadline - time.monotonic()))
            if self._audit is not None:
                with self._lock:
                    self._audit.close()
            if self.joined:
                self.master.leave(self.id, self.trainer.state.fence.member)


def _nothing() -> None:
    return
