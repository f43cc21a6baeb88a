"""Sessions that take part in a dataset: how fast each is, its batch size, and which wait for records.

Throughput is what each has trained on of late, one against another: there is no clock.
"""

from __future__ import annotations

from collections import Counter

from edl_torch.core.changes import Mark, unrecorded

WINDOW = 64  # batches of each session: what was before them counts half, then a quarter, …
LOOKS = 8  # a trainer that let the others ask so often each has stopped waiting


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
        """Remove a session."""
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
    """Sessions of a dataset, by id. A session waits from a `look` until it is `served` or gone."""

    def __init__(self, mark: Mark = unrecorded) -> None:
        self._mark = mark
        self.throughput = Throughput()
        self._batch_sizes: dict[str, int] = {}
        self._sizes: Counter[int] = Counter()  # batch size -> how many take part with it
        # Of those sent away empty: batch size -> session -> its last look; the last entry is the latest.
        self._waiting: dict[int, dict[str, int]] = {}
        self._looks = 0

    def __len__(self) -> int:
        return len(self._batch_sizes)

    def batch_size(self, session: str) -> int | None:
        """Return the session's batch size; None when it does not take part."""
        return self._batch_sizes.get(session)

    @property
    def sessions(self) -> tuple[str, ...]:
        """All sessions."""
        return tuple(self._batch_sizes)

    def enter(self, session: str, batch_size: int) -> None:
        """Add a session; entering again may change its batch size."""
        self._forget(session)
        self._batch_sizes[session] = batch_size
        self._sizes[batch_size] += 1
        self.throughput.enter(session, batch_size)
        self._mark("member", session)

    def leave(self, session: str) -> None:
        """Remove a session."""
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

    def look(self, session: str) -> None:
        """Note that a session asks for records."""
        self._looks += 1
        waiting = self._waiting.setdefault(self._batch_sizes[session], {})
        waiting.pop(session, None)
        waiting[session] = self._looks

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
        since = self._looks - LOOKS * len(self._batch_sizes)
        # One look for each batch size, not for each session: ten thousand may wait for the last records.
        asking = [size for size, looks in self._waiting.items() if next(reversed(looks.values())) > since]
        return remainders >= min(asking or self._sizes, default=1)

    def __repr__(self) -> str:
        return f"<Participants n={len(self)} waiting={sum(map(len, self._waiting.values()))}>"
