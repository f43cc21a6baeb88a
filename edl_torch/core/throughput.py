"""Relative throughput of sessions: what each has trained on of late, without a clock."""

from __future__ import annotations

WINDOW = 64  # batches of each session: what was before them counts half, then a quarter, …


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
        """Return the records that the session has trained on since it entered."""
        return self._shown[session]

    def __repr__(self) -> str:
        return f"<Throughput { ({session: round(recent) for session, recent in self._recent.items()}) }>"
