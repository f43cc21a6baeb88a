"""A master as a rank sees it that holds no leases: another rank, with a part of the same model, does.

The trainer of such a rank keeps count like any other, so that its loop is told the same. Nothing of that
reaches the master: it neither registers there nor reports.
"""

from __future__ import annotations

from collections.abc import Callable

from edl_torch.client.master_api import Listener, MasterApi
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
from edl_torch.core.registration import new_spec
from edl_torch.errors import InvalidArgument, UnknownDataset
from edl_torch.shard import DatasetSpec


class FollowedMaster:
    """`MasterApi` of which only looking from outside reaches `master`.

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
