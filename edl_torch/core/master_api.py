"""What every master is for a trainer, whatever lies behind it.

An embedded master, a server over grpc, another project's master and the fake of `edl_torch.testing` answer
the same calls. Every method may be called from several threads, and every call may be repeated safely.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from edl_torch.core.calls import Fence, Request, SetWeightsCall, StatusCall
from edl_torch.core.status import DatasetStatus, MasterStatus, Measures
from edl_torch.shard import MixtureSegment

A = TypeVar("A")


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


class MasterApi(ABC):
    """What `DataShardService(master_client=…)` takes.

    Attributes:
        worker_id: The label under which this trainer appears in status and logs.
        in_process: Whether calls are plain function calls: then fetching ahead gains nothing.
        report_delay_s: How long after a report the next acknowledgements may wait for more of them; 0: not at
            all. A master that allows it calls `Listener.tell` before it answers anything that they could
            change.
        keeps_ledger: Whether the master knows epochs and names each lease for ever: without, no tokens,
            no audit and no synchronous ranks.
    """

    worker_id: str
    in_process: bool = False
    report_delay_s: float = 0.0
    keeps_ledger: bool = True

    @abstractmethod
    def call(self, request: Request[A], wait_s: float = 0.0) -> A:
        """Ask the master, and return its answer.

        Args:
            request: A call of `edl_torch.core.calls`.
            wait_s: How long a `LeaseCall` may wait for the first grant, or for the end of the epoch.

        Raises:
            EdlError: As the dispatcher raised it.
            MasterUnavailable: The master did not answer within the client's `master_timeout_s`.
        """

    @abstractmethod
    def attend(self, session: str, member: int, listener: Listener) -> Callable[[], float] | None:
        """Keep the session alive until `leave`, and tell how that goes. Returns the clock by which it is
        told; None where liveness is never in doubt."""

    @abstractmethod
    def leave(self, session: str, member: int) -> None:
        """Say goodbye as that member: what the session holds goes to others at once."""

    @abstractmethod
    def close(self) -> None:
        """Free threads and sockets."""

    # For people -------------------------------------------------------------------------------------------

    def status(self) -> MasterStatus:
        """Return the master's whole state."""
        return self.call(StatusCall())

    def set_weights(
        self, dataset: str, weights: Mapping[str, float], *, key: str, fence: Fence | None = None
    ) -> MixtureSegment:
        """Give a mixture other weights, in place of those that it has now.

        Args:
            dataset: The mixture.
            weights: A weight for each of its components.
            key: A text that no other call has: one that is repeated does nothing.
            fence: That of a trainer, whose history the mixture must still be in.

        Returns:
            The segment that they hold in, from its `start` on.

        Raises:
            InvalidArgument: No such weights, or no mixture.
            StaleLease: The mixture went back to a checkpoint, or others set its weights at the same time.
        """
        found = self.dataset_status(dataset)
        return self.call(
            SetWeightsCall(
                dataset=dataset,
                ledger=found.ledger if fence is None else fence.ledger,
                lineage=found.lineage if fence is None else fence.lineage,
                replaces=found.segment,
                key=key,
                weights={name: float(weight) for name, weight in weights.items()},
            )
        )

    def dataset_status(self, dataset: str) -> DatasetStatus:
        """Return the dataset's progress, from outside: the master may know nothing of who asks."""
        return self.call(StatusCall(dataset=dataset)).datasets[0]
