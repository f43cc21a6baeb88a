"""Status of a master, for people: values that say how datasets and trainers are, and all of it as JSON.

Events, measures of trainers, and a picture of an epoch are parts of it. Values only: they decide nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import numpy as np

from edl_torch.core.quarantine import QuarantinedRecord
from edl_torch.errors import InvalidArgument
from edl_torch.shard import TaskType

if TYPE_CHECKING:
    from edl_torch.core.plan import Plan
    from edl_torch.shard import IndexArray, Slice

LEAST_EXPONENT = -16
# Upper bounds of a histogram's buckets in seconds, 15 µs to 512 s; one more bucket is for what took longer.
# They are part of the wire, and never change.
BOUNDS_S = tuple(2.0**exponent for exponent in range(LEAST_EXPONENT, 10))
BUCKETS = len(BOUNDS_S) + 1
MOST_SECONDS = 1e12  # of a sum: sums of sums stay finite
_NONE = (0,) * BUCKETS


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Durations, counted by powers of two.

    `counts[i]` is how many were shorter than `BOUNDS_S[i]` and not shorter than the bound before it; the last
    item is for what took longer. `sum_s` is their sum in seconds.
    """

    counts: tuple[int, ...] = _NONE
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        """How many durations there were."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        """The mean in seconds; 0 where there were none."""
        return self.sum_s / (self.count or 1)

    def __add__(self, other: Histogram) -> Histogram:
        """Return the histogram of the durations of both."""
        counts = tuple([mine + its for mine, its in zip(self.counts, other.counts, strict=True)])
        return Histogram(counts=counts, sum_s=self.sum_s + other.sum_s)

    def check(self, what: str) -> None:
        """Raise InvalidArgument for counts or a sum that no durations have."""
        if len(self.counts) != BUCKETS:
            raise InvalidArgument(f"{what} has {len(self.counts)} buckets: a histogram has {BUCKETS}")
        check_counts(what, *self.counts)
        check_seconds(what, self.sum_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """What one session has measured since it began. All of it only grows.

    Only loops over an `ElasticDataLoader` are timed. Of other loops `batches` and `records` are those that
    were reported.

    Attributes:
        batches: that the loop was given, padding batches of synchronous ranks too.
        records: in these batches.
        waited: how long the loop waited for each batch.
        stepped: how long it worked on each: from when it got the batch to when it asked for the next one.
        waited_for_ranks_s: of the seconds in `waited` those in which it waited for other synchronous ranks.
        timed: batches whose reading was timed, in the loop's thread, another one, or a loader worker.
        read_s: seconds in which the reader read the records of these.
        transform_s: seconds in which these records were transformed.
    """

    batches: int = 0
    records: int = 0
    waited: Histogram = Histogram()
    stepped: Histogram = Histogram()
    waited_for_ranks_s: float = 0.0
    timed: int = 0
    read_s: float = 0.0
    transform_s: float = 0.0

    @property
    def waiting_share(self) -> float | None:
        """The share of its time that the loop waited for data, of 0 to 1; None where nothing was timed."""
        whole_s = self.waited.sum_s + self.stepped.sum_s
        return self.waited.sum_s / whole_s if whole_s else None

    @property
    def mean_read_s(self) -> float | None:
        """Seconds in which the records of a batch are read, in sum; None where no batch was timed."""
        return self.read_s / self.timed if self.timed else None

    @property
    def mean_transform_s(self) -> float | None:
        """Seconds in which the records of a batch are transformed, in sum."""
        return self.transform_s / self.timed if self.timed else None

    def check(self) -> None:
        """Raise InvalidArgument for values that cannot have been measured."""
        check_counts("measures", self.batches, self.records, self.timed)
        check_seconds("measures", self.waited_for_ranks_s, self.read_s, self.transform_s)
        self.waited.check("waited")
        self.stepped.check("stepped")


def padded(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the counts of a histogram of which the last buckets, that are empty, were left out."""
    return (*counts, *_NONE[len(counts) :])


def trimmed(counts: Sequence[int]) -> Sequence[int]:
    """Return the counts without the empty buckets at the end."""
    used = len(counts)
    while used and not counts[used - 1]:
        used -= 1
    return counts[:used]


def check_counts(what: str, *counts: int) -> None:
    """Raise InvalidArgument for a negative count."""
    if min(counts) < 0:
        raise InvalidArgument(f"{what}: {min(counts)} is no count")


def check_seconds(what: str, *sums: float) -> None:
    """Raise InvalidArgument for what is no number of seconds, or too many."""
    for seconds in sums:
        if not 0 <= seconds <= MOST_SECONDS:
            raise InvalidArgument(f"{what}: {seconds} is no number of seconds")


# Picture of an epoch ----------------------------------------------------------------------------------

CELLS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """Records of one epoch by state, for each of its cells: stretches of the epoch's order, alike in length.

    `done` were trained on, or dropped with the last, too small batch; `returned` came back and wait again.
    """

    epoch: int
    waiting: tuple[int, ...]
    lent: tuple[int, ...]
    done: tuple[int, ...]
    returned: tuple[int, ...]
    quarantined: tuple[int, ...]


def draw(
    plan: Plan,
    epoch: int,
    passed: int,
    *,
    lent: Iterable[Slice],
    returned: Iterable[Slice],
    quarantined: Iterable[Slice],
) -> Picture:
    """Return the picture of an epoch of which `passed` records lie before the cursor."""
    edges = cell_edges(plan.size)
    waiting = np.diff(np.clip(edges, passed, None))
    counts = [_by_cell(plan, epoch, edges, slices) for slices in (lent, returned, quarantined)]
    done = np.maximum(np.diff(edges) - waiting - sum(counts), 0)
    names = ("waiting", "done", "lent", "returned", "quarantined")
    columns = zip(names, (waiting, done, *counts), strict=True)
    return Picture(epoch=epoch, **{name: tuple(column.tolist()) for name, column in columns})


def cell_edges(size: int) -> IndexArray:
    """Return where each cell of `size` records begins, and the end of the last one."""
    cells = min(CELLS, size)
    return np.array([size * i // cells for i in range(cells + 1)], np.int64)


def records_by_cell(first: IndexArray, length: IndexArray, edges: IndexArray) -> IndexArray:
    """Return how many records of some runs lie between each two edges. The runs ascend and do not overlap."""
    if not len(first):
        return np.zeros(len(edges) - 1, np.int64)
    before = np.concatenate(([0], np.cumsum(length)))  # records of the runs before each
    place = np.searchsorted(first, edges, side="right")  # runs that begin at the edge or before it
    last = np.maximum(place - 1, 0)  # before all of them nothing of the first one is reached
    inside = np.clip(edges - first[last], 0, length[last])
    reached: IndexArray = before[last] + inside
    return np.diff(reached)


def _by_cell(plan: Plan, epoch: int, edges: IndexArray, slices: Iterable[Slice]) -> IndexArray:
    """Return how many records of the slices lie between each two edges. No two slices overlap."""
    rows = np.array([(s.shard, s.skip, s.limit) for s in slices if s.epoch == epoch], np.int64).reshape(-1, 3)
    first = plan.window_bounds(epoch, rows[:, 0])[0] + rows[:, 1]
    order = np.argsort(first)
    return records_by_cell(first[order], rows[order, 2], edges)


# Events -----------------------------------------------------------------------------------------------

NAME_CHARS = 80  # of a name in an event
TEXT_CHARS = 240


class EventKind(Enum):
    """Kind of an event; the values are those of the wire and of JSON."""

    STARTED = "started"
    JOINED = "joined"
    LEFT = "left"
    DIED = "died"
    STALLED = "stalled"
    EPOCH_OVER = "epoch_over"
    FINISHED = "finished"
    QUARANTINED = "quarantined"
    CHECKPOINT = "checkpoint"
    RESTORED = "restored"
    SUSPENDED = "suspended"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Event of a job: what happened at `at`, in seconds since 1970.

    `number` grows from event to event. Events of one kind that follow each other closely are one, `count` of
    them. `records` are those that came back, or have an outcome now. `text` says more: a reason, a record.
    """

    number: int
    at: float
    kind: EventKind
    dataset: str = ""
    worker_id: str = ""
    count: int = 1
    slices: int = 0
    records: int = 0
    text: str = ""

    @property
    def line(self) -> str:
        """The event in words."""
        return _WORDS[self.kind](self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """Trainer that has gone: when, why, how many records it had trained on and how many went back.

    `died` is False for one that said goodbye. `at` is in seconds since 1970.
    """

    session: str
    worker_id: str
    at: float
    died: bool
    why: str
    trained: int
    slices: int
    records: int


def _went_back(event: Event) -> str:
    if not event.records:
        return "; it held no records"
    return f"; {_count(event.records, 'record')} in {_count(event.slices, 'slice')} went back"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _gone(verb: str, event: Event) -> str:
    return f"trainer {event.worker_id} {verb}{_because(event)}{_went_back(event)}"


def _because(event: Event) -> str:
    return f": {event.text}" if event.text else ""


_WORDS = {
    EventKind.STARTED: lambda e: f"the master started{_because(e)}",
    EventKind.JOINED: lambda e: f"trainer {e.worker_id} joined {e.dataset}",
    EventKind.LEFT: lambda e: _gone("left", e),
    EventKind.DIED: lambda e: _gone("died", e),
    EventKind.STALLED: lambda e: _gone("stalled", e),
    EventKind.EPOCH_OVER: lambda e: f"{e.dataset}: {e.text} over",
    EventKind.FINISHED: lambda e: f"{e.dataset} finished: {e.text}",
    EventKind.QUARANTINED: lambda e: f"{e.dataset}: {_count(e.count, 'record')} quarantined{_because(e)}",
    EventKind.CHECKPOINT: lambda e: (
        f"{e.dataset}: {_count(e.count, 'checkpoint')}, the last by trainer {e.worker_id}"
    ),
    EventKind.RESTORED: lambda e: f"{e.dataset} went back to {e.text}",
    EventKind.WEIGHTS: lambda e: f"{e.dataset} has other weights {e.text}",
    EventKind.SUSPENDED: lambda e: f"{e.dataset} suspended{_because(e)}",
}


# Datasets, trainers, and all of it --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentStatus:
    """State of a component of a mixture for people.

    `share` is what it is to get now, of 1. Of the records that were lent or are done, `wanted` is how many
    should be of it by the weights since the beginning, `given` how many are; `open` of them have no outcome.
    Where weights are of tokens, a record of it has `mean_length`, and `given` make so many `tokens`.
    """

    name: str
    size: int
    share: float
    wanted: float
    given: int
    open: int
    mean_length: float = 0.0

    @property
    def tokens(self) -> float:
        """Tokens of the records that are given, by the mean length; 0 where shares are of records."""
        return self.given * self.mean_length

    @property
    def passes(self) -> float:
        """Passes over it that `given` makes; 0 of one that has left, whose size is not known any more."""
        return self.given / self.size if self.size else 0.0


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


# As JSON has it ---------------------------------------------------------------------------------------

Plain = dict[str, Any]
_Change = Callable[[Any], Any]

# Of a trainer's row: what stands as it is, and digits of the rest.
_AS_IT_IS = ("session", "worker_id", "slow", "trained", "leases")
_TIMES = {"pace": 2, "idle_s": 1, "since_progress_s": 1, "oldest_lease_s": 1}
_MEASURED = {"waiting_share": 3, "mean_read_s": 6, "mean_transform_s": 6}
ROW = (*_AS_IT_IS, *_TIMES, "state", *_MEASURED)
_as_it_is, _times, _measured = attrgetter(*_AS_IT_IS), attrgetter(*_TIMES), attrgetter(*_MEASURED)


def plain(record: Any) -> Plain:
    """Return a status, or a part of one, as values that JSON has: its fields and properties."""
    kind: Any = type(record)
    names, take, changes = _taker(kind)
    values = dict(zip(names, take(record), strict=True))
    for name, change in changes:
        if values[name] is not None:
            values[name] = change(values[name])
    return values


def plain_frame(status: MasterStatus, most_bad: int) -> Plain:
    """Return what the page shows of a status, of each quarantine `most_bad` records.

    `trainers` are rows of the columns that `trainer_columns` names: they are most of it.
    """
    datasets = tuple([replace(one, quarantine=one.quarantine[:most_bad]) for one in status.datasets])
    values = plain(replace(status, datasets=datasets, trainers=()))
    values |= zip(_MEASURED, _measured(status), strict=True)
    return values | {"trainer_columns": ROW, "trainers": [_row(trainer) for trainer in status.trainers]}


def _row(trainer: TrainerStatus) -> tuple[Any, ...]:
    times = map(round, _times(trainer), _TIMES.values())
    measured = zip(_measured(trainer), _MEASURED.values(), strict=True)
    shown = [None if value is None else round(value, digits) for value, digits in measured]
    return (*_as_it_is(trainer), *times, trainer.state.value, *shown)


@cache
def _taker(kind: Any) -> tuple[list[str], Callable[[Any], tuple[Any, ...]], list[tuple[str, _Change]]]:
    """Names of what is shown of a record, what takes it, and how some of it becomes plain."""
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    changes = [(name, change) for name in names if (change := _change(hints[name])) is not None]
    names += [name for name, value in vars(kind).items() if isinstance(value, property)]
    return names, attrgetter(*names), changes


def _change(hint: Any) -> _Change | None:
    kind = next(iter(get_args(hint)), hint)
    if is_dataclass(kind):
        return (lambda records: [plain(record) for record in records]) if get_origin(hint) is tuple else plain
    if isinstance(kind, type) and issubclass(kind, Enum):
        return attrgetter("name" if issubclass(kind, int) else "value")
    return None
