"""Count of the shards in progress: those with slices that are lent, or wait after they came back."""

from __future__ import annotations


class ShardsInProgress:
    """Shards by epoch and number, each counted once however many of its slices are in progress."""

    __slots__ = ("_slices",)

    def __init__(self) -> None:
        self._slices: dict[tuple[int, int], int] = {}  # (epoch, shard) -> slices of it, 1 or more

    def __len__(self) -> int:
        return len(self._slices)

    def __contains__(self, shard: object) -> bool:
        """Return whether a pair of epoch and number is one of them."""
        return shard in self._slices

    def enter(self, epoch: int, shard: int) -> None:
        """Add a slice of the shard: it is lent, or came back."""
        key = epoch, shard
        self._slices[key] = self._slices.get(key, 0) + 1

    def leave(self, epoch: int, shard: int) -> None:
        """Remove a slice of the shard."""
        key = epoch, shard
        slices = self._slices[key]
        if slices > 1:
            self._slices[key] = slices - 1
        else:
            del self._slices[key]

    def __repr__(self) -> str:
        return f"<ShardsInProgress n={len(self)}>"
