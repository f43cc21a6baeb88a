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
        self._shown = {name: (ledger, history.watch(ledger, now)) for name, ledger in ledgers.items()}
        self._now = now

    def trainers(self) -> Iterator[TrainerStatus]:
        """Return the state of each."""
        seen = [(member, self._pace(member), self._is_judged(member)) for member in self._members]
        known = [pace for _, pace, is_judged in seen if is_judged]
        least = SLOW * median(known) if known else 0.0
        for member, pace, is_judged in seen:
            yield self._trainer(member, pace, slow=is_judged and pace < least)

    def _trainer(self, member: Member, pace: float, *, slow: bool) -> TrainerStatus:
        session, now = member.session, self._now
        leased = trained = leases = 0
        oldest_lease_s = 0.0
        for name in member.datasets:
            ledger, watch = self._shown[name]
            trained += ledger.trained_by(session)
            held = tuple(ledger.leases.of(session))
            if held:
                leases += len(held)
                leased += sum([lease.open_records for lease in held])
                oldest_lease_s = max(oldest_lease_s, watch.age(min([lease.task for lease in held]), now))
        return TrainerStatus(
            session=session,
            worker_id=member.worker_id,
            datasets=tuple(sorted(member.datasets)),
            leased=leased,
            idle_s=max(0.0, now - member.seen),
            since_progress_s=max(0.0, now - member.progressed),
            state=_state(member),
            pace=pace,
            slow=slow,
            trained=trained,
            leases=leases,
            oldest_lease_s=oldest_lease_s,
            measures=member.measures,
        )

    def _pace(self, member: Member) -> float:
        watches = [self._shown[name][1] for name in member.datasets]
        return sum([watch.pace(member.session, member.since, self._now) for watch in watches])

    def _is_judged(self, member: Member) -> bool:
        """Return whether its pace says something: it has had time, and holds records."""
        if self._now - member.since < WINDOW_S:
            return False
        return any(self._shown[name][0].holds(member.session) for name in member.datasets)


def _state(member: Member) -> TrainerState:
    if member.gone_since is not None:
        return TrainerState.STREAM_GONE
    return TrainerState.STALLED if member.stalled else TrainerState.LIVE
