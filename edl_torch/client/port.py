"""The port through which a trainer speaks to a master, whatever lies behind it.

An embedded master, a server over grpc and the fake of `edl_torch.testing` all answer these calls. Every
method may be called from several threads, and every call may be repeated safely.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from edl_torch.client.presence import Presence
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


class MasterPort(Protocol):
    """What `DataShardService(master_client=…)` takes.

    Methods raise EdlError subclasses as the dispatcher raised them, and MasterUnavailable when the master
    did not answer within the client's `master_timeout_s`.
    """

    @property
    def worker_id(self) -> str:
        """The label under which this trainer appears in status and logs."""
        ...

    @property
    def in_process(self) -> bool:
        """Whether calls are plain function calls: then fetching ahead gains nothing."""
        ...

    @property
    def keeps_ledger(self) -> bool:
        """Whether the master knows epochs and names each lease for ever: without, no tokens and no audit."""
        ...

    def register(self, call: RegisterCall) -> RegisterAnswer:
        """Join a dataset."""
        ...

    def attend(self, session: str, member: int, on_wanted: Callable[[str], None]) -> Presence | None:
        """Keep the session alive, as that member, until `leave`. `on_wanted(dataset)` is called, from any
        thread, when another trainer waits for records of the dataset. Returns None where presence is never in
        doubt."""
        ...

    def lease(self, call: LeaseCall, wait_s: float = 0.0) -> LeaseAnswer:
        """Ask for leases; with `wait_s` wait so long for the first grant, or for the end of the epoch."""
        ...

    def report(self, call: ReportCall) -> ReportAnswer:
        """Tell outcomes and give back."""
        ...

    def confirm(self, call: ConfirmCall) -> ConfirmAnswer:
        """Present leases, with the session's stream standing; waits for it."""
        ...

    def snapshot(self, call: FencedCall) -> str:
        """The dataset's token."""
        ...

    def restore(self, call: RestoreCall) -> int:
        """Take the dataset back to a token; returns the new lineage."""
        ...

    def progress(self, call: FencedCall) -> DatasetStatus:
        """The dataset's progress, as its trainers see it."""
        ...

    def dataset_status(self, dataset: str) -> DatasetStatus:
        """The dataset's progress, from outside: it takes no part, and may know nothing of its history."""
        ...

    def status(self) -> MasterStatus:
        """The master's whole state."""
        ...

    def leave(self, session: str, member: int) -> None:
        """Say goodbye as that member: what the session holds goes to others at once."""
        ...

    def close(self) -> None:
        """Free threads and sockets."""
        ...
