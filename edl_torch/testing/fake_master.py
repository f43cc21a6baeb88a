"""A master for tests: the real dispatcher in memory, on a fake clock, behind a transport with planned faults.

Nothing of the master's logic is imitated, and nothing is random. No network, no server; a thread only where a
test asks for one.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar, Unpack, cast

from edl_torch.client.liveness import LivenessFeed
from edl_torch.core import calls
from edl_torch.core.calls import Listener, MasterApi
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.core.members import Patience
from edl_torch.core.plan import Plan
from edl_torch.core.state import Released
from edl_torch.errors import MasterUnavailable
from edl_torch.master.embedded import LocalMaster
from edl_torch.shard import Slice
from edl_torch.trainer.liveness import Liveness
from edl_torch.trainer.measuring import Measuring

T = TypeVar("T")


class FakeClock:
    """Call it for the time in seconds; `advance` moves it. Safe for several threads."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._lock = threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> float:
        """Let time pass; returns the new time. A clock never goes back: raises ValueError."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        with self._lock:
            self._now += seconds
            return self._now

    def __repr__(self) -> str:
        return f"<FakeClock {self()}>"


def wait_until(
    condition: Callable[[], T], *, timeout_s: float = 30.0, poll_s: float = 0.01, what: str = ""
) -> T:
    """Call `condition` until it returns something true, and return that.

    Looks every `poll_s` seconds. After `timeout_s` seconds raises AssertionError, which names `what`
    (default: the condition) and the last value seen. An exception of the condition is not caught.

        address = wait_until(lambda: path.exists() and path.read_text(), timeout_s=5)
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(
                f"not within {timeout_s:g} s: {what or condition}; the last value: {value!r}"
            )
        time.sleep(poll_s)


# The master -------------------------------------------------------------------------------------------

Record = tuple[int, str, int]  # (epoch, source name, record number)
A = TypeVar("A")


class Fault(Enum):
    """What happens to one call."""

    LOSE_CALL = "the call never reaches the master; the transport repeats it"
    LOSE_ANSWER = "the master acts, its answer is lost; the transport repeats the call"
    REPEAT = "the call reaches the master twice; the second answer arrives"


class Faults:
    """Planned faults by call name: `register`, `lease`, `report`, `snapshot`, `restore`, `progress`,
    `confirm`, `status`. Each happens once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: dict[str, deque[Fault | None]] = {}
        self._away = False

    def plan(self, call: str, *faults: Fault | None) -> None:
        """The next calls of this name suffer these faults, one each; None is a call without a fault."""
        with self._lock:
            self._planned.setdefault(call, deque()).extend(faults)

    def master_away(self, away: bool = True) -> None:
        """While away every call raises MasterUnavailable, as after `master_timeout_s`."""
        with self._lock:
            self._away = away

    @property
    def away(self) -> bool:
        """Whether the master is away."""
        with self._lock:
            return self._away

    def next(self, call: str) -> Fault | None:
        """The fault of the call that is made now."""
        with self._lock:
            planned = self._planned.get(call)
            return planned.popleft() if planned else None

    def __repr__(self) -> str:
        planned = {call: len(faults) for call, faults in self._planned.items() if faults}
        return f"<Faults {planned}{' away' if self._away else ''}>"


class Outcomes:
    """The outcomes of one dataset's records that a fake master was told, by (epoch, name, index).

    Kept apart from the ledger on purpose, from calls and answers alone, so that a test can hold one against
    the other. A report that Ctrl-C interrupts, and that is taken in again, counts once wherever that came.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._slices: dict[int, Slice] = {}
        self._acknowledged: dict[tuple[int, int], Record] = {}  # by lease and position
        self._quarantined: dict[tuple[int, int], Record] = {}

    @property
    def acknowledged(self) -> Counter[Record]:
        """How often each record was acknowledged."""
        return Counter(self._acknowledged.values())

    @property
    def quarantined(self) -> Counter[Record]:
        """How often each record went to quarantine."""
        return Counter(self._quarantined.values())

    def granted(self, answer: calls.LeaseAnswer) -> None:
        """Leases were handed out; an answer that is repeated counts once."""
        for grant in answer.grants:
            self._slices.setdefault(grant.task, grant.slice)

    def reported(self, call: calls.ReportCall, answer: calls.ReportAnswer) -> None:
        """Outcomes were told; what the master refused does not count."""
        for failure in call.failures:
            if failure.task not in answer.stale:
                record = self._record(failure.task, failure.position)
                self._quarantined[failure.task, failure.position] = record
        for done in call.acknowledgements:
            if done.task not in answer.stale:
                first = max(done.start, self._slices[done.task].skip)
                for place in ((done.task, position) for position in range(first, done.upto)):
                    if place not in self._quarantined:
                        self._acknowledged[place] = self._record(*place)

    def _record(self, task: int, position: int) -> Record:
        cut = self._slices[task]
        return (cut.epoch, *self._plan.locate(cut.epoch, cut.shard, position))

    def check_complete(self, num_epochs: int) -> None:
        """Raise AssertionError, naming records, unless each record of each epoch had exactly one outcome."""
        told = self.acknowledged + self.quarantined
        doubled = [record for record, count in told.items() if count > 1]
        expected = num_epochs * self._plan.size
        assert not doubled, f"{len(doubled)} record(s) had more than one outcome: {doubled[:10]}"
        assert len(told) == expected, f"{expected - len(told)} of {expected} record(s) had no outcome"

    def __repr__(self) -> str:
        return f"<Outcomes acknowledged={len(self._acknowledged)} quarantined={len(self._quarantined)}>"


class FakeConnection(MasterApi):
    """A `MasterApi` of one trainer to a `FakeMaster`, with a transport that repeats lost calls."""

    def __init__(self, fake: FakeMaster, local: LocalMaster, worker_id: str, *, in_process: bool) -> None:
        self.worker_id = worker_id
        self.in_process = in_process
        self._fake = fake
        self._local = local

    def call(self, request: calls.Request[A], wait_s: float = 0.0) -> A:
        """As `MasterApi.call`, with the faults that are planned for calls of this name."""
        asked_at = self._fake.clock()
        answer: Any = self._answered(request, wait_s)
        if isinstance(request, calls.FencedCall) and request.session in self._fake.listeners:
            self._fake.listeners[request.session].answered(asked_at)  # no heartbeat: any call is one
        if isinstance(request, calls.RegisterCall):
            self._fake.outcomes.setdefault(answer.spec.name, Outcomes(Plan(answer.spec)))
        elif isinstance(request, calls.LeaseCall):
            self._fake.outcomes[request.dataset].granted(answer)
        elif isinstance(request, calls.ReportCall):
            self._fake.outcomes[request.dataset].reported(request, answer)
        return cast("A", answer)

    def _answered(self, request: calls.Request[A], wait_s: float) -> A:
        while True:
            if self._fake.faults.away:
                raise MasterUnavailable("the fake master is away: call faults.master_away(False)")
            fault = self._fake.faults.next(request.name())
            if fault is Fault.LOSE_CALL:
                continue
            if isinstance(request, calls.ConfirmCall):  # on a stream that stands again
                self._fake.open_stream(request.session)
            if fault is not None:
                self._local.call(request, wait_s)
            else:
                return self._local.call(request, wait_s)

    def attend(self, session: str, member: int, listener: Listener) -> Callable[[], float]:
        """Keep the session's stream; it breaks when a test says so, and a `ConfirmCall` opens it again."""
        self._local.attend(session, member, listener)
        self._fake.listeners[session] = listener
        self._fake.open_stream(session)
        return self._fake.clock

    def leave(self, session: str, member: int) -> None:
        """Say goodbye; a master that is away finds out by itself."""
        if not self._fake.faults.away:
            self._local.leave(session, member)

    def close(self) -> None:
        """Nothing to free: the master stays for the other trainers of the test."""

    def __repr__(self) -> str:
        return f"<FakeConnection {self.worker_id!r}>"


class FakeMaster(FakeConnection):
    """One master in memory; `connect()` gives a `master_client` for each trainer of a test.

    It is itself a `master_client` too, for tests with one trainer: `DataShardService(8, FakeMaster(), …)`.
    `outcomes[name]` tells what was acknowledged, `clock.advance(…)` and `expire()` let sessions die, and
    `faults` plans what goes wrong on the way.
    """

    def __init__(
        self,
        *,
        ledger_id: str = "fake",
        **patience: Unpack[Patience],
    ) -> None:
        self.clock = FakeClock()
        self.faults = Faults()
        self.outcomes: dict[str, Outcomes] = {}
        self.listeners: dict[str, Listener] = {}
        self._dispatcher = Dispatcher(ledger_id=ledger_id, **patience)
        local = LocalMaster("fake", dispatcher=self._dispatcher, clock=self.clock)
        super().__init__(self, local, "fake", in_process=True)

    def connect(self, worker_id: str = "trainer", *, in_process: bool = True) -> FakeConnection:
        """Another trainer's client. With `in_process=False` it behaves like one over a network: leases are
        fetched ahead and reports are sent by threads of the trainer."""
        return FakeConnection(self, self._local, worker_id, in_process=in_process)

    def define(self, registration: calls.Registration) -> None:
        """Make a dataset as the master's command line would."""
        self._local.apply(lambda dispatcher, _: dispatcher.define(registration))

    def token(self, dataset: str) -> str:
        """The dataset's position, from outside: it is no trainer's checkpoint."""
        return self._local.apply(lambda dispatcher, _: dispatcher.token(dataset))

    def go_back(self, dataset: str, token: str | None) -> int:
        """Another trainer takes the dataset back to a token (None: to the beginning). Returns the lineage."""
        return self._local.apply(lambda dispatcher, _: dispatcher.go_back(dataset, token))

    def break_stream(self, session: str) -> None:
        """The session's stream breaks, as when its process dies or is cut off."""
        self._local.apply(lambda dispatcher, now: dispatcher.members.stream_broke(session, now))
        if session in self.listeners:
            self.listeners[session].broke()

    def open_stream(self, session: str) -> None:
        """The session's stream stands (again)."""
        self._local.apply(lambda dispatcher, now: dispatcher.members.stream_opened(session, now))
        members = self._dispatcher.members
        self.listeners[session].stood(
            self.clock(),
            lease_timeout_s=members.lease_timeout_s,
            progress_timeout_s=members.progress_timeout_s,
        )

    def expire(self) -> tuple[Released, ...]:
        """Take back what dead sessions hold, as a server's timer would. Returns what was released."""
        return self._local.apply(Dispatcher.expire)

    def __repr__(self) -> str:
        return f"<FakeMaster {self._dispatcher!r} {self.faults!r}>"


class Listening(LivenessFeed):
    """What `MasterApi.attend` takes, for a session that a test plays by hand. Heartbeats name `member`;
    `wanted` hears that others wait."""

    def __init__(self, member: int, wanted: Callable[[str], None] = lambda _: None) -> None:
        self.liveness = Liveness()
        self.liveness.member = member
        self.measuring = Measuring()
        super().__init__(self.liveness, self.measuring, threading.Condition(), wanted)
