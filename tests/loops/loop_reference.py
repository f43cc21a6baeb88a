"""What a loop was given and did with it, noted by the loop itself: the reference counter.

It asks nothing of the package. A record is `(epoch, number)`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

Record = tuple[int, int]
Counts = Counter[Record]


@dataclass(slots=True, eq=False)
class Batch:
    """One batch that the loop was given."""

    epoch: int
    numbers: list[int]
    stepped_by: set[int] = field(default_factory=set)  # optimizers that stepped since it was given
    declared: bool = False  # reported as done, or counted in a token
    passed: bool = False  # the body was done with it, and the next one asked for
    bad: bool = False  # reported with err_msg
    back: bool = False  # given back

    @property
    def records(self) -> list[Record]:
        return [(self.epoch, number) for number in self.numbers]


@dataclass(slots=True)
class Saved:
    """What the model had learnt when it was copied; the loop's own counts."""

    trained: Counts
    learnt: list[Counts]
    bad: Counts
    again: Counts
    is_broken: bool


class Reference:
    """Counts since the beginning, or since the model went back to a copy.

    `attached`: the optimizers that must step before a batch counts. Where it is empty, `plain` says whether a
    report is needed; else the first optimizer that steps with a batch in hand attaches itself.
    """

    def __init__(self, optimizers: int, attached: frozenset[int], *, plain: bool) -> None:
        self.attached = attached
        self.by_itself = False
        self.plain = plain
        self.batches: list[Batch] = []
        self.hand: Batch | None = None
        self.windows: list[list[Batch]] = [[] for _ in range(optimizers)]
        self.learnt: list[Counts] = [Counter() for _ in range(optimizers)]
        self.partial: list[Batch] = []  # of which a backward pass has failed, and left something
        self.is_broken = False  # a step was on such a part, so that what was learnt nobody knows
        self.before = Counts()  # trained in the copy that the model began from
        self.bad_before = Counts()
        self.again = Counts()  # how often a record may come once more, because a loop was left

    # What happens ---------------------------------------------------------------------------------------

    def delivered(self, epoch: int, numbers: list[int]) -> Batch:
        self.hand = Batch(epoch, numbers)
        self.batches.append(self.hand)
        return self.hand

    def backward(self, batch: Batch, optimizers: Iterable[int] | None = None) -> None:
        for number, window in enumerate(self.windows):
            if optimizers is None or number in optimizers:
                window.append(batch)

    def steps(self, optimizer: int) -> None:
        """An optimizer is about to step, and its parameters have gradients."""
        if (
            self.attached
            or self.plain
            or self.hand is None
            or self.done(self.hand)
            or self.hand.bad
            or self.hand.back
        ):
            return
        for batch in self.batches:
            batch.declared = self.done(batch)
        self.attached, self.by_itself = frozenset([optimizer]), True

    def renewed(self) -> None:
        """The loop makes new optimizers, and attaches none."""
        if self.by_itself:
            self.attached, self.by_itself = frozenset(), False

    def stepped(self, optimizer: int, *, before_hand: bool = False) -> None:
        """It changed its parameters by its window's gradients, which are gone then."""
        for batch in self.windows[optimizer]:
            self.learnt[optimizer].update(batch.records)
            self.is_broken |= batch in self.partial
        self.windows[optimizer] = []
        for batch in self.batches:
            if batch is not self.hand or not before_hand:
                batch.stepped_by.add(optimizer)

    def zeroed(self) -> None:
        self.partial = []
        self.windows = [[] for _ in self.windows]

    def declared(self) -> None:
        """The loop said that it is done with what it was passed."""
        done = self.batches if self.attached else self.batches[-1:]
        for batch in done:
            batch.declared = True

    def left(self, lost: Iterable[Batch]) -> None:
        """The loop was left; these batches were not done with."""
        for batch in lost:
            if not self.done(batch) and not batch.bad:
                self.again.update(batch.records)

    def saved(self) -> Saved:
        return Saved(
            self.trained(),
            [Counter(learnt) for learnt in self.learnt],
            self.bad(),
            Counter(self.again),
            self.is_broken,
        )

    def restored(self, saved: Saved) -> None:
        self.before, self.bad_before = Counter(saved.trained), Counter(saved.bad)
        self.learnt = [Counter(learnt) for learnt in saved.learnt]
        self.batches, self.hand, self.again = [], None, Counter(saved.again)
        self.is_broken = saved.is_broken
        self.zeroed()

    # What holds -----------------------------------------------------------------------------------------

    def done(self, batch: Batch) -> bool:
        """Whether the loop is done with a batch, by the rule that it goes by."""
        if batch.bad or batch.back:
            return False
        if batch.declared:
            return True
        if self.attached and self.attached <= batch.stepped_by:
            return True
        if self.by_itself and batch.stepped_by:  # another may take the place of one that attached itself
            return True
        # One that attached itself may step no more: what waits for it counts in the end as without.
        return batch.passed and not self.plain and (self.by_itself or not self.attached)

    def delivered_counts(self) -> Counts:
        return Counter(record for batch in self.batches for record in batch.records)

    def trained_since(self) -> Counts:
        return Counter(record for batch in self.batches if self.done(batch) for record in batch.records)

    def trained(self) -> Counts:
        return self.before + self.trained_since()

    def bad_since(self) -> Counts:
        return Counter(record for batch in self.batches if batch.bad for record in batch.records)

    def bad(self) -> Counts:
        return self.bad_before + self.bad_since()
