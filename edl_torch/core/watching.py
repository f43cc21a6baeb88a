"""Trainers as people see them: how fast each is, what it holds, and whether it lags behind the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from edl_torch.core.calls import TrainerState, TrainerStatus
from edl_torch.core.history import WINDOW_S, History
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.members import Member

SLOW = 0.5  # of the median pace


class Watching:
    """Look at all members at one time."""

    def __init__(
        self, members: Iterator[Member], ledgers: Mapping[str, ShardLedger], history: History, now: float
    ) -> None:
        self._members = tuple(members)
        self._ledgers = ledgers
        self._history = history
        self._now = now

    def trainers(self) -> Iterator[TrainerStatus]:
        """Return the state of each."""
        seen = [(member, self._pace(member), self._is_judged(member)) for member in self._members]
        known = [pace for _, pace, is_judged in seen if is_judged]
        least = SLOW * median(known) if known else 0.0
        for member, pace, is_judged in seen:
            yield self._trainer(member, pace, slow=is_judged and pace < least)

    def _trainer(self, member: Member, pace: float, *, slow: bool) -> TrainerStatus:
        ledgers = [self._ledgers[name] for name in member.datasets]
        return TrainerStatus(
            session=member.session,
            worker_id=member.worker_id,
            datasets=tuple(sorted(member.datasets)),
            leased=sum(ledger.held_by(member.session) for ledger in ledgers),
            idle_s=max(0.0, self._now - member.seen),
            since_progress_s=max(0.0, self._now - member.progressed),
            state=_state(member),
            pace=pace,
            slow=slow,
            trained=sum(ledger.trained_by(member.session) for ledger in ledgers),
            leases=sum(ledger.leases.held(member.session) for ledger in ledgers),
            oldest_lease_s=max((self._age(ledger, member) for ledger in ledgers), default=0.0),
            measures=member.measures,
        )

    def _pace(self, member: Member) -> float:
        now = self._now
        watches = (self._history.watch(self._ledgers[name], now) for name in member.datasets)
        return sum(watch.pace(member.session, member.since, now) for watch in watches)

    def _is_judged(self, member: Member) -> bool:
        """Return whether its pace says something: it has had time, and holds records."""
        held = any(self._ledgers[name].holds(member.session) for name in member.datasets)
        return held and self._now - member.since >= WINDOW_S

    def _age(self, ledger: ShardLedger, member: Member) -> float:
        task = min((lease.task for lease in ledger.leases.of(member.session)), default=None)
        return 0.0 if task is None else self._history.watch(ledger, self._now).age(task, self._now)


def _state(member: Member) -> TrainerState:
    if member.gone_since is not None:
        return TrainerState.STREAM_GONE
    return TrainerState.STALLED if member.stalled else TrainerState.LIVE
