"""What has happened to a trainer, as values for those who write it down: its audit log and its messages."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from edl_torch.core.calls import Acknowledgement, Failure, Fence, GiveBack, Grant
from edl_torch.shard import DatasetSpec, Slice

Run = tuple[int, int, int]  # task, first position, position after the last


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
    """The dataset is registered, for the first time or anew: leases of before are void."""

    spec: DatasetSpec
    fence: Fence
    batch_size: int


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease arrived."""

    grant: Grant


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


@dataclass(frozen=True, slots=True)
class Relearnt:
    """A step used gradients of these records, each run of its slice, though they were given back before."""

    runs: tuple[tuple[Run, Slice], ...]


@dataclass(frozen=True, slots=True)
class Unlearnt:
    """A step counts these records, each run of its slice, though their gradients were thrown away."""

    runs: tuple[tuple[Run, Slice], ...]


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

    `at` is "begin" (before the first step of a pass), "step", "end" (of a pass, a lineage or the session),
    "token" or "restored"; "written", where something else than a step of an attached optimizer wrote it, and
    "unattached", where another optimizer stepped on gradients of a batch, once in a lineage.
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
    | Reporting
    | Answered
    | Unanswered
    | Refused
    | Dropped
    | Voided
    | Relearnt
    | Unlearnt
    | Uncounted
    | TokenTaken
    | Restored
    | ModelSeen
)
Fact = AuditFact | Logged
