"""Sessions that the master knows, their liveness and last answers; and those that take part in one dataset.

Pure: time comes in as numbers of a monotonic clock. The leases of a lost session are the ledger's business.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypedDict

from edl_torch.core.calls import LeaseAnswer
from edl_torch.core.changes import Mark, unrecorded
from edl_torch.core.status import Measures
from edl_torch.errors import SessionLost

HEARTBEATS_PER_TIMEOUT = 3
LONGEST_TIMEOUT_S = 3600.0  # as far as heartbeats go: they also carry what people look at


@dataclass(slots=True)
class Member:
    """Session under its member number: the datasets it joined, its last answers, when it was last heard."""

    session: str
    worker_id: str
    number: int  # of this membership: one that was given up and registers again is another member
    seen: float
    datasets: set[str] = field(default_factory=set)
    answers: dict[str, LeaseAnswer] = field(default_factory=dict)
    reports: dict[str, int] = field(default_factory=dict)
    refused: dict[str, tuple[int, ...]] = field(default_factory=dict)  # tasks, of the last report
    journalled: bool = False  # it registered before the master's start: answers to it may be forgotten
    gone_since: float | None = None
    progress: int = 0  # the training loop's own count, as the last heartbeat told it
    since: float = 0.0  # when it registered, or the master started
    progressed: float = 0.0  # when the loop was last known to move on
    stalled_at: float = -math.inf  # when its leases were last taken because its loop did not move on
    dead_because: str = ""  # why it was taken for dead, when it was
    measures: Measures | None = None  # the last that it sent; not journalled
    timeout_s: float | None = None  # its own, where somebody else decides when it is dead; not journalled

    def __post_init__(self) -> None:
        self.progressed = self.since = self.seen

    @property
    def stalled(self) -> bool:
        """Whether its loop has not moved on since its leases were taken for that."""
        return self.progressed <= self.stalled_at

    def asked(self, dataset: str) -> int:
        """Return the number of the last lease call that was answered in this lineage; 0 before the first."""
        answer = self.answers.get(dataset)
        return 0 if answer is None else answer.request


class Patience(TypedDict, total=False):
    """Options of a master that say when a session is dead or stalled, with `Members`' defaults.

    Args:
        lease_timeout_s: how long it may be silent.
        grace_s: how long its stream may stay broken.
        progress_timeout_s: how long its loop may not move on while it holds leases; 0: for ever.
    """

    lease_timeout_s: float
    grace_s: float
    progress_timeout_s: float


class Members:
    """All sessions by id. A session is dead when it was silent too long, or when its stream stays broken.

    A member's `number` is never used again. Calls name it: one of before its session was given up and came
    back is refused, however late it comes.

    One whose loop does not move on for `progress_timeout_s` (0: never) is stalled: alive, and yet of no use.
    """

    def __init__(
        self, *, lease_timeout_s: float = 30.0, grace_s: float = 1.0, progress_timeout_s: float = 0.0
    ) -> None:
        self.lease_timeout_s = lease_timeout_s
        self.grace_s = grace_s
        self.progress_timeout_s = progress_timeout_s
        self.next_number = 1
        self.gaps: list[tuple[int, int]] = []  # numbers below the next one that were never given
        # Of members given up that had registered before the master started: dataset -> asked and reported.
        # Whatever they called since: a call may be one of before that was late, or is repeated.
        self.departed_members: dict[int, dict[str, tuple[int, int]]] = {}
        self._members: dict[str, Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Member]:
        return iter(tuple(self._members.values()))

    @property
    def heartbeat_s(self) -> float:
        """How often a session is asked for a heartbeat: several times before silence or standstill counts."""
        timeout_s = min(self.lease_timeout_s, self.progress_timeout_s or math.inf, LONGEST_TIMEOUT_S)
        return timeout_s / HEARTBEATS_PER_TIMEOUT

    def enter(self, session: str, worker_id: str, now: float) -> Member:
        """Add a session, or note that it is a member already. Returns the member."""
        if session not in self._members:
            self._members[session] = Member(session, worker_id, self.next_number, now)
            self.next_number += 1
        return self.heard(session, self._members[session].number, now)

    def take_up(self, session: str, worker_id: str, number: int, now: float) -> None:
        """Add a member of the journal, with the number that it has."""
        self._members[session] = Member(session, worker_id, number, now, journalled=True)

    def skip(self, count: int) -> None:
        """Never give the next `count` numbers: a lost future of this state may have given them."""
        first = self.next_number
        self.next_number += count
        if self.gaps and self.gaps[-1][1] == first:
            first, _ = self.gaps.pop()
        self.gaps.append((first, self.next_number))

    def may_have_given(self, number: int) -> bool:
        """Return whether the number may be that of a member, now or before."""
        return number < self.next_number and not any(first <= number < after for first, after in self.gaps)

    def get(self, session: str) -> Member | None:
        return self._members.get(session)

    def find(self, session: str, number: int) -> Member:
        """Return a member. Raises SessionLost for a session that is none, or not the one of this number."""
        member = self._members.get(session)
        if member is None:
            raise SessionLost(
                f"session {session!r} is not known to this master: it was released, or never registered"
            )
        if number != member.number:
            raise SessionLost(
                f"session {session!r} was given up and has registered again: it is member {member.number} "
                f"now, the call is of member {number}"
            )
        return member

    def heard(self, session: str, number: int, now: float) -> Member:
        """Note that a session called. Raises SessionLost like `find`.

        After its stream broke a call extends the grace and no more: it may have been on its way when the
        trainer died.
        """
        member = self.find(session, number)
        member.seen = now
        if member.gone_since is not None:
            member.gone_since = now
        return member

    def stream_opened(self, session: str, now: float) -> None:
        """Note that the session's stream stands (again)."""
        member = self._members.get(session)
        if member is not None:
            member.seen, member.gone_since = now, None

    def stream_broke(self, session: str, now: float) -> None:
        """Note that the session's stream ended without a goodbye: the grace begins."""
        member = self._members.get(session)
        if member is not None and member.gone_since is None:
            member.gone_since = now

    def resume(self, now: float) -> None:
        """Begin after a start of the master: every session has its full time to come back."""
        for member in self:
            member.seen = member.progressed = now
            member.gone_since = None

    def leave(self, session: str) -> Member | None:
        """Remove a session. If it calls after all, it may still prove that the journal went back."""
        member = self._members.pop(session, None)
        if member is not None and member.journalled:
            names = sorted(member.datasets)
            self.departed_members[member.number] = {
                name: (member.asked(name), member.reports.get(name, 0)) for name in names
            }
        return member

    def dead(self, now: float) -> tuple[Member, ...]:
        """Return members whose time is up at `now`."""
        return tuple(m for m in self._members.values() if self._deadline(m) <= now)

    def cause_of_death(self, member: Member) -> str:
        """Return why a member whose time is up is taken for dead."""
        if member.gone_since is not None:
            return f"its connection broke and did not come back within {self.grace_s:g} s"
        return f"it was silent for {self.lease_timeout_s:g} s"

    def next_deadline(self) -> float | None:
        """Return when the next session is dead if nothing more is heard of it."""
        return min(map(self._deadline, self._members.values()), default=None)

    def progress_deadline(self, member: Member) -> float:
        """Return when a member that holds leases is stalled if its loop does not move on before."""
        return member.progressed + (self.progress_timeout_s or math.inf)

    def _deadline(self, member: Member) -> float:
        deadline = member.seen + (self.lease_timeout_s if member.timeout_s is None else member.timeout_s)
        if member.gone_since is not None:
            deadline = min(deadline, member.gone_since + self.grace_s)
        return deadline

    def __repr__(self) -> str:
        return f"<Members n={len(self)}>"


WINDOW = 64  # batches of each session: what was before them counts half, then a quarter, …
ASKS = 8  # a trainer that let the others ask so often each has stopped waiting


class Throughput:
    """Throughput of the sessions of a dataset, one against another.

    A session that enters counts as fast as the others are on average, until it has trained on something.
    """

    def __init__(self) -> None:
        self._batch_sizes: dict[str, int] = {}
        self._recent: dict[str, float] = {}
        self._shown: dict[str, int] = {}
        self._sum = 0.0  # of `_recent`
        self._window = 0

    def enter(self, session: str, batch_size: int) -> None:
        """Add a session; what is known of one that is there already stays."""
        self._window += WINDOW * (batch_size - self._batch_sizes.get(session, 0))
        self._batch_sizes[session] = batch_size
        if session in self._recent:
            return
        recent = self._sum / len(self._recent) if self._recent else float(batch_size)
        self._recent[session], self._shown[session] = recent, 0
        self._sum += recent

    def leave(self, session: str) -> None:
        if session in self._recent:
            self._window -= WINDOW * self._batch_sizes.pop(session)
            self._sum -= self._recent.pop(session)
            del self._shown[session]

    def trained(self, session: str, records: int) -> None:
        """Count records that a session has trained on; one that does not take part is ignored."""
        if session not in self._recent:
            return
        self._recent[session] += records
        self._shown[session] += records
        self._sum += records
        if self._sum > self._window:
            self._recent = {each: max(1.0, recent / 2) for each, recent in self._recent.items()}
            self._sum = sum(self._recent.values())

    def share(self, session: str, records: int) -> float:
        """Return how many of `records` the session would train on if all went on as they did."""
        return records * self._recent[session] / self._sum

    def shown(self, session: str) -> int:
        """Return the records that the session has trained on since it entered; 0 for one that did not."""
        return self._shown.get(session, 0)

    def all_shown(self) -> dict[str, int]:
        """Return the same of all sessions."""
        return dict(self._shown)

    def __repr__(self) -> str:
        return f"<Throughput { ({session: round(recent) for session, recent in self._recent.items()}) }>"


class Participants:
    """Sessions of a dataset, by id. A session waits from when it `ask`s until it is `served` or gone."""

    def __init__(self, mark: Mark = unrecorded) -> None:
        self._mark = mark
        self.throughput = Throughput()
        self._batch_sizes: dict[str, int] = {}
        self._sizes: Counter[int] = Counter()  # batch size -> how many take part with it
        # Of those sent away empty: batch size -> session -> its last asking; the last entry is the latest.
        self._waiting: dict[int, dict[str, int]] = {}
        self._asked = 0

    def __len__(self) -> int:
        return len(self._batch_sizes)

    def batch_size(self, session: str) -> int | None:
        """Return the session's batch size; None when it does not take part."""
        return self._batch_sizes.get(session)

    @property
    def sessions(self) -> tuple[str, ...]:
        return tuple(self._batch_sizes)

    def enter(self, session: str, batch_size: int) -> None:
        """Add a session; entering again may change its batch size."""
        self._forget(session)
        self._batch_sizes[session] = batch_size
        self._sizes[batch_size] += 1
        self.throughput.enter(session, batch_size)
        self._mark("member", session)

    def leave(self, session: str) -> None:
        self._forget(session)
        self.throughput.leave(session)
        self._mark("member", session)

    def _forget(self, session: str) -> None:
        self.served(session)
        size = self._batch_sizes.pop(session, None)
        if size is not None:
            self._sizes[size] -= 1
            if not self._sizes[size]:
                del self._sizes[size]

    def ask(self, session: str) -> None:
        """Note that a session asks for records."""
        self._asked += 1
        waiting = self._waiting.setdefault(self._batch_sizes[session], {})
        waiting.pop(session, None)
        waiting[session] = self._asked

    def served(self, session: str) -> None:
        """Note that a session got what it asked for, or no longer asks."""
        size = self._batch_sizes.get(session, 0)
        waiting = self._waiting.get(size, {})
        if waiting.pop(session, None) is not None and not waiting:
            del self._waiting[size]

    def nobody_waits(self) -> None:
        """Forget which sessions wait: those that still do will ask again."""
        self._waiting.clear()

    def can_use(self, remainders: int) -> bool:
        """Return whether remainders are enough for a trainer that waits; while none does, for any trainer."""
        if not remainders:
            return False
        since = self._asked - ASKS * len(self._batch_sizes)
        # One for each batch size, not for each session: ten thousand may wait for the last records.
        asking = [size for size, asked in self._waiting.items() if next(reversed(asked.values())) > since]
        return remainders >= min(asking or self._sizes, default=1)

    def __repr__(self) -> str:
        return f"<Participants n={len(self)} waiting={sum(map(len, self._waiting.values()))}>"
