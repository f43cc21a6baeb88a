"""How sure a trainer may be that the master still counts on it, and so that its leases are its own.

Pure bookkeeping under a lock: who keeps the stream and the heartbeat writes it, the training loop reads it.
It must not know leases, nor how the master is reached.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

SURE_PART = 2 / 3  # of the lease timeout: the rest is for clocks that run unlike
MOVING_PART = 1 / 3  # of the progress timeout: the master hears of a move only with the next heartbeat


def suspended_clock() -> float:
    """Seconds on a clock that goes on while the machine sleeps, where the system has one."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class Presence:
    """One session's presence. Sure while its stream stands and a young heartbeat of its was answered.

    Whatever breaks that raises a *doubt*, which a heartbeat does not remove: the leases must be confirmed.
    A call counts from when it was made, not from its answer, so that a stop between the two counts in full.
    """

    def __init__(self, clock: Callable[[], float] = suspended_clock) -> None:
        self.clock = clock
        self.member = 0  # as which heartbeats are sent
        self.progress = 0  # how often the training loop has moved on; heartbeats carry it
        self._changed = threading.Condition()
        self._standing = False
        self._doubts = 0
        self._settled = 0
        self._sure_for_s = 0.0
        self._sure_until = -math.inf
        self._stall_s = math.inf
        self._moved_at = clock()

    @property
    def sure(self) -> bool:
        """Whether the leases are this trainer's beyond doubt. Asked for each batch: takes no lock."""
        return self._settled == self._doubts and self.clock() < self._sure_until

    @property
    def standing(self) -> bool:
        """Whether the stream stands."""
        return self._standing

    # Who keeps the stream -------------------------------------------------------------------------------

    def stood(self, asked_at: float, *, lease_timeout_s: float, progress_timeout_s: float = 0.0) -> None:
        """The stream, asked for at `asked_at`, stands."""
        with self._changed:
            self._standing = True
            self._sure_for_s = SURE_PART * lease_timeout_s
            self._stall_s = MOVING_PART * progress_timeout_s or math.inf
            self._extend(asked_at)
            self._changed.notify_all()

    def broke(self) -> None:
        """The stream does not stand any more."""
        with self._changed:
            if self._standing:
                self._standing = False
                self._doubts += 1

    def answered(self, asked_at: float) -> None:
        """The master answered a heartbeat, or the like, that was sent at `asked_at`."""
        with self._changed:
            self._extend(asked_at)

    def doubt(self) -> None:
        """The master does not know the session, or was not asked about all that it holds."""
        with self._changed:
            self._doubts += 1

    def _extend(self, asked_at: float) -> None:
        self._sure_until = max(self._sure_until, asked_at + self._sure_for_s)

    # Who trains -----------------------------------------------------------------------------------------

    def moved_on(self) -> None:
        """The training loop asks for a batch, or is done with one. Long after the last time, the master may
        have taken the leases for want of progress."""
        now = self.clock()
        if now >= self._moved_at + self._stall_s:
            with self._changed:
                self._doubts += 1
        self._moved_at = now
        self.progress += 1

    def wait_standing(self, timeout_s: float) -> bool:
        """Wait for the stream."""
        with self._changed:
            return self._changed.wait_for(lambda: self._standing, timeout_s)

    @property
    def doubts(self) -> int:
        """A mark to be taken before leases are presented: what happens later is not settled by the answer."""
        return self._doubts

    def confirmed(self, doubts: int, asked_at: float) -> None:
        """The leases were presented at `asked_at`, with so many doubts, and the void ones are forgotten."""
        with self._changed:
            self._settled = max(doubts, self._settled)
            self._extend(asked_at)

    def __repr__(self) -> str:
        return (
            f"<Presence {'sure' if self.sure else 'unsure'} standing={self._standing} doubts={self._doubts}>"
        )
