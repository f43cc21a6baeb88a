"""What a fake master was told: for every record how often it was acknowledged, and what went to quarantine.

Kept apart from the ledger on purpose, from calls and answers alone, so that a test can hold one against the
other.
"""

from __future__ import annotations

from collections import Counter

from edl_torch.core.calls import LeaseAnswer, ReportAnswer, ReportCall
from edl_torch.core.plan import Plan
from edl_torch.shard import Slice

Record = tuple[int, str, int]  # (epoch, source name, record number)


class Outcomes:
    """The outcomes of one dataset's records, by (epoch, name, index)."""

    def __init__(self, plan: Plan) -> None:
        self.acknowledged: Counter[Record] = Counter()
        self.quarantined: Counter[Record] = Counter()
        self._plan = plan
        self._slices: dict[int, Slice] = {}
        self._done: dict[int, int] = {}
        self._holes: dict[int, set[int]] = {}

    def granted(self, answer: LeaseAnswer) -> None:
        """Leases were handed out; an answer that is repeated counts once."""
        for grant in answer.grants:
            self._slices.setdefault(grant.task, grant.slice)
            self._done.setdefault(grant.task, grant.slice.skip)

    def reported(self, call: ReportCall, answer: ReportAnswer) -> None:
        """Outcomes were told; what the master refused does not count."""
        for failure in call.failures:
            holes = self._holes.setdefault(failure.task, set())
            if failure.task not in answer.stale and failure.position not in holes:
                holes.add(failure.position)
                self.quarantined[self._record(failure.task, failure.position)] += 1
        for done in call.acknowledgements:
            if done.task not in answer.stale:
                self._acknowledge(done.task, done.upto)

    def _acknowledge(self, task: int, upto: int) -> None:
        holes = self._holes.get(task, set())
        for position in range(self._done[task], upto):
            if position not in holes:
                self.acknowledged[self._record(task, position)] += 1
        self._done[task] = max(upto, self._done[task])

    def _record(self, task: int, position: int) -> Record:
        cut = self._slices[task]
        return (cut.epoch, *self._plan.locate(cut.epoch, cut.shard, position))

    def check_complete(self, num_epochs: int) -> None:
        """Raise AssertionError, naming records, unless each record of each epoch had exactly one outcome."""
        told = self.acknowledged + self.quarantined
        doubled = [record for record, count in told.items() if count > 1]
        expected = num_epochs * self._plan.size
        assert not doubled, f"{len(doubled)} record(s) had more than one outcome: {doubled[:10]}"
        assert len(told) == expected, f"{expected - len(told)} of {expected} record(s) had no outcome"

    def __repr__(self) -> str:
        return f"<Outcomes acknowledged={len(self.acknowledged)} quarantined={len(self.quarantined)}>"
