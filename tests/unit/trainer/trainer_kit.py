"""Procedures of a trainer, run one action at a time against a dispatcher whose clock stands until moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from edl_torch.core.calls import (
    Acknowledgement,
    ConfirmCall,
    GiveBack,
    Grant,
    LeaseCall,
    RegisterAnswer,
    RegisterCall,
    Registration,
    ReportAnswer,
    ReportCall,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.plan import Plan
from edl_torch.core.state import Released
from edl_torch.errors import MasterUnavailable
from edl_torch.shard import Source
from edl_torch.testing.fake_master import Outcomes
from edl_torch.trainer.counting import DeliveredBatches
from edl_torch.trainer.foreign_loop import OWN_STREAM, Reading
from edl_torch.trainer.liveness import Liveness
from edl_torch.trainer.state import TrainerConfig
from edl_torch.trainer.trainer import Trainer
from edl_torch.trainer.vocabulary import (
    Action,
    Attend,
    Call,
    Describe,
    Fact,
    LookAround,
    Procedure,
    Register,
    SiblingSession,
    Ticket,
    Wait,
    Warn,
)

T = TypeVar("T")

DATASET = "training"
MOST_ACTIONS = 1000  # of one procedure: more of them never end


class Master:
    """A dispatcher with one dataset of `records` records, and what it was asked.

    `errors` are raised in the place of the next answers; None stands for an answer.
    """

    def __init__(
        self,
        *,
        records: int = 64,
        shard: int = 8,
        num_epochs: int = 1,
        lease_timeout_s: float = 30.0,
        grace_s: float = 1.0,
        progress_timeout_s: float = 0.0,
    ) -> None:
        self.now = 100.0
        self.lease_timeout_s = lease_timeout_s
        self.progress_timeout_s = progress_timeout_s
        self.dispatcher = Dispatcher(
            ledger_id="L",
            lease_timeout_s=lease_timeout_s,
            grace_s=grace_s,
            progress_timeout_s=progress_timeout_s,
        )
        self.dispatcher.define(
            Registration(
                name=DATASET,
                sources=(Source(name="a", count=records),),
                records_per_shard=shard,
                num_epochs=num_epochs,
                max_bad_records=records,
            )
        )
        ledger = self.dispatcher.find_ledger(DATASET)
        assert ledger is not None
        self.outcomes = Outcomes(Plan(ledger.spec))
        self.calls: list[tuple[str, Any]] = []
        self.answers: list[Any] = []
        self.errors: list[BaseException | None] = []
        self.is_away = False

    def of(self, method: str) -> list[Any]:
        """Return the calls of one method, in order."""
        return [request for called, request in self.calls if called == method]

    def answer(self, call: Call) -> Any:
        """Return what the dispatcher answers; raises what is planned instead of it."""
        if self.is_away:
            raise MasterUnavailable("the master is away")
        if (error := self.errors.pop(0) if self.errors else None) is not None:
            raise error
        self.calls.append((call.request.name(), call.request))
        return self.ask(call)

    def ask(self, call: Call) -> Any:
        """Return what the dispatcher answers to a call that nobody takes note of."""
        request: Any = call.request
        if isinstance(request, ConfirmCall):
            self.dispatcher.members.stream_opened(request.session, self.now)
        answer: Any = self.dispatcher.call(request, self.now)
        if isinstance(request, LeaseCall):
            self.outcomes.granted(answer)
        if isinstance(request, ReportCall):
            self.outcomes.reported(request, answer)
        self.answers.append(answer)
        return answer

    def register(self, session: str, batch_size: int) -> RegisterAnswer:
        """Register a session by the dataset's name."""
        registration = Registration(name=DATASET)
        call = RegisterCall(
            session=session, worker_id=session, batch_size=batch_size, registration=registration
        )
        answer = self.answer(Call(call))
        assert isinstance(answer, RegisterAnswer)
        return answer

    @property
    def status(self) -> Any:
        """The dataset's status, as it is seen from outside."""
        return self.dispatcher.dataset_status(DATASET)

    def give_up_all(self) -> None:
        """Nothing was heard of any session for too long: all are given up."""
        self.now += self.lease_timeout_s
        self.dispatcher.expire(self.now)

    def stall(self) -> tuple[Released, ...]:
        """Take all leases for want of progress; the sessions stay."""
        self.now += self.progress_timeout_s
        for member in self.dispatcher.members:
            member.seen = self.now
        return self.dispatcher.expire(self.now)


class ScriptedMaster(Master):
    """Answers every report with nothing but its number, whatever leases it is of."""

    def ask(self, call: Call) -> Any:
        if not isinstance(call.request, ReportCall):
            return super().ask(call)
        answer = ReportAnswer(request=call.request.request)
        self.answers.append(answer)
        return answer


class Running(Generic[T]):
    """A procedure under way. `action` is what it wants done now; None at its end."""

    def __init__(self, shell: Shell, procedure: Procedure[T]) -> None:
        self.action: Action | None = None
        self._shell = shell
        self._procedure = procedure
        self._result: T
        self._resume(lambda: next(procedure))

    def _resume(self, resume: Callable[[], Action]) -> None:
        self._shell.tell_time()
        try:
            self.action = resume()
        except StopIteration as end:
            self.action, self._result = None, end.value
        except BaseException:
            self.action = None
            raise

    @property
    def is_done(self) -> bool:
        """Whether it has come to its end."""
        return self.action is None

    @property
    def must_wait(self) -> bool:
        """Whether it waits for what has not happened yet."""
        return isinstance(self.action, Wait) and not self.action.ready()

    @property
    def request(self) -> Any:
        """The argument of the call that it wants made."""
        assert isinstance(self.action, Call)
        return self.action.request

    def answer(self, value: Any = None) -> None:
        """Hand it the answer to its action."""
        self._resume(lambda: self._procedure.send(value))

    def fail(self, error: Exception) -> None:
        """Let its action end with an error."""
        self._resume(lambda: self._procedure.throw(error))

    def interrupt(self) -> None:
        """Give it up, as by Ctrl-C."""
        self.action = None
        self._procedure.close()

    def step(self) -> None:
        """Do its action."""
        assert self.action is not None
        try:
            value = self._shell.act(self.action)
        except Exception as exc:  # noqa: BLE001  as in the shell: the procedure decides what becomes of it
            self.fail(exc)
        except BaseException:
            self.interrupt()
            raise
        else:
            self.answer(value)

    def to(self, what: str | type[Any]) -> Running[T]:
        """Do its actions until the next is a call of this method, or an action of this kind."""
        for _ in range(MOST_ACTIONS):
            assert self.action is not None, f"it ended before {what}"
            if isinstance(what, str):
                if isinstance(self.action, Call) and self.action.request.name() == what:
                    return self
            elif isinstance(self.action, what):
                return self
            self.step()
        raise AssertionError(f"{MOST_ACTIONS} actions, and none was {what}")

    def finish(self) -> T:
        """Do all its actions. Returns, or raises, what it does."""
        for _ in range(MOST_ACTIONS):
            if self.action is None:
                return self._result
            self.step()
        raise AssertionError(f"{MOST_ACTIONS} actions, and no end")


class Shell:
    """One trainer, whose actions are done on a `Master`. `facts` are all that it has told, `warnings` too.

    One that is not `in_process` has work to do beside its loop: `work` does it, and so does a wait for it.
    """

    def __init__(
        self,
        master: Master,
        session: str = "s",
        *,
        batch_size: int = 4,
        lookahead: int | None = 0,
        in_process: bool = True,
        report_delay_s: float = 0.0,
        keeps_ledger: bool = True,
        audited: bool = True,
        attended: bool = True,
    ) -> None:
        self.master = master
        self.session = session
        self.batch_size = batch_size
        config = TrainerConfig(
            session=session,
            dataset=DATASET,
            batch_size=batch_size,
            lookahead=lookahead,
            in_process=in_process,
            report_delay_s=report_delay_s,
            keeps_ledger=keeps_ledger,
            audited=audited,
        )
        self.trainer = Trainer(config, Liveness())
        self.state = self.trainer.state
        self.elastic = self.trainer.elastic
        self.warnings: list[str] = []
        self.beginning = "the beginning"
        self.siblings: tuple[SiblingSession, ...] = ()
        self._attended = attended
        self._worker: Running[None] | None = None

    @property
    def facts(self) -> list[Fact]:
        """All that the trainer has told."""
        return self.state.facts

    def told(self, kind: type[T]) -> list[T]:
        """Return the facts of one kind."""
        return [fact for fact in self.facts if isinstance(fact, kind)]

    @property
    def liveness(self) -> Liveness:
        """The liveness of a trainer that is attended."""
        assert self.state.liveness is not None
        return self.state.liveness

    # Running ----------------------------------------------------------------------------------------------

    def tell_time(self) -> None:
        """Tell the trainer the master's time: they share a clock."""
        self.state.now = self.master.now

    def start(self, procedure: Procedure[T]) -> Running[T]:
        """Begin a procedure: its first action is not done yet."""
        return Running(self, procedure)

    def run(self, procedure: Procedure[T]) -> T:
        """Run a procedure to its end."""
        return self.start(procedure).finish()

    def at_once(self, procedure: Procedure[T]) -> T | None:
        """Return what a procedure returns that needs nothing done; None for another, which is given up."""
        running = self.start(procedure)
        if running.is_done:
            return running.finish()
        running.interrupt()
        return None

    def act(self, action: Action) -> Any:
        """Do one action. Raises what the master raises, or AssertionError where a wait would never end."""
        if isinstance(action, Call):
            return self._call(action)
        if isinstance(action, Register):
            return self.master.register(self.session, self.batch_size)
        if isinstance(action, Attend):
            return self._attend()
        if isinstance(action, Describe):
            return self.beginning
        if isinstance(action, LookAround):
            return self.siblings
        if isinstance(action, Warn):
            self.warnings.append(action.text)
            return None
        return self._wait(action)

    def _call(self, call: Call) -> Any:
        if call.wait_s and not self.state.config.in_process:
            self.work()  # the call waits at the master meanwhile
        return self.ask(call)

    def ask(self, call: Call) -> Any:
        """Return the master's answer; liveness hears that there was one."""
        asked_at = self.master.now
        answer = self.master.answer(call)
        if self.state.liveness is not None:
            if call.request.name() == "confirm":
                self._stand(asked_at)
            self.state.liveness.answered(asked_at)  # there is no heartbeat: any call is one
        return answer

    def _attend(self) -> bool:
        if self._attended:
            self._stand(self.master.now)
        return self._attended

    def _stand(self, asked_at: float) -> None:
        master = self.master
        self.liveness.stood(
            asked_at, lease_timeout_s=master.lease_timeout_s, progress_timeout_s=master.progress_timeout_s
        )

    def _wait(self, wait: Wait) -> Any:
        if not wait.ready() and not self.state.config.in_process:
            self.work()
        if not wait.ready():
            assert wait.timeout_s is not None, "it waits for what nobody does"
            self.master.now += wait.timeout_s
        return wait.ready()

    def work(self) -> None:
        """Do what there is to do beside the loop."""
        if self._worker is None or self._worker.is_done:
            self._worker = self.start(self.trainer.work())
        for _ in range(MOST_ACTIONS):
            if self._worker.is_done or self._worker.must_wait:
                return
            self._worker.step()
        raise AssertionError(f"{MOST_ACTIONS} actions beside the loop, and no end")

    def break_stream(self) -> None:
        """The session's stream breaks, as when its process is cut off."""
        self.master.dispatcher.members.stream_broke(self.session, self.master.now)
        self.liveness.broke()

    # What loaders and loops do ------------------------------------------------------------------------------

    def begin_elastic(self) -> int:
        """Open an elastic pass, and hear that there is something to read. Returns its number."""
        number = self.run(self.trainer.open())
        assert self.run(self.elastic.more_to_read())
        return number

    def next(self, stream: str = OWN_STREAM, number: int | None = None) -> Grant | None:
        """Return the next lease of a stream, of the pass that is open where no `number` is given."""
        number = self.state.supply.current.number if number is None else number
        return self.run(self.trainer.leasing.next(stream, number))

    def draw(self, stream: str = OWN_STREAM, number: int | None = None) -> Grant:
        """Return the next lease of a stream: there is one."""
        grant = self.next(stream, number)
        assert grant is not None
        return grant

    def hand(self, grant: Grant) -> bool:
        """Hand a whole lease to the loop as a batch."""
        return self.run(self.elastic.hand(whole(grant)))

    def request(self) -> None:
        """The loop asks for the next batch."""
        self.run(self.elastic.request(self.state.supply.current.number))

    def read(self) -> int:
        """Train on what one inner pass reads, each lease a batch. Returns how many records."""
        trained = 0
        while (grant := self.next()) is not None:
            if self.hand(grant):
                self.request()
                trained += grant.slice.limit
        return trained

    def train_through(self) -> int:
        """Make one elastic pass, as a loader does. Returns how many records it trained on."""
        number = self.run(self.trainer.open())
        trained = 0
        try:
            while self.run(self.elastic.more_to_read()):
                trained += self.read()
        finally:
            self.run(self.elastic.close(number))
        return trained

    def begin_plain(self, stream: str = OWN_STREAM, run: str = "", begun: int = 0, **more: Any) -> int:
        """A process begins to read a plain pass. Returns the pass's number."""
        return self.run(self.trainer.begin_plain(Reading(stream=stream, run=run, begun=begun, **more)))[0]

    def fetch(self) -> Grant | None:
        """Fetch the next lease of a plain pass, which is begun where none is open, as `fetch_shard` does."""
        current = self.state.supply.current
        if not current.is_open:
            self.begin_plain()
        return self.next()

    def report(self, batch_size: int | None = None) -> int:
        """Report a batch. Returns how many leases that completed."""
        return self.run(self.trainer.report(batch_size))


class Delivered(DeliveredBatches):
    """A loader that has brought `count` batches."""

    def __init__(self, batch_size: int, count: int = 0, *, drop_last: bool = False) -> None:
        super().__init__(batch_size, drop_last=drop_last)
        self.count = count

    @property
    def batches(self) -> int:
        return self.count


def whole(grant: Grant) -> Ticket:
    """Return the ticket of a batch that holds a whole lease."""
    return ((grant.task, grant.slice.skip, grant.slice.stop),)


def ack(task: int, upto: int, start: int = 0) -> Acknowledgement:
    """Return the acknowledgement of a task's first attempt from `start` up to `upto`."""
    return Acknowledgement(task=task, attempt=1, upto=upto, start=start)


def back(task: int, start: int, upto: int | None = None, *, remainder: bool = False) -> GiveBack:
    """Return the give-back of a task's first attempt from `start` up to `upto`, or to the end."""
    return GiveBack(task=task, attempt=1, start=start, upto=upto, remainder=remainder)


def reports_of(master: Master) -> list[ReportCall]:
    """Return the reports that reached the master."""
    return master.of("report")
