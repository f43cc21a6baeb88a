"""Batches that a wrapper has read and not passed on to its loop, for what depends on the batch in training.

It knows their sizes alone; what may be acknowledged is the trainer's to say.
"""

from __future__ import annotations

from collections import deque

from edl_torch.data.padding import Statistics
from edl_torch.data.weights import Weights


class ReadAhead:
    """The numbers of records of batches that were read ahead, oldest first; 0 for a padding batch."""

    def __init__(self, weights: Weights, statistics: Statistics) -> None:
        self._weights = weights
        self._statistics = statistics
        self._sizes: deque[int] = deque()

    def __repr__(self) -> str:
        return f"<ReadAhead {list(self._sizes)}>"

    def __len__(self) -> int:
        return len(self._sizes)

    def step(self, own: int) -> None:
        """Note that a batch of `own` records was read."""
        self._sizes.append(own)

    def warn_of_padding(self) -> None:
        """Do as `Weights.warn_of_padding`."""
        self._weights.warn_of_padding()

    def passed_on(self) -> bool:
        """The oldest goes to the loop. Returns whether it holds records of its own, or none is left."""
        self._statistics.let_go()
        if not self._sizes:
            return True
        own = self._sizes.popleft()
        self._weights.step(own)
        if not own:
            self._statistics.keep()
        return own > 0

    def clear(self) -> None:
        """Another pass begins: what was read and not passed on comes again."""
        self._statistics.let_go()
        self._sizes.clear()
