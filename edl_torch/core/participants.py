"""Who takes part in a dataset, with which batch size, and who waits for its records.

Knows no leases, and not whether a session is alive; it is told who comes, asks, is served and goes.
"""

from __future__ import annotations

from edl_torch.core.changes import Mark, unrecorded

LOOKS = 8  # a trainer that let the others ask so often each has stopped waiting


class Participants:
    """Sessions by id. One waits from a `look` that found nothing until it is `served` or gone."""

    def __init__(self, mark: Mark = unrecorded) -> None:
        self._mark = mark
        self._batch_sizes: dict[str, int] = {}
        self._waiting: dict[str, int] = {}  # session -> its last look, while it is sent away empty
        self._looks = 0

    def __len__(self) -> int:
        return len(self._batch_sizes)

    def batch_size(self, session: str) -> int | None:
        """The session's batch size; None when it does not take part."""
        return self._batch_sizes.get(session)

    @property
    def sessions(self) -> tuple[str, ...]:
        """All of them."""
        return tuple(self._batch_sizes)

    def enter(self, session: str, batch_size: int) -> None:
        """A session takes part; entering again may change its batch size."""
        self._batch_sizes[session] = batch_size
        self._mark("member", session)

    def leave(self, session: str) -> None:
        """A session is gone."""
        self._batch_sizes.pop(session, None)
        self._waiting.pop(session, None)
        self._mark("member", session)

    def look(self, session: str) -> None:
        """A session asks for records."""
        self._looks += 1
        self._waiting[session] = self._looks

    def served(self, session: str) -> None:
        """A session got what it asked for, or no longer asks."""
        self._waiting.pop(session, None)

    def nobody_waits(self) -> None:
        """Those that still do will ask again."""
        self._waiting.clear()

    def can_use(self, crumbs: int) -> bool:
        """Whether crumbs are enough for a trainer that waits and still asks; while none does, for any."""
        if not crumbs:
            return False
        since = self._looks - LOOKS * len(self._batch_sizes)
        sizes = [self._batch_sizes[session] for session, look in self._waiting.items() if look > since]
        return crumbs >= min(sizes or self._batch_sizes.values(), default=1)

    def __repr__(self) -> str:
        return f"<Participants n={len(self)} waiting={len(self._waiting)}>"
