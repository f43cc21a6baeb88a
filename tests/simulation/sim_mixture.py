"""Mixtures in the simulation: who changes weights, and which record stands at each index, by another program.

The book is `mixture_proof.Plan`, which shares no code with the package.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mixture_proof import Broken, Segment, segment_of
from mixture_proof import Plan as Book
from sim_hub import Hub
from sim_model import Model, Position

from edl_torch.core.calls import Fence, LeaseAnswer, LeaseCall, SetWeightsCall
from edl_torch.core.codec import row_of
from edl_torch.core.mixture import parts_of
from edl_torch.core.plan import Plan
from edl_torch.errors import EdlError, StaleLease
from edl_torch.readers.base import AbstractDataReader
from edl_torch.readers.mixture import ComponentReader, MixtureReader
from edl_torch.shard import MixtureSegment, MixtureWeights, Slice, Task, TaskType

if TYPE_CHECKING:
    from sim_master import SimMaster

ASKED_AGAIN_S = 1.0


class _Numbers(AbstractDataReader):
    """A component of which nobody reads a record."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def create_shards(self, mode: TaskType = TaskType.TRAINING) -> dict[str, int]:
        """One source."""
        return {"numbers": self.size}

    def read_records(self, task: Task) -> Iterator[int]:
        """Not in a simulation."""
        raise NotImplementedError


def reader_of(sizes: tuple[int, ...], size: int, seed: int, turn: int) -> MixtureReader:
    """Return the reader of a mixture of so many records, whose components have these sizes, by turns."""
    parts = [
        ComponentReader(
            name=f"c{place}", reader=_Numbers(each), order={"records_per_shard": 8, "shuffle_window": 1}
        )
        for place, each in enumerate(sizes)
    ]
    chance = random.Random(seed)
    weights = parts_of([weight + 0.05 for weight in weights_of(chance, len(sizes))])
    return MixtureReader(parts, weights=[MixtureWeights(start=0, parts=weights)], size=size, turn=turn)


def weights_of(chance: random.Random, number: int) -> list[float]:
    """Weights, some of them 0."""
    while True:
        found = [chance.choice((0.0, 0.1, 0.5, round(chance.random(), 3))) for _ in range(number)]
        if any(found):
            return found


@dataclass(slots=True)
class MixedPosition(Position):
    """The outcomes at the moment of a token, and the order of then."""

    book: Book
    frontier: int


class MixtureModel(Model):
    """A mixture's records: at each index the one that the book has there."""

    def __init__(self, plan: Plan, batch: int) -> None:
        super().__init__(plan, batch)
        self._first = plan.spec.segments[0]
        self._names = [component.name for component in plan.spec.components]
        self._sizes = [component.size for component in plan.spec.components]
        self.frontier = 0  # the first index that no trainer of this lineage, or before its token, was lent
        self.changes = 0
        self.read = 0  # records that were looked up in the book
        self.book = self._begun()
        self.kept: set[str] = set()  # keys of calls whose segments are committed

    def _begun(self) -> Book:
        book = Book(self._names)
        book.begin(self._logged(self._first))
        return book

    def _logged(self, segment: MixtureSegment) -> Segment:
        """A segment as the logs have it."""
        return segment_of(self._names, json.loads(json.dumps(row_of(segment))))

    def leased(self, call: LeaseCall, answer: LeaseAnswer) -> None:
        """A lease call was answered."""
        super().leased(call, answer)
        for grant in answer.grants:
            self.frontier = max(self.frontier, grant.slice.shard * self._per_shard + grant.slice.stop)

    def reweighed(self, call: SetWeightsCall, segment: MixtureSegment) -> None:
        """A change of weights was carried out, or repeated."""
        if call.lineage != self.lineage or call.key in self.kept:
            return
        self.kept.add(call.key)
        if segment.start == self.plan.size:  # all is lent
            self._expect(self.frontier == self.plan.size, "weights were not set", call)
            return
        if segment.key != call.key:  # it has these weights already
            told = self.book.told
            is_it = told is not None and told[1:4] == self._logged(segment)[1:4]
            self._expect(is_it, "weights that are not those of the book", told, segment)
            return
        promise = "new weights hold for what is lent"
        self._expect(segment.start >= self.frontier, promise, segment, self.frontier)
        self._expect(not segment.start % segment.turn, "new weights begin in the middle of a turn", segment)
        self.changes += 1
        try:
            self.book.grow(segment.start)
            self.book.begin(self._logged(segment))
        except Broken as broken:
            self._expect(False, "another order", broken)

    def answered(self, call: SetWeightsCall) -> None:
        """Somebody was told that his weights hold."""
        self._expect(
            call.lineage < self.lineage or call.key in self.kept,
            "weights were answered and are not kept",
            call,
        )

    def begun(self, fence: Fence, cut: Slice, plan: Plan) -> None:
        """A trainer begins to read what it was lent."""
        if fence.lineage != self.lineage:
            return  # it has not heard that the data went back
        first = cut.shard * self._per_shard + cut.skip
        try:
            self.book.grow(first + cut.limit)
        except Broken as broken:
            self._expect(False, "another order", broken)
        indices = plan.indices(cut)
        assert indices.passes is not None
        turns = indices.passes.tolist()
        for index, (name, number), turn in zip(range(first, first + cut.limit), indices, turns, strict=True):
            c = self.book.owners[index]
            rank = self.book.ranks[index]
            expected = f"c{c}:numbers", rank % self._sizes[c], rank // self._sizes[c]
            self._expect(
                (name, number, turn) == expected, "another record", index, (name, number, turn), expected
            )
        self.read += cut.limit

    def position(self) -> Position:
        """What a token that is taken now stands for."""
        found = super().position()
        return MixedPosition(found.records, found.done, found.bad, copy.copy(self.book), self.frontier)

    def restored(self, position: Position | None, lineage: int) -> None:
        """The dataset went back; all leases are void."""
        super().restored(position, lineage)
        assert position is None or isinstance(position, MixedPosition)
        self.book = self._begun() if position is None else copy.copy(position.book)
        self.frontier = 0 if position is None else position.frontier
        self.kept.clear()


class Reweigher:
    """Somebody who gives the job other weights, and asks until he is answered, as the command line does."""

    def __init__(self, hub: Hub, master: SimMaster, model: MixtureModel, chance: random.Random) -> None:
        self.hub, self.master, self.model, self.chance = hub, master, model, chance
        self.call: SetWeightsCall | None = None

    def begin(self) -> None:
        """Look at the mixture, then set weights."""
        if not self.master.up:
            self.hub.after(ASKED_AGAIN_S, self.begin)
            return
        ledger = self.master.ledger
        names = [component.name for component in ledger.spec.components]
        self.call = SetWeightsCall(
            dataset=ledger.spec.name,
            ledger=self.master.dispatcher.ledger_id,
            lineage=ledger.lineage,
            replaces=ledger.spec.segments[-1].number,
            key=f"{self.chance.random()}",
            weights=dict(zip(names, weights_of(self.chance, len(names)), strict=True)),
        )
        for _ in range(self.chance.choice((1, 1, 2))):  # on its way a call may be doubled
            self.hub.after(self.chance.uniform(0, 0.3), self.ask)

    def ask(self) -> None:
        """Send it."""
        self.master.receive(self, "set_weights", self.call, 0.0)  # type: ignore[arg-type]

    def send(self, value: Any, error: EdlError | None) -> None:
        """The answer: one that is refused is left."""
        assert self.call is not None
        if error is None:
            self.model.answered(self.call)
        elif not isinstance(error, StaleLease):
            raise error

    def fail(self) -> None:
        """There is none: the master died, and the same call is made again."""
        self.hub.after(ASKED_AGAIN_S, self.ask)
