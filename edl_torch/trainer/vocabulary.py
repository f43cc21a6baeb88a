"""Words of a trainer: tickets of batches, what a procedure wants done, the phases of its parts, and facts.

All are values. A procedure is a generator. It runs under the shell's lock from one action to the next, so
what it decides is whole; the lock is free while an action is under way. The answer to an action is sent into
the procedure; an error that ended it is thrown in. A procedure that is given up is closed, and what it had
begun is undone.

Facts are what has happened to a trainer, for those who write it down: its audit log and its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, NoReturn, TypeVar

from edl_torch.core.calls import Acknowledgement, Failure, Fence, GiveBack, Grant, Request
from edl_torch.errors import AccountingError
from edl_torch.shard import DatasetSpec, MixtureSegment, Slice

Run = tuple[int, int, int]  # task, first position, position after the last
Ticket = tuple[Run, ...]  # what a batch holds, in the order in which its samples were drawn


class Tally:
    """Positions drawn since the last batch. One per process that collates; never shared by threads."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[list[int]] = []

    def start(self, task: int, position: int) -> list[int]:
        """Begin to draw a lease at `position`. Returns `[task, first, next]`; the reader moves `next`."""
        run = [task, position, position]
        self._runs.append(run)
        return run

    def take(self) -> tuple[Ticket, int]:
        """Return the positions drawn since the last call, and how many they are."""
        runs = self._runs
        if len(runs) == 1:  # as for most batches
            run = runs[0]
            task, first, after = run
            run[1] = after
            return (((task, first, after),) if after > first else ()), after - first
        ticket = tuple([(task, first, after) for task, first, after in runs if after > first])
        if runs:
            last = runs[-1]
            last[1] = last[2]
            self._runs = [last]
        return ticket, ticket_size(ticket)

    def clear(self) -> None:
        """Forget what an abandoned pass drew: it is in no batch."""
        self._runs.clear()


def runs_of(tickets: Iterable[Ticket]) -> Ticket:
    """Return what several batches hold."""
    return tuple([run for ticket in tickets for run in ticket])


def ticket_size(ticket: Ticket) -> int:
    """Return the samples in a ticket: quarantined positions in the middle of a batch split a run."""
    size = 0
    for _, first, after in ticket:
        size += after - first
    return size


# Actions -----------------------------------------------------------------------------------------------

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A call to the master. The answer is the master's."""

    request: Request[Any]
    wait_s: float = 0.0  # how long a lease call may wait at the master


@dataclass(frozen=True, slots=True)
class Register:
    """Register the dataset; by its name alone where `again`. The answer is a `RegisterAnswer`."""

    again: bool


@dataclass(frozen=True, slots=True)
class Attend:
    """Begin to keep the session alive. The answer is whether its liveness is ever in doubt."""

    member: int


@dataclass(frozen=True, slots=True)
class Describe:
    """Make the token of the beginning of the data. The answer is its text, '' where the plan is not known."""


@dataclass(frozen=True, slots=True)
class LookAround:
    """Look for other trainers of the dataset in this process. The answer is a tuple of `SiblingSession`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiblingSession:
    """Another trainer of the same dataset in this process, whose loop has `records` records."""

    session: str
    records: int
    same_thread: bool  # its loop runs in the thread that looks, and so cannot go on meanwhile


@dataclass(frozen=True, slots=True)
class Warn:
    """Warn the user. There is no answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until `ready()` holds, at most `timeout_s` seconds. The answer is its last value, and it has
    not changed yet when the procedure goes on."""

    ready: Callable[[], Any]
    timeout_s: float | None = None


# The shell holds its lock for `Wait` alone.
Action = Call | Register | Attend | Describe | LookAround | Warn | Wait
Procedure = Generator[Action, Any, T]


# Phases: changes that no table has are refused, raise, and leave the phase as it was -------------------


class Phase(Enum):
    """The phase of one part of a trainer."""

    __hash__ = object.__hash__  # Enum's own runs Python, at each change


class Membership(Phase):
    """The session's part in its dataset: a member of the master's or not."""

    NEW = "not registered"
    REGISTERING = "registering"
    MEMBER = "registered"
    REJOINING = "registering anew, after the master gave it up"


class Loop(Phase):
    """What the training loop of an `ElasticDataLoader` is doing."""

    IDLE = "not iterating"
    ASKING = "waits for a batch"
    TRAINING = "has a batch"


class Asking(Phase):
    """The call for leases."""

    IDLE = "none is under way"
    ASKING = "one is under way"


class Telling(Phase):
    """The report to the master."""

    IDLE = "none is under way"
    SENDING = "one is under way"
    STALLED = "the last one was not answered"


P = TypeVar("P", bound=Phase)


class Table(dict[tuple[P, P], P]):
    """The legal changes of one part: `TABLE[phase, to]` is `to`. Another change raises AccountingError."""

    def __init__(self, follows: dict[P, set[P]]) -> None:
        super().__init__({(phase, to): to for phase, ways in follows.items() for to in ways})

    def __missing__(self, change: tuple[P, P]) -> NoReturn:
        phase, to = change
        raise AccountingError(f"{type(phase).__name__} is {phase.name}: it cannot become {to.name}")


MEMBERSHIP = Table(
    {
        Membership.NEW: {Membership.REGISTERING},
        Membership.REGISTERING: {Membership.MEMBER, Membership.NEW},
        Membership.MEMBER: {Membership.REJOINING},
        Membership.REJOINING: {Membership.MEMBER},
    }
)
LOOP = Table(
    {
        Loop.IDLE: {Loop.ASKING},
        Loop.ASKING: {Loop.ASKING, Loop.TRAINING, Loop.IDLE},
        Loop.TRAINING: {Loop.ASKING, Loop.IDLE},
    }
)
ASKING = Table({Asking.IDLE: {Asking.ASKING}, Asking.ASKING: {Asking.IDLE}})
TELLING = Table(
    {
        Telling.IDLE: {Telling.SENDING},
        Telling.SENDING: {Telling.IDLE, Telling.STALLED},
        Telling.STALLED: {Telling.SENDING, Telling.IDLE},
    }
)


# Facts -------------------------------------------------------------------------------------------------


class Evidence(IntEnum):
    """The evidence for an acknowledgement. Of several the highest number counts."""

    STEP = 1  # an attached optimizer stepped
    SKIPPED = 2  # a GradScaler skipped the step of an attached optimizer
    UNSEEN = 3  # an attached optimizer stepped, and a batch's gradient was not seen in its parameters
    NEXT = 4  # the loop asked for the next batch, or for the end
    TOKEN = 5  # a token was taken while the loop had the batch in hand
    REPORT = 6  # the loop said so, of records that came in one stream
    COUNT = 7  # the loop said so, of records of several loader workers, which were then counted
    UNSTEPPED = 8  # the loop ended, and no step came on what it had gathered

    @property
    def exact(self) -> bool:
        """Whether it says which records were trained on."""
        return self < Evidence.COUNT

    @property
    def label(self) -> str:
        """As logs and `--json` have it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The dataset is registered, for the first time or anew: leases of before are void.

    `spec` is the registered one; `known_by` is the strength of what this trainer itself saw of the data.
    """

    spec: DatasetSpec
    fence: Fence
    batch_size: int
    known_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChanged:
    """Data that the trainer reads are others than when it joined; `said` names what was changed. `tokens`
    were taken since the data were last seen to be the same."""

    said: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease arrived."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class Reweighed:
    """Segments of a mixture have begun since."""

    segments: tuple[MixtureSegment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """This is about to be reported; `returned` are records among those given back that the loop had."""

    failures: tuple[Failure, ...]
    acknowledgements: tuple[Acknowledgement, ...]
    give_backs: tuple[GiveBack, ...]
    way: int
    returned: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """The master has answered the last report; it refused what was said of these tasks."""

    stale: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unanswered:
    """No answer came to the last report: it will be sent again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The last report was refused as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Leases are void, and this will not be reported (again). Another report may be on its way."""

    acknowledgements: tuple[Acknowledgement, ...]
    returned: tuple[Run, ...]
    on_its_way: bool


@dataclass(frozen=True, slots=True)
class Voided:
    """The master took these records back, which the loop has, and trains on or has trained on."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShown:
    """What a step has shown of records, each run of its slice.

    `what` is "returned": it used gradients of them, though they were given back before; "unlearnt": it counts
    them, though their gradients were thrown away; "several": it is not the first step of an optimizer that
    used gradients of them, which were new each time; "partly": of several attached optimizers some used
    gradients of them, and others stepped on none.
    """

    what: str
    runs: tuple[tuple[Run, Slice], ...]


@dataclass(frozen=True, slots=True)
class PaddingLearnt:
    """A step used so many padding batches as if they counted: the loop never asked what they weigh.

    They are copies of batches that this trainer, or another one, has in its own right.
    """

    batches: int


@dataclass(frozen=True, slots=True)
class Uncounted:
    """So many records were reported and are given back, as nobody can say which ones they are."""

    records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTaken:
    """A token was taken. Where it is not exact, it lacks `uncounted` records that were reported.

    It lacks `half_stepped` records that one attached optimizer had stepped on, and another had not.
    """

    token: str
    exact: bool
    uncounted: int
    half_stepped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """This session took the dataset back to a token (None: the beginning), which opened `lineage`."""

    token: str | None
    lineage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeen:
    """Sample of the model: the parameters of the attached optimizers.

    `at` is "begin" (before the first step of a pass), "end" (of a pass, a lineage or the session), "step"
    (also for these two where another loader's optimizer has stepped on the model since its own last one),
    "token", "swapped" (with a token: others are in place than the last step left) or "restored"; or, once in
    a lineage, when it is noticed that something spoke against one model: "written" by what is no step of an
    attached optimizer, "unattached" (another one stepped on gradients of a batch), "left out" (the first
    steps wrote nothing, and later ones did), "again" (a step used gradients that an earlier one had used, or
    that were of no batch), "padding" or "bad" (one used gradients of padding batches whose weight was asked
    for, or of a batch that was reported as bad).
    `steps` counts those since the session began, or went back to a token; `number` is another one where no
    parameter of before is left. `shape` is equal where samples can be compared. `values` and `sums` are
    little-endian, float32 and float64; NaN stands for values in the shards of other ranks. `eps` is that of
    the coarsest dtype, `processor` what computes: replicas on equal ones are equal to the bit. `word` is the
    user's, on why trainers whose parameters differ have one model.
    """

    at: str
    steps: int
    number: int
    shape: str
    sharded: bool
    eps: float
    processor: str
    values: bytes
    sums: bytes
    word: str


@dataclass(frozen=True, slots=True)
class Logged:
    """A message for the log, at the level of a warning."""

    text: str


AuditFact = (
    Joined
    | Granted
    | Reweighed
    | Reporting
    | Answered
    | Unanswered
    | Refused
    | Dropped
    | Voided
    | StepShown
    | PaddingLearnt
    | Uncounted
    | TokenTaken
    | Restored
    | ModelSeen
    | DataChanged
)
Fact = AuditFact | Logged
