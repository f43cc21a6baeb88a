"""What one rank of a synchronous job knows of where all stand, and the master as one sees it without leases.

Ranks that step together hold copies of one model, so what one of them trains on is in all. Nothing here
decides about batches, nor knows torch.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from edl_torch.client.peers import Doing, Peers, together
from edl_torch.core.calls import (
    ConfirmAnswer,
    ConfirmCall,
    Fence,
    FencedCall,
    ProgressCall,
    RegisterAnswer,
    RegisterCall,
    ReportAnswer,
    ReportCall,
    Request,
)
from edl_torch.core.master_api import Listener, MasterApi
from edl_torch.core.registration import new_spec, reconcile
from edl_torch.errors import InvalidArgument, UnknownDataset
from edl_torch.shard import DatasetSpec

A = TypeVar("A")


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


class FollowedMaster(MasterApi):
    """`MasterApi` of which only looking from outside reaches `master`: nobody registers there, or reports.

    The trainer of such a rank keeps count like any other, so that its loop is told the same.

    `spec` is the dataset as the ranks with leases have registered it; None before they have told.
    """

    in_process = True

    def __init__(self, master: MasterApi) -> None:
        self.spec: DatasetSpec | None = None
        self.worker_id = master.worker_id
        self._master = master

    def __repr__(self) -> str:
        return f"<FollowedMaster of {self._master!r}>"

    def call(self, request: Request[A], wait_s: float = 0.0) -> A:
        """Answer what a trainer without leases may ask. Raises InvalidArgument for the rest."""
        answer: Any
        match request:
            case RegisterCall():
                answer = self._register(request)
            case ReportCall():
                answer = ReportAnswer(request=request.request)
            case ConfirmCall():
                answer = ConfirmAnswer()
            case ProgressCall():
                answer = self._master.dataset_status(request.dataset)
            case FencedCall():
                raise InvalidArgument(
                    f"this rank holds no leases of dataset {request.dataset!r}: it gets the batches of the "
                    f"rank that does, through the ElasticDataLoader that was made with mesh=…"
                )
            case _:
                answer = self._master.call(request)
        return cast("A", answer)

    def _register(self, call: RegisterCall) -> RegisterAnswer:
        """Return the dataset as it is registered, or as this rank itself would describe it."""
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

    def attend(self, session: str, member: int, listener: Listener) -> None:
        """Keep nothing alive: there is no session at the master."""

    def leave(self, session: str, member: int) -> None:
        """Take no leave of a master that does not know the session."""

    def close(self) -> None:
        """Close the master."""
        self._master.close()
