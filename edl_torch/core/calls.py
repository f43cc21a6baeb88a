"""Calls of trainers to the master and its answers: plain values, the same for every transport.

`rpc.convert` turns them into protobuf messages and back. Calls are not frozen, though nobody changes one:
making a frozen value costs three times as much, which was a tenth of the master's cost of a batch's call.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from edl_torch.core.status import DatasetStatus, MasterStatus
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
