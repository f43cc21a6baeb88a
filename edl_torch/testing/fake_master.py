"""A master for tests: the real dispatcher in memory, on a fake clock, behind a transport with planned faults.

Nothing of the master's logic is imitated. No network, no server; a thread only where a test asks for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from edl_torch.client.master_api import Listener
from edl_torch.core.calls import (
    ConfirmAnswer,
    ConfirmCall,
    DatasetStatus,
    FencedCall,
    LeaseAnswer,
    LeaseCall,
    MasterStatus,
    RegisterAnswer,
    RegisterCall,
    Registration,
    ReportAnswer,
    ReportCall,
    RestoreCall,
)
from edl_torch.core.dispatcher import Dispatcher, Released
from edl_torch.core.plan import Plan
from edl_torch.errors import MasterUnavailable
from edl_torch.master.embedded import LocalMaster
from edl_torch.testing.clock import FakeClock
from edl_torch.testing.faults import Fault, Faults
from edl_torch.testing.outcomes import Outcomes

T = TypeVar("T")


class FakeConnection:
    """A `MasterApi` of one trainer to a `FakeMaster`, with a transport that repeats lost calls."""

    keeps_ledger = True

    def __init__(self, fake: FakeMaster, local: LocalMaster, worker_id: str, *, in_process: bool) -> None:
        self.worker_id = worker_id
        self.in_process = in_process
        self._fake = fake
        self._local = local

    def _send(self, call: str, action: Callable[[], T], session: str = "") -> T:
        asked_at = self._fake.clock()
        answer = self._answered(call, action)
        if session in self._fake.listeners:
            self._fake.listeners[session].answered(asked_at)  # there is no heartbeat: any call is one
        return answer

    def _answered(self, call: str, action: Callable[[], T]) -> T:
        while True:
            if self._fake.faults.away:
                raise MasterUnavailable("the fake master is away: call faults.master_away(False)")
            match self._fake.faults.next(call):
                case Fault.LOSE_CALL:
                    continue
                case Fault.LOSE_ANSWER | Fault.REPEAT:
                    action()
                case None:
                    return action()

    def register(self, call: RegisterCall) -> RegisterAnswer:
        """Join a dataset."""
        answer = self._send("register", lambda: self._local.register(call))
        self._fake.outcomes.setdefault(answer.spec.name, Outcomes(Plan(answer.spec)))
        return answer

    def attend(self, session: str, member: int, listener: Listener) -> Callable[[], float]:
        """Keep the session's stream; it breaks when a test says so, and is opened again by `confirm`."""
        self._local.attend(session, member, listener)
        self._fake.listeners[session] = listener
        self._fake.open_stream(session)
        return self._fake.clock

    def lease(self, call: LeaseCall, wait_s: float = 0.0) -> LeaseAnswer:
        """Ask for leases."""
        answer = self._send("lease", lambda: self._local.lease(call, wait_s), call.session)
        self._fake.outcomes[call.dataset].granted(answer)
        return answer

    def report(self, call: ReportCall) -> ReportAnswer:
        """Tell outcomes and give back."""
        answer = self._send("report", lambda: self._local.report(call), call.session)
        self._fake.outcomes[call.dataset].reported(call, answer)
        return answer

    def confirm(self, call: ConfirmCall) -> ConfirmAnswer:
        """Present leases, on a stream that stands again."""

        def on_new_stream() -> ConfirmAnswer:
            self._fake.open_stream(call.session)
            return self._local.confirm(call)

        return self._send("confirm", on_new_stream)

    def snapshot(self, call: FencedCall) -> str:
        """The dataset's token."""
        return self._send("snapshot", lambda: self._local.snapshot(call), call.session)

    def restore(self, call: RestoreCall) -> int:
        """Take the dataset back to a token."""
        return self._send("restore", lambda: self._local.restore(call), call.session)

    def progress(self, call: FencedCall) -> DatasetStatus:
        """The dataset's progress, as its trainers see it."""
        return self._send("progress", lambda: self._local.progress(call), call.session)

    def dataset_status(self, dataset: str) -> DatasetStatus:
        """The dataset's progress, from outside."""
        return self._send("dataset_status", lambda: self._local.dataset_status(dataset))

    def status(self) -> MasterStatus:
        """The master's whole state."""
        return self._send("status", self._local.status)

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
        self, *, lease_timeout_s: float = 30.0, grace_s: float = 1.0, progress_timeout_s: float = 0.0
    ) -> None:
        self.clock = FakeClock()
        self.faults = Faults()
        self.outcomes: dict[str, Outcomes] = {}
        self.listeners: dict[str, Listener] = {}
        self._dispatcher = Dispatcher(
            ledger_id="fake",
            lease_timeout_s=lease_timeout_s,
            grace_s=grace_s,
            progress_timeout_s=progress_timeout_s,
        )
        local = LocalMaster("fake", dispatcher=self._dispatcher, clock=self.clock)
        super().__init__(self, local, "fake", in_process=True)

    def connect(self, worker_id: str = "trainer", *, in_process: bool = True) -> FakeConnection:
        """Another trainer's client. With `in_process=False` it behaves like one over a network: leases are
        fetched ahead and reports are sent by threads of the trainer."""
        return FakeConnection(self, self._local, worker_id, in_process=in_process)

    def define(self, registration: Registration) -> None:
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
        self._local.apply(Dispatcher.stream_broke, session)
        if session in self.listeners:
            self.listeners[session].broke()

    def open_stream(self, session: str) -> None:
        """The session's stream stands (again)."""
        self._local.apply(Dispatcher.stream_opened, session)
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
