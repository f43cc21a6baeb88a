"""Calls of trainers to the master and its answers: plain values, the same for every transport.

`rpc.convert` turns them into protobuf messages and back. Calls are not frozen, though nobody changes one:
making a frozen value costs three times as much, which was a tenth of the master's cost of a batch's call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Generic, TypeVar

from edl_torch.core.events import Departed, Event
from edl_torch.core.measures import Measures
from edl_torch.core.picture import Picture
from edl_torch.shard import DatasetSpec, MixtureSegment, Slice, TaskType
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
class ProgressCall(FencedCall["DatasetStatus"]):
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
class StatusCall(Request["MasterStatus"]):
    """Call for the master's whole state, or for that of one `dataset` alone, by anybody."""

    dataset: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedRecord:
    """A record that could not be read in one epoch, with its place in the order and in its storage."""

    epoch: int
    shard: int
    position: int
    name: str
    index: int
    reason: str

    @property
    def cause(self) -> str:
        """The reason without the record's name, which a reader's error begins with."""
        return self.reason.removeprefix(f"record {self.index} of {self.name!r}: ")

    def __str__(self) -> str:
        return f"record {self.index} of {self.name!r}: {self.cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentStatus:
    """State of a component of a mixture for people.

    `share` is what it is to get now, of 1. Of the records that were lent or are done, `wanted` is how many
    should be of it by the weights since the beginning, `given` how many are; `open` of them have no outcome.
    """

    name: str
    size: int
    share: float
    wanted: float
    given: int
    open: int

    @property
    def passes(self) -> float:
        """Passes over it that `given` makes."""
        return self.given / self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetStatus:
    """State of a dataset for people.

    Counts are of records unless said otherwise; those of outcomes are totals of all epochs. `quarantine` may
    be its beginning alone; `quarantined` counts all. `lineage` of `ledger` is the history that the counts are
    of; 0 where the master keeps none.

    `rate` is in records a second, over the last 10 to 20 s. Since the start of the master count
    `returned_slices` and `returned_records` what was taken from trainers that died, left or stalled,
    `given_back` the records that trainers gave back themselves, `checkpoints` and `restores` tokens given and
    gone back to. `picture` is in the master's whole status alone. Of a mixture there are the `components`,
    and the number of the newest `segment`.
    """

    dataset: str
    ledger: str
    lineage: int
    task_type: TaskType
    epoch: int
    num_epochs: int
    size: int
    shards: int
    shards_left: int
    todo: int
    leased: int
    leases: int
    acknowledged: int
    quarantined: int
    dropped: int
    finished: bool
    trainers: int
    failure: str = ""
    quarantine: tuple[QuarantinedRecord, ...] = ()
    rate: float = 0.0
    returned_slices: int = 0
    returned_records: int = 0
    given_back: int = 0
    checkpoints: int = 0
    restores: int = 0
    picture: Picture | None = None
    components: tuple[ComponentStatus, ...] = ()
    segment: int = 0

    @property
    def outcomes(self) -> int:
        """Records that have an outcome, of all epochs."""
        return self.acknowledged + self.quarantined + self.dropped

    @property
    def epochs_done(self) -> int:
        """Epochs that the outcomes make up."""
        return self.outcomes // self.size if self.size else 0

    @property
    def total(self) -> int | None:
        """Records of all epochs; None where they are endless."""
        return self.size * self.num_epochs or None

    @property
    def percent(self) -> float:
        """Part of all records that has an outcome, 0 to 100; where epochs are endless, of this epoch."""
        if self.finished:
            return 100.0
        if self.total is None:
            return self.epoch_percent
        return min(100.0, 100.0 * self.outcomes / self.total)

    @property
    def epoch_percent(self) -> float:
        """Part of the records of the epoch that has an outcome, 0 to 100."""
        if self.finished or not self.size:
            return 100.0
        return 100.0 * max(0, self.size - self.todo - self.leased) / self.size

    @property
    def epoch_eta_s(self) -> float | None:
        """Seconds to the end of the epoch at the present rate; None where nothing moves."""
        return self._eta(self.todo + self.leased)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end of the last epoch at the present rate; None where there is none, or no rate."""
        return None if self.total is None else self._eta(self.total - self.outcomes)

    def _eta(self, left: int) -> float | None:
        if self.finished:
            return 0.0
        return max(0, left) / self.rate if self.rate > 0 else None


class TrainerState(Enum):
    """State of a trainer, as its master sees it; the values are those of the wire and of JSON."""

    LIVE = "live"
    STREAM_GONE = "stream_gone"
    STALLED = "stalled"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """State of a session for people. `idle_s` is the time since its last call.

    `since_progress_s` is the time since its training loop was last known to move on. `pace` is in records a
    second, over the last 10 to 20 s; `slow` says that it is below half of the trainers' median. `trained`
    counts records, since it registered or the master started. `oldest_lease_s` is the age of its oldest
    lease, to about a second. `measures` are those of its last heartbeat; None where it sends none.
    """

    session: str
    worker_id: str
    datasets: tuple[str, ...]
    leased: int
    idle_s: float
    since_progress_s: float = 0.0
    state: TrainerState = TrainerState.LIVE
    pace: float = 0.0
    slow: bool = False
    trained: int = 0
    leases: int = 0
    oldest_lease_s: float = 0.0
    measures: Measures | None = None

    @property
    def waiting_share(self) -> float | None:
        """Share of its time that its loop waited for data; None where that was not measured."""
        return None if self.measures is None else self.measures.waiting_share

    @property
    def mean_read_s(self) -> float | None:
        """Seconds in which the records of one of its batches are read; None where that was not measured."""
        return None if self.measures is None else self.measures.mean_read_s

    @property
    def mean_transform_s(self) -> float | None:
        """Seconds in which the records of one of its batches are transformed; None: not measured."""
        return None if self.measures is None else self.measures.mean_transform_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterStatus:
    """State of a master for people: what `edl-torch status` shows.

    `suspended` says of datasets why nothing of them is lent until they are restored. `time` and `started_at`
    are in seconds since 1970; the last `events` and the trainers that `departed` last stand in order, and
    `event_counts` has how many of each kind there were since the start.
    """

    ledger: str
    durable: bool
    datasets: tuple[DatasetStatus, ...]
    trainers: tuple[TrainerStatus, ...]
    suspended: dict[str, str] = field(default_factory=dict)
    time: float = 0.0
    started_at: float = 0.0
    events: tuple[Event, ...] = ()
    departed: tuple[Departed, ...] = ()
    event_counts: dict[str, int] = field(default_factory=dict)

    @property
    def waiting_share(self) -> float | None:
        """Share of their time that the loops of all trainers together waited for data; None: not measured."""
        known = [trainer.measures for trainer in self.trainers if trainer.measures is not None]
        waited = sum(measures.waited.sum_s for measures in known)
        whole = waited + sum(measures.stepped.sum_s for measures in known)
        return waited / whole if whole else None

    @property
    def mean_read_s(self) -> float | None:
        """Seconds in which the records of a batch are read, of all trainers; None: not measured."""
        return self._mean("read_s")

    @property
    def mean_transform_s(self) -> float | None:
        """Seconds in which the records of a batch are transformed, of all trainers; None: not measured."""
        return self._mean("transform_s")

    def _mean(self, what: str) -> float | None:
        known = [trainer.measures for trainer in self.trainers if trainer.measures is not None]
        timed = sum(measures.timed for measures in known)
        return sum(getattr(measures, what) for measures in known) / timed if timed else None
