"""Windows of shards in progress: those with slices that are lent, or wait after they came back."""

from __future__ import annotations

from collections.abc import Iterator


class WindowsInProgress:
    """Windows by epoch and number, each counted once however many of its slices are in progress."""

    __slots__ = ("_slices",)

    def __init__(self) -> None:
        self._slices: dict[tuple[int, int], int] = {}  # (epoch, window) -> slices of it, 1 or more

    def __len__(self) -> int:
        return len(self._slices)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Return epoch and number of each."""
        return iter(self._slices)

    def __contains__(self, window: object) -> bool:
        """Return whether a pair of epoch and number is one of them."""
        return window in self._slices

    def enter(self, epoch: int, window: int) -> None:
        """Add a slice of the window: it is lent, or came back."""
        key = epoch, window
        self._slices[key] = self._slices.get(key, 0) + 1

    def leave(self, epoch: int, window: int) -> None:
        """Remove a slice of the window."""
        key = epoch, window
        slices = self._slices[key]
        if slices > 1:
            self._slices[key] = slices - 1
        else:
            del self._slices[key]

    def __repr__(self) -> str:
        return f"<WindowsInProgress n={len(self)}>"
