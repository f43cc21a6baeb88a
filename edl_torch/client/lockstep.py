"""What one rank of a synchronous job knows of where all stand, and the master as one sees it without leases.

Ranks that step together hold copies of one model, so what one of them trains on is in all. Nothing here
decides about batches, nor knows torch.
"""

from __future__ import annotations

from collections.abc import Callable

from edl_torch.client.master_api import Listener, MasterApi
from edl_torch.client.peers import Doing, Peers, together
from edl_torch.core.calls import (
    ConfirmAnswer,
    ConfirmCall,
    DatasetStatus,
    Fence,
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
from edl_torch.core.registration import new_spec, reconcile
from edl_torch.errors import InvalidArgument, UnknownDataset
from edl_torch.shard import DatasetSpec


class Lockstep:
    """The state that a session shares with its `peers`."""

    def __init__(self, peers: Peers, dataset: str) -> None:
        self.peers = peers
        self._dataset = dataset
        self._finished: bool | None = None

    def __repr__(self) -> str:
        return f"<Lockstep rank={self.peers.rank}/{self.peers.size} finished={self._finished}>"

    @property
    def holds_leases(self) -> bool:
        """Whether this rank takes part at the master: of ranks that hold one model in parts, one does."""
        return self.peers.parts is None or self.peers.parts.holds

    @property
    def begun(self) -> bool:
        """Whether the ranks have loaded a checkpoint or the beginning together, or found themselves there."""
        return self._finished is not None

    @property
    def finished(self) -> bool:
        """Whether every record of every epoch has its outcome, as the ranks last agreed.

        The same on every rank, and no call: who leaves the loop over epochs must not leave it alone. Raises
        InvalidArgument before the ranks have begun.
        """
        if self._finished is None:
            raise InvalidArgument(
                f"synchronous ranks begin where their model does, and dataset {self._dataset!r} may be "
                "anywhere: call load_state_dict() on every rank, after the loader is made and before the "
                "first pass, with what was saved with the model, or with None for the beginning of the data"
            )
        return self._finished

    def agreed(self, *, finished: bool) -> None:
        """Note what the ranks have agreed on."""
        self._finished = finished

    def same_on_all(self, doing: Doing, text: str, what: str) -> None:
        """Raise InvalidArgument, on every rank that differs, unless `text` is the same on every rank."""
        first = together(self.peers, doing, lambda: None, lambda: text)

        def compare() -> None:
            if text != first:
                raise InvalidArgument(f"{what} of rank {self.peers.rank} differs from that of rank 0")

        together(self.peers, doing, compare, str)


# A rank without leases: another one, with a part of the same model, holds them ------------------------


class FollowedMaster:
    """`MasterApi` of which only looking from outside reaches `master`: nobody registers there, or reports.

    The trainer of such a rank keeps count like any other, so that its loop is told the same.

    `spec` is the dataset as the ranks with leases have registered it; None before they have told.
    """

    in_process = True
    report_delay_s = 0.0
    keeps_ledger = True

    def __init__(self, master: MasterApi) -> None:
        self.spec: DatasetSpec | None = None
        self._master = master

    def __repr__(self) -> str:
        return f"<FollowedMaster of {self._master!r}>"

    @property
    def worker_id(self) -> str:
        return self._master.worker_id

    def register(self, call: RegisterCall) -> RegisterAnswer:
        """The dataset, as it is registered, or as this rank itself would describe it."""
        spec = self.spec
        if spec is None:
            if call.registration.sources is None:
                raise UnknownDataset(
                    f"this rank holds no leases of dataset {call.registration.name!r}, and knows it when "
                    f"those that do have begun: call load_state_dict() on every rank first"
                )
            spec = new_spec(call.registration, call.batch_size)
        else:
            spec = reconcile(spec, call.registration, alone=True)
        return RegisterAnswer(spec=spec, fence=Fence(), epoch=0)

    def attend(self, session: str, member: int, listener: Listener) -> Callable[[], float] | None:
        return None

    def report(self, call: ReportCall) -> ReportAnswer:
        return ReportAnswer(request=call.request)

    def confirm(self, call: ConfirmCall) -> ConfirmAnswer:
        return ConfirmAnswer()

    def progress(self, call: FencedCall) -> DatasetStatus:
        return self._master.dataset_status(call.dataset)

    def dataset_status(self, dataset: str) -> DatasetStatus:
        return self._master.dataset_status(dataset)

    def status(self) -> MasterStatus:
        return self._master.status()

    def leave(self, session: str, member: int) -> None:
        return

    def close(self) -> None:
        self._master.close()

    def lease(self, call: LeaseCall, wait_s: float = 0.0) -> LeaseAnswer:
        raise _no_leases(call.dataset)

    def snapshot(self, call: FencedCall) -> str:
        raise _no_leases(call.dataset)

    def restore(self, call: RestoreCall) -> int:
        raise _no_leases(call.dataset)


def _no_leases(dataset: str) -> InvalidArgument:
    return InvalidArgument(
        f"this rank holds no leases of dataset {dataset!r}: it gets the batches of the rank that does, "
        f"through the ElasticDataLoader that was made with mesh=…"
    )
