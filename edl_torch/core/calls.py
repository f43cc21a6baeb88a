"""Calls of trainers to the master and its answers, plain values; and what every master is for a trainer.

`rpc.convert` turns them into protobuf messages and back. Calls are not frozen, though nobody changes one:
making a frozen value costs three times as much, which was a tenth of the master's cost of a batch's call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, Protocol, TypeVar

from edl_torch.core.status import DatasetStatus, MasterStatus, Measures
from edl_torch.shard import DatasetSpec, MixtureSegment, Slice
from edl_torch.shard import Registration as Registration  # a call's part, declared with the options

A = TypeVar("A")

LeaseId = tuple[int, int]  # task, attempt

NEW_PASS = -1  # `LeaseCall.epoch` of a pass that has no epoch yet: the answer names it


class Request(Generic[A]):
    """Call to a master, which answers it with an `A`: one class for each, all in this file."""

    __slots__ = ()

    @classmethod
    def name(cls) -> str:
        """Return the name of such calls: `lease` of a `LeaseCall`."""
        return cls.__name__.removesuffix("Call").lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterCall(Request["RegisterAnswer"]):
    """Call that joins a dataset, and describes it where `registration.sources` is given."""

    session: str
    worker_id: str
    batch_size: int
    registration: Registration


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Fence:
    """Fencing triple stamped on every call.

    `ledger` is the id of the master's state, `lineage` the number of the dataset's history in it: a restore
    opens another one. `member` is the number that the master gave the session when it registered: a session
    that was given up and registers again has another one. The defaults are those of a session that has not
    registered.
    """

    ledger: str = ""
    lineage: int = 0
    member: int = 0


UNREGISTERED = Fence()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterAnswer:
    """Dataset as registered, and the fence of every later call."""

    spec: DatasetSpec
    fence: Fence
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Message that gives a lease: its task and attempt, and its slice.

    Grants of one non-zero `bundle` make whole batches together.
    """

    task: int
    attempt: int
    slice: Slice
    bundle: int = 0


@dataclass(slots=True, kw_only=True)
class FencedCall(Request[A]):
    """Call of a session on a dataset, with the fence that its registration was answered with.

    The fence is compared with the master's: a call of another master, of a history that was left by a
    restore, or of before its session was given up is refused and changes nothing.
    `asked` and `reported` are the numbers of the last lease call and report that were answered to this member
    in this lineage (0: none yet): a master that does not know of them has a journal that went back in time.
    """

    session: str
    dataset: str
    fence: Fence
    asked: int = 0
    reported: int = 0


@dataclass(slots=True, kw_only=True)
class SnapshotCall(FencedCall[str]):
    """Call for the dataset's position as a token, by a trainer that is still part of its history."""


@dataclass(slots=True, kw_only=True)
class ProgressCall(FencedCall[DatasetStatus]):
    """Call for the dataset's progress, by a trainer that is still part of its history."""


@dataclass(slots=True, kw_only=True)
class RestoreCall(FencedCall[int]):
    """Call that takes the dataset back to `token` (None: to the beginning), in place of its fence's lineage.

    The answer is the new lineage.

    `request` numbers the restores of a session: one that is repeated gets the answer of then.
    """

    request: int
    token: str | None


class PassState(IntEnum):
    """State of the pass that a lease call belongs to; the numbers are those of the wire."""

    OPEN = 0
    EPOCH_OVER = 1
    FINISHED = 2


@dataclass(slots=True, kw_only=True)
class LeaseCall(FencedCall["LeaseAnswer"]):
    """Call for up to `count` leases of `epoch`. `request` numbers the call; a repeat is answered alike.

    `drained` says that every batch of this pass was handed to the loop: the trainer waits to hear whether the
    pass is over. `ahead` says that it would read ahead: a trainer that needs records sooner goes first.
    `segment` is the newest segment of a mixture that it knows.
    """

    request: int
    epoch: int
    count: int
    drained: bool = False
    ahead: bool = False
    segment: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAnswer:
    """Leases granted (maybe none), the pass's epoch (NEW_PASS while it has none) and its state.

    Of a mixture also the segments that have begun since the one which the call names.
    """

    request: int
    epoch: int
    state: PassState
    grants: tuple[Grant, ...] = ()
    segments: tuple[MixtureSegment, ...] = ()

    @property
    def nothing_yet(self) -> bool:
        """Whether it grants nothing and ends nothing: a call that may wait is not answered with it."""
        return not self.grants and self.state is PassState.OPEN


@dataclass(slots=True, kw_only=True)
class Acknowledgement:
    """Outcome: records of a lease from position `start` up to `upto` were trained on.

    `start` may lie before the lease begins; without it all below `upto` are meant.
    """

    task: int
    attempt: int
    upto: int
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Outcome: the record at `position` cannot be read and goes into quarantine."""

    task: int
    attempt: int
    position: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """Return of a lease's records from position `start` up to `upto` (None: all that follow), those without
    outcome; as `remainder` if they were less than a batch."""

    task: int
    attempt: int
    start: int
    upto: int | None = None
    remainder: bool = False


@dataclass(slots=True, kw_only=True)
class ReportCall(FencedCall["ReportAnswer"]):
    """Report on leased records. Applied in the order failures, acknowledgements, give-backs."""

    request: int
    failures: tuple[Failure, ...] = ()
    acknowledgements: tuple[Acknowledgement, ...] = ()
    give_backs: tuple[GiveBack, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAnswer:
    """Answer to a report.

    `stale` lists the tasks that were refused; `wanted` says that another trainer waits for records.
    """

    request: int
    stale: tuple[int, ...] = ()
    wanted: bool = False


@dataclass(slots=True, kw_only=True)
class ConfirmCall(FencedCall["ConfirmAnswer"]):
    """Question of a session that was cut off: which of these leases are still its own?"""

    leases: tuple[LeaseId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmAnswer:
    """Answer to a confirm call: `void` lists the tasks that are not the session's any more."""

    void: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetWeightsCall(Request[MixtureSegment]):
    """Call that gives a mixture other weights from the first index on that is not lent; the segment answers.

    `weights` are by component, none left out. It takes the place of segment `replaces` of this lineage:
    compare and swap. `key` names the call: one that was carried out and is repeated gets the segment of then.
    """

    dataset: str
    ledger: str
    lineage: int
    replaces: int
    key: str
    weights: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusCall(Request[MasterStatus]):
    """Call for the master's whole state, or for that of one `dataset` alone, by anybody."""

    dataset: str | None = None


# Masters ------------------------------------------------------------------------------------------------


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
    """What every master is for a trainer, and `DataShardService(master_client=…)` takes: one in this process,
    over grpc, of another project, or the fake of `edl_torch.testing`.

    Every method may be called from several threads, and every call may be repeated safely.

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
