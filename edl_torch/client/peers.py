"""What synchronous ranks agree on, the port through which they do, and what one rank knows of all.

Ranks that train in lock-step count one ballot each, a few numbers, at every step. They hold copies of one
model, so what one of them trains on is in all. How numbers travel is the port's; nothing here knows torch,
or what a batch is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Protocol, Self, TypeVar, cast

from edl_torch.core.calls import (
    ConfirmAnswer,
    ConfirmCall,
    Fence,
    FencedCall,
    Listener,
    MasterApi,
    ProgressCall,
    RegisterAnswer,
    RegisterCall,
    ReportAnswer,
    ReportCall,
    Request,
)
from edl_torch.core.registration import new_spec, reconcile
from edl_torch.errors import InvalidArgument, PeerFailed, UnknownDataset
from edl_torch.shard import DatasetSpec, Slice

T = TypeVar("T")

_AGAIN = "Start all ranks again from the last checkpoint, as torchrun does by itself"
_NAMED = 8  # ranks in a message


class Doing(IntEnum):
    """What a rank does when it votes, and the `words` of messages for it.

    All ranks do the same, or their program is wrong.
    """

    words: str

    def __new__(cls, number: int, words: str = "") -> Self:
        made = int.__new__(cls, number)
        made._value_, made.words = number, words
        return made

    STEP = 1, "asks for the next batch"
    BEGIN = 2, "begins a pass over the loader"
    END = 3, "is at the end of an epoch"
    SCALE = 4, "calls scale_gradients()"
    SAVE = 5, "calls state_dict()"
    RESTORE = 6, "calls load_state_dict()"
    SAVE_CHECKPOINT = 7, "calls save_checkpoint()"
    LOAD_CHECKPOINT = 8, "calls load_checkpoint()"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """Numbers that add up over ranks; each is 0 or more."""

    batches: int = 0
    bare: int = 0
    failed: int = 0
    verdict: int = 0
    preempted: int = 0
    by_records: int = 0
    by_count: int = 0
    weighs: int = 0
    weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot(_Numbers):
    """One rank's word.

    Attributes:
        doing: what this rank is at.
        batches: 1 for a rank that has a batch for the step.
        bare: 1 for a rank that never had a batch, and so has none to pad with.
        failed: 1 for a rank that cannot go on.
        verdict: what rank 0 knows of the master: 1 for yes. Other ranks leave it out.
        preempted: 1 for a rank that was told to end soon.
        by_records, by_count: 1 for a rank whose gradients hold batches weighed by their records, or by counts
            of the loop's own.
        weight: the sum of the denominators of those batches.
        weighs: 1 for a rank that has ever weighed a loss: of a pipeline only the last stage does.
    """

    doing: Doing

    def numbers(self, rank: int, size: int) -> list[float]:
        """One number for each field that adds up, then one for each rank: 0 for all but this one."""
        doing = [0.0] * size
        doing[rank] = float(self.doing)
        return [float(getattr(self, field.name)) for field in fields(_Numbers)] + doing


@dataclass(frozen=True, slots=True, kw_only=True)
class Count(_Numbers):
    """The sum of all ranks' ballots, and what each rank is at, in the order of the ranks."""

    doing: tuple[Doing, ...]

    @classmethod
    def of(cls, sums: Iterable[float]) -> Self:
        """Make one of the sums of all ranks' `Ballot.numbers`."""
        numbers = list(sums)
        names = [field.name for field in fields(_Numbers)]
        values: dict[str, Any] = dict(zip(names, map(int, numbers), strict=False))
        values["weight"] = numbers[names.index("weight")]
        return cls(doing=tuple(Doing(int(number)) for number in numbers[len(names) :]), **values)

    def check(self) -> None:
        """Raise PeerFailed, the same on every rank, unless all ranks are at the same and can go on."""
        ranks: dict[Doing, list[int]] = {}
        for rank, doing in enumerate(self.doing):
            ranks.setdefault(doing, []).append(rank)
        if len(ranks) > 1:
            said = ", ".join(f"{_ranks(which)} {doing.words}" for doing, which in ranks.items())
            raise PeerFailed(
                f"the ranks of this job are not at the same point: {said}. All make the same calls and leave "
                f"their loops at the same step; what one rank alone decides, all must hear of. {_AGAIN}"
            )
        if self.failed:
            raise PeerFailed(
                f"{self.failed} other rank(s) of this job cannot go on: their own errors say why. {_AGAIN}"
            )


def _ranks(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    named = ", ".join(map(str, numbers[:_NAMED]))
    rest = len(numbers) - _NAMED
    return f"each of ranks {named}{f' and {rest} more' if rest > 0 else ''}"


class Vote(Protocol):
    """A vote under way."""

    def wait(self) -> Count:
        """The sum of all ranks' ballots. Raises PeerFailed when a rank is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastBatch:
    """What the lease holder of one model tells the ranks that hold other parts of it, once for each vote.

    Attributes:
        batch: what the loop gets; None where there is none.
        size: its records; 0 where there is none.
        slices: those records, in their order.
        discarded: how often a batch in hand has failed or gone back so far.
    """

    batch: Any = None
    size: int = 0
    slices: tuple[Slice, ...] = ()
    discarded: int = 0


class Delivery(Protocol):
    """A broadcast on its way."""

    @property
    def broadcast(self) -> BroadcastBatch:
        """What comes first: all but the batch."""

    def batch(self) -> Any:
        """The batch, when it is here, or has left. Raises PeerFailed when a rank is gone."""


class Parts(Protocol):
    """The ranks that hold one model in parts (tensor-, pipeline- or context-parallel), and so train on the
    same batches. One of them, the holder, has leases and reads; the others follow it."""

    @property
    def holds(self) -> bool:
        """Whether this rank is the holder. Rank 0 of all ranks is one."""

    def send(self, broadcast: BroadcastBatch) -> Delivery:
        """Let the followers have a broadcast, and go on. Raises InvalidArgument, with nothing sent, for a
        batch that cannot travel."""

    def receive(self) -> Delivery:
        """Wait for the holder's next broadcast, but not for its batch."""


class Peers(Protocol):
    """All ranks that step together. Every rank makes the same calls in the same order; a vote tells when one
    does not, so one comes before all else."""

    @property
    def rank(self) -> int:
        """This rank's number; rank 0 speaks to the master for all."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def coordinates(self) -> int:
        """Number of ranks that read different data: `size`, where each rank has the whole model."""

    @property
    def parts(self) -> Parts | None:
        """The ranks that train on the same batches as this one; None where each rank has the whole model."""

    def vote(self, ballot: Ballot) -> Vote:
        """Cast a ballot and go on."""

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank. Raises PeerFailed when a rank is gone."""

    def lend(self, batch: Any) -> Any:
        """The batch of the lowest rank that gives one (None is none), on every rank."""


def together(peers: Peers, doing: Doing, prepare: Callable[[], object], ask: Callable[[], T]) -> T:
    """Prepare on every rank, then ask on rank 0, and give every rank the answer, as JSON has it.

    What goes wrong on one rank ends the call on all: that rank raises its own error, the others PeerFailed.
    So do all where not every rank is doing this.
    """
    _all_do(peers, doing, prepare)
    answers: list[str] = []
    _all_do(peers, doing, lambda: answers.append(json.dumps(ask()) if peers.rank == 0 else ""))
    answer: T = json.loads(peers.share(answers[0]))
    return answer


def _all_do(peers: Peers, doing: Doing, act: Callable[[], object]) -> None:
    error: Exception | None = None
    try:
        act()
    except Exception as exc:  # noqa: BLE001  the others must hear of it before it goes on
        error = exc
    count = peers.vote(Ballot(doing=doing, failed=int(error is not None))).wait()
    if error is not None:
        raise error
    count.check()


# One rank -----------------------------------------------------------------------------------------------


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
