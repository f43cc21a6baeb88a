"""One trainer's session with its master: the shell around the pure trainer.

It holds one lock while the trainer decides, and none while it acts. It decides nothing itself.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any, TypeVar, TypeVarTuple

from edl_torch.audit.log import AuditLog
from edl_torch.client.description import Description
from edl_torch.client.gradients import Gradients
from edl_torch.client.liveness import LivenessFeed
from edl_torch.client.model import Model
from edl_torch.client.peers import FollowedMaster, Lockstep
from edl_torch.client.workers.links import Host, KeepsWorkers
from edl_torch.core.calls import NEW_PASS, MasterApi
from edl_torch.core.plan import Plan
from edl_torch.errors import (
    AccountingError,
    ConcurrentIteration,
    MasterUnavailable,
    ServiceClosed,
    StaleLease,
)
from edl_torch.readers.base import AbstractDataReader
from edl_torch.shard import TaskType
from edl_torch.system.processes import OfThisProcess
from edl_torch.system.termination import cut_off, is_own
from edl_torch.system.user_warnings import warn_user
from edl_torch.trainer.batches import Batch
from edl_torch.trainer.liveness import Liveness
from edl_torch.trainer.position import FIRST_LINEAGE
from edl_torch.trainer.state import TrainerConfig
from edl_torch.trainer.trainer import Trainer
from edl_torch.trainer.vocabulary import (
    Action,
    Attend,
    Call,
    Describe,
    Evidence,
    Logged,
    LookAround,
    Procedure,
    Register,
    SiblingSession,
    Wait,
    ticket_size,
)

CLOSE_TIMEOUT_S = 5.0

log = logging.getLogger("edl_torch.client")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Session:
    """What this process holds of a dataset. Its id is random and new in every process.

    It is the trainer's side for loaders, integrations and the session's own position: what decides is
    `trainer`, whose procedures `run` runs, and whose other decisions `do` makes. The verbs here do more than
    that.

    Attributes:
        readers: the `Host` that reading processes, this one too, ask for leases; it reads no data itself.
        passes: `trainer.elastic`, the passes of an `ElasticDataLoader`.
        gradients: those of the attached optimizers.
        lockstep: what it shares with the ranks that it steps with; None where it trains alone.
        checkpoints: by folder, the one that this session loaded or saved last.
        loaders: whose processes end with it.
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
        config = TrainerConfig(
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
        # The pass whose iterator is no more, and whether gradients were then as the loop had them when it was
        # looked at last; written by a finaliser, so without a lock
        self._abandoned: tuple[int, bool] | None = None
        self.readers = Host(
            self.trainer,
            self.run,
            lambda: self.end_abandoned(silently=True),
            lambda: bool(self._abandoned) or self.closed,
        )
        self._unseen_tokens = 0  # taken since the data were last seen to be as they were registered
        self._has_unseen = True  # records may have been read since the data were looked at
        self.passes = self.trainer.elastic
        self.gradients = Gradients(self.trainer)
        self.model = None if audit_dir is None else Model()
        self.lockstep: Lockstep | None = None
        self.checkpoints: dict[str, str] = {}
        self.loaders: weakref.WeakSet[KeepsWorkers] = weakref.WeakSet()
        _sessions.add(self)

    def __repr__(self) -> str:
        return f"<Session {self.trainer!r}>"

    # Running procedures -------------------------------------------------------------------------------------

    def run(self, procedure: Procedure[T]) -> T:
        """Run a procedure of the trainer in the calling thread. Returns, or raises, what it does.

        Raises ServiceClosed where a signal's handler has cut an earlier decision off (`system.termination`).
        """
        state = self.trainer.state
        action: Action | None = None
        resume: Callable[[Any], Action] = procedure.send
        answer: Any = None
        try:
            while True:
                if action is not None and not isinstance(action, Wait):
                    resume, answer = self._answered(procedure, action)
                with self._lock:
                    if isinstance(action, Wait):  # what it has waited for still holds when it goes on
                        resume, answer = self._answered(procedure, action)
                    if self._deciding:
                        self._changed.notify_all()  # who waits for a decision is told, too
                        raise ServiceClosed(cut_off(f"a decision about dataset {self.description.name!r}"))
                    self._deciding = True
                    try:
                        while self._given_up:
                            self._given_up.pop().close()  # what it had begun is undone
                        state.now = self._clock()
                        try:
                            action = resume(answer)
                        finally:
                            if state.facts or self._waiting or self._may_need_worker:
                                self._decided()
                    except StopIteration as end:
                        self._deciding = False
                        result: T = end.value
                        return result
                    except BaseException as exc:
                        self._deciding = not (exc is answer or exc is state.outbox.raised or is_own(exc))
                        raise
                    self._deciding = False
        except BaseException:  # Ctrl-C too, wherever it came
            self._given_up.append(procedure)
            if not self.cut:
                self.do(lambda: None)
            raise

    def do(self, decide: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Let the trainer decide something at once. Returns, or raises, what `decide` does; see `run`."""
        return self.run(_at_once(decide, *arguments))

    def _answered(self, procedure: Procedure[Any], action: Action) -> tuple[Callable[[Any], Action], Any]:
        """Act. Returns what takes the answer, or the error that came in its place."""
        try:
            return procedure.send, self._act(action)
        except Exception as exc:  # noqa: BLE001  the procedure handles it
            return procedure.throw, exc

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
        seen = None if self.model is None else self.model.look(at, self.gradients.optimizers())
        if seen is not None:
            self.do(self.trainer.state.facts.append, seen)

    def see_data(self, *, is_over: bool = False, at_any_cost: bool = False, for_token: bool = False) -> None:
        """Look whether the data are as they were registered; `is_over`: and nothing is being read of them."""
        said = self.description.changed(at_any_cost=at_any_cost) if self.joined else None
        if said:
            self.do(self.trainer.state.data_changed, said, self._unseen_tokens)
        elif said is not None:
            self._unseen_tokens = 0
        elif for_token:
            self._unseen_tokens += 1
        if is_over:
            self._has_unseen = said is None

    def let_go_of_data(self) -> None:
        """Keep no reader, but for a look at the data of a pass that the loop left. For finalisers."""
        if not (self.joined and self._has_unseen):
            self.description.reader = self.description.fallback_reader = None

    # Actions ------------------------------------------------------------------------------------------------

    def _act(self, action: Action) -> Any:
        if isinstance(action, Call):
            return self.master.call(action.request, action.wait_s)
        if isinstance(action, Register):
            registered = self.description.register(self.master, self.id, again=action.again)
            self.trainer.state.registered.known_by = self.description.known_by
            return registered
        if isinstance(action, Attend):
            return self._attend(action.member)
        if isinstance(action, Describe):
            beginning = self.description.beginning()
            return "" if beginning is None else beginning.encode()
        if isinstance(action, LookAround):
            return self.siblings()
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
            self.end_abandoned(silently=True)
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
        return self.trainer.state.registered.plan is not None

    @property
    def lineage(self) -> int:
        """The lineage that it takes part in; 0 before it registered."""
        return self.trainer.state.fence.lineage

    def read_by(self, reader: AbstractDataReader, *, shuffle: bool, on_bad_record: str = "raise") -> None:
        """Take note that a dataset object reads the records; `shuffle` is that inside shards."""
        self.description.read_by(reader, shuffle=shuffle, on_bad_record=on_bad_record, is_used=self.joined)

    def siblings(self) -> tuple[SiblingSession, ...]:
        """Return this process's other sessions whose loops have records of the dataset, read or to be read.

        Not what they give back by themselves when they hear that somebody waits.
        """
        thread, mine = get_ident(), self.trainer.state
        found = []
        for other in _sessions.alive():
            its = other.trainer.state
            same = mine.fence.ledger == its.fence.ledger and mine.fence.lineage == its.fence.lineage
            is_out = other is self or other.closed or other.cut or other._abandoned
            if is_out or not same or mine.config.dataset != its.config.dataset:
                continue
            if records := ticket_size(other.do(its.inflight.drawn)):
                same_thread = other.loop_thread == thread
                found.append(SiblingSession(session=other.id, records=records, same_thread=same_thread))
        return tuple(found)

    @property
    def has_padding(self) -> bool:
        """Whether a loop of the calling thread that trains has a padding batch in hand of which it has not
        asked what it weighs."""
        batches = self.trainer.state.batches
        has_some = bool(batches.unweighed) and batches.in_hand in batches.unweighed
        return has_some and self._is_trained_in(get_ident())

    @property
    def has_the_batch(self) -> bool:
        """Whether a loop of the calling thread has a batch of this session's to train on, and of no other's;
        one that trains has some from the beginning of its pass to the end."""
        thread = get_ident()

        def may_train(session: Session) -> bool:
            state = session.trainer.state
            is_training = state.batches.attached and state.supply.current.is_open
            return session._is_trained_in(thread) and (is_training or bool(state.batches.unfinished))

        has_in_hand = self.trainer.state.batches.has_in_hand
        return has_in_hand and [session for session in _sessions.alive() if may_train(session)] == [self]

    def _is_trained_in(self, thread: int) -> bool:
        """Whether the loop is of this thread, trains, and was not left."""
        trains = self.description.task_type is TaskType.TRAINING
        return trains and self.loop_thread == thread and not (self.closed or self._abandoned)

    def is_attached_elsewhere(self, optimizer: Any) -> bool:
        """Whether an optimizer is attached to another of this process's sessions."""
        others = (other for other in _sessions.alive() if other is not self)
        return any(optimizer in other.gradients.optimizers() for other in others)

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

    # The loop over an ElasticDataLoader ---------------------------------------------------------------------

    def open(self, epoch: int = NEW_PASS) -> int:
        """Begin a pass over `epoch`, or the one that runs; one that is open is ended. Returns its number."""
        self.end_abandoned()
        self.look_for_writes()
        self.loop_thread = get_ident()
        for other in _sessions.alive():
            if other is not self and other.loop_thread == self.loop_thread:
                other.trainer.state.batches.left_for_another()
        self.gradients.pass_left()
        is_first = not self.trainer.state.supply.current.number
        if self._has_unseen and not is_first:  # the loop has left the last pass
            self.see_data()
        self._has_unseen = True
        number = self.run(self.trainer.open(epoch))
        if is_first and self._audit is not None:
            self._tell_of_namesake(self._audit)
        self.gradients.leave(self.trainer.state.batches.unclear)
        if lost := self.gradients.lost():
            self.end(self.passes.lose_gradients(lost))
        if self.model is not None:
            self.model.changed()
        self.gradients.look()
        return number

    def _tell_of_namesake(self, audit: AuditLog) -> None:
        """Log that another run in this program has the same name and folder: the audit takes the last of them
        for the job, and this one goes on from no checkpoint of it."""
        mine = self.trainer.state.fence
        for other in _sessions.alive() if mine.lineage == FIRST_LINEAGE else ():
            its = other.trainer.state.fence
            if (
                other._audit is not None
                and other.description.name == self.description.name
                and other._audit.path.parent.resolve() == audit.path.parent.resolve()
                and its.ledger not in ("", mine.ledger)
            ):
                log.warning(
                    "two datasets of this program are named %r and write to %s: where they are alike, the "
                    "audit judges the last one alone. Give each a name of its own: dataset_name=…",
                    *(self.description.name, audit.path.parent),
                )
                return

    def request(self, number: int) -> bool:
        """Note that the loop asks pass `number` for a batch. Returns whether it is still open."""
        self.loop_thread = get_ident()
        self.gradients.let_go()
        return self.run(self.passes.request(number))

    def check_newest(self, number: int) -> None:
        """Raise ConcurrentIteration where a later iteration has ended pass `number`.

        Raise AccountingError where the data went back while a wrapper held batches of it.
        """
        if self.passes.superseded >= number:
            raise ConcurrentIteration(
                f"dataset {self.description.name!r} was iterated anew, which has ended this older "
                f"iterator: what it had not handed out went back. Use the newest one"
            )
        if self.passes.read_ahead == number:
            raise AccountingError(
                f"the data of {self.description.name!r} went back to a checkpoint while what lies "
                f"between the loop and its loader held batches that it had read ahead: they come again, and "
                f"would be trained on twice. Leave the loop after load_state_dict(), and begin a new one"
            )

    def passed_on(self) -> Batch | None:
        """Note that a wrapper passes on the oldest batch that it has read ahead. Returns it, or None."""
        self.gradients.let_go()
        return self.run(self.passes.passed_on())

    def about_to_step(self) -> None:
        """Look at the model before the first step of a pass, or of another optimizer, which goes on from what
        was loaded, whenever that was; and after a step that was looked at."""
        model = self.model
        if model is not None and (model.is_due or model.was_seen):
            if model.is_another(self.gradients.optimizers()):
                self.doubt("written")
            if model.is_due:
                self.see_model("begin")

    def look_for_writes(self, optimizer: Any = None) -> None:
        """Doubt that there is one model if parameters, of one optimizer or all, were written since a step."""
        if self.model is not None and self.model.was_written(optimizer):
            self.doubt("written")

    def doubt(self, why: str) -> None:
        """Write down, once in a lineage, what speaks against one model; `ModelSeen.at` has the words."""
        if self.model is not None and why not in self.model.doubts:
            self.model.doubts.add(why)
            self.see_model(why)

    def stepped(self, optimizer: int, *, skipped: bool = False, moved: bool | None = None) -> None:
        """Note a step of an attached optimizer, or one that its GradScaler skipped.

        One that has not `moved` parameters was none: the optimizer left it out. None: that is not seen.

        A wrapper that tells has no word for a loop that was left with one of its last batches. A step after
        that is not on this batch: no gradient has changed since it came.
        """
        if self._abandoned:
            self.end_abandoned()
        state, model = self.trainer.state, self.model
        is_left = model is not None and not self.passes.is_open(state.supply.current.number) and state.batches
        used = self.gradients.use(optimizer, skipped=skipped, moved=moved)
        if skipped:  # by a report of its own, as the log has how each came about
            self.flush()
            self.run(self.passes.stepped(optimizer, used.before_hand, Evidence.SKIPPED))
            self.flush()
        else:
            self.run(self.passes.stepped(optimizer, used.before_hand))
        if used.back:
            self.run(self.passes.learnt_again(used.back))
        if used.several:
            self.do(self.passes.learnt_in_several_steps, used.several)
        if used.padding:
            self.do(self.passes.learnt_from_padding, used.padding)
        if model is not None:
            for why in sorted(used.doubts):
                self.doubt(why)
            is_due = model.stepped()
            if is_left:  # behind the end of a pass nothing else looks at the model that has these batches
                self.flush()
                self.see_model("end")
            elif is_due:
                self.see_model("step")

    def set_lookahead(self, lookahead: int | None) -> None:
        """Have so many batches read ahead of the loop from the next pass on; None: a wrapper says when it
        passes one on. A pass that is open is ended."""
        self.end_abandoned()
        self.gradients.let_go()
        self.run(self.passes.set_lookahead(lookahead))

    def close_pass(self, number: int) -> None:
        """End a pass: an unfinished batch in hand and all that was not delivered go back."""
        self.gradients.let_go()
        self.end(self.passes.close(number))
        if not self.cut:
            self.look_for_writes()
            self.see_model("end")
            self.see_data(is_over=number == self.trainer.state.supply.current.number)
        self.warn_of_what_went_back()

    def abandon(self, number: int) -> None:
        """Note that the iterator of pass `number` was garbage-collected. For finalisers: takes no lock, makes
        no call, never raises; `end_abandoned` acts on it. A gradient that the loop puts in place from now on,
        as ranks that reduce by hand do before their step, is not of the batch that it had."""
        last = self._abandoned
        if last is None or number > last[0]:  # a newer one has ended the older ones
            self._abandoned = number, self.gradients.are_as_seen()

    def end_abandoned(self, *, silently: bool = False) -> None:
        """End the pass whose iterator was garbage-collected, if there is one, as `close_pass` would.

        Never raises what a report raised: the next one does. Called before anything else that the loop asks
        for; `silently` by others, and the loop gets the warning later.
        """
        if self._abandoned is None:
            return
        while (left := self._abandoned) is not None:
            number, are_as_seen = left
            if not are_as_seen:
                self.gradients.let_go()
            self.end(self.passes.end_abandoned(number))
            if self._abandoned is left:
                self._abandoned = None
        if not silently:
            self.warn_of_what_went_back()

    def warn_of_what_went_back(self) -> None:
        """Warn, once, where a batch went back that the loop may have trained on."""
        self.end(self.passes.warnings.of_what_went_back())

    def flush(self) -> None:
        """Wait until the master has answered all reports."""
        self.run(self.trainer.reporter.flush())

    # The end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back what was not trained on and say goodbye, within `CLOSE_TIMEOUT_S`."""
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        self.closed = True
        try:
            self.gradients.leave(self.trainer.state.batches.before_any_step())
            self.end(self.trainer.close(CLOSE_TIMEOUT_S))
            if not self.cut:
                self.look_for_writes()
                self.see_model("end")
                if self._has_unseen:
                    self.see_data(at_any_cost=True)
        except (MasterUnavailable, ServiceClosed, StaleLease):
            # What nobody hears of is taken back when the session is over.
            log.debug("the end of session %s was not answered", self.id, exc_info=True)
        finally:
            if self._worker is not None and self._worker is not threading.current_thread():
                self._worker.join(max(0.0, deadline - time.monotonic()))
            if self._audit is not None:
                with self._lock:
                    self._audit.close()
            try:
                if self.joined:
                    self.master.leave(self.id, self.trainer.state.fence.member)
            finally:
                self.readers.close()


def _at_once(decide: Callable[[*Ts], T], *arguments: *Ts) -> Procedure[T]:
    yield from ()  # it wants nothing done
    return decide(*arguments)


# Of the process: two loops of one thread know nothing of each other.
_sessions: OfThisProcess[Session] = OfThisProcess()
