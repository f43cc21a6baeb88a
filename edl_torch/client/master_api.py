"""The calls of a trainer to a master, whatever lies behind it.

An embedded master, a server over grpc and the fake of `edl_torch.testing` all answer these calls. Every
method may be called from several threads, and every call may be repeated safely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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
    ReportAnswer,
    ReportCall,
    RestoreCall,
)
from edl_torch.core.measures import Measures


class Listener(Protocol):
    """What a session wants to hear of its own liveness. Methods may be called from any thread.

    Times are seconds of the clock that `attend` returns.
    """

    @property
    def member(self) -> int:
        """As which member heartbeats are to be sent."""

    @property
    def progress(self) -> int:
        """How often the training loop has moved on; heartbeats carry it."""

    @property
    def measures(self) -> Measures:
        """What the trainer has measured; heartbeats carry it."""

    @property
    def standing(self) -> bool:
        """Whether the stream stands."""

    def wait_standing(self, timeout_s: float) -> bool:
        """Wait for the stream."""

    def stood(self, asked_at: float, *, lease_timeout_s: float, progress_timeout_s: float = 0.0) -> None:
        """The stream, asked for at `asked_at`, stands."""

    def broke(self) -> None:
        """The stream does not stand any more."""

    def answered(self, asked_at: float) -> None:
        """The master answered a heartbeat, or the like, that was sent at `asked_at`."""

    def doubt(self) -> None:
        """The master does not know the session."""

    def wanted(self, dataset: str) -> None:
        """Another trainer waits for records of this dataset."""

    def tell(self) -> None:
        """Report now what the master's `report_delay_s` has kept back."""


class MasterApi(Protocol):
    """What `DataShardService(master_client=…)` takes.

    Methods raise EdlError subclasses as the dispatcher raised them, and MasterUnavailable when the master
    did not answer within the client's `master_timeout_s`.
    """

    @property
    def worker_id(self) -> str:
        """The label under which this trainer appears in status and logs."""

    @property
    def in_process(self) -> bool:
        """Whether calls are plain function calls: then fetching ahead gains nothing."""

    @property
    def report_delay_s(self) -> float:
        """How long after a report the next acknowledgements may wait for more of them; 0: not at all.

        A master that allows it calls `Listener.tell` before it answers anything that they could change.
        """

    @property
    def keeps_ledger(self) -> bool:
        """Whether the master knows epochs and names each lease for ever: without, no tokens and no audit."""

    def register(self, call: RegisterCall) -> RegisterAnswer:
        """Join a dataset."""

    def attend(self, session: str, member: int, listener: Listener) -> Callable[[], float] | None:
        """Keep the session alive until `leave`, and tell how that goes. Returns the clock by which it is
        told; None where liveness is never in doubt."""

    def lease(self, call: LeaseCall, wait_s: float = 0.0) -> LeaseAnswer:
        """Ask for leases; with `wait_s` wait so long for the first grant, or for the end of the epoch."""

    def report(self, call: ReportCall) -> ReportAnswer:
        """Tell outcomes and give back."""

    def confirm(self, call: ConfirmCall) -> ConfirmAnswer:
        """Present leases, with the session's stream standing; waits for it."""

    def snapshot(self, call: FencedCall) -> str:
        """The dataset's token."""

    def restore(self, call: RestoreCall) -> int:
        """Take the dataset back to a token; returns the new lineage."""

    def progress(self, call: FencedCall) -> DatasetStatus:
        """The dataset's progress, as its trainers see it."""

    def dataset_status(self, dataset: str) -> DatasetStatus:
        """The dataset's progress, from outside: it takes no part, and may know nothing of its history."""

    def status(self) -> MasterStatus:
        """The master's whole state."""

    def leave(self, session: str, member: int) -> None:
        """Say goodbye as that member: what the session holds goes to others at once."""

    def close(self) -> None:
        """Free threads and sockets."""
