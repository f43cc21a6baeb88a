"""How sure a trainer may be that the master still counts on it; and when a wait for the master is logged."""

from __future__ import annotations

import math

SURE_PART = 2 / 3  # of the lease timeout: the rest is for clocks that run unlike
MOVING_PART = 1 / 3  # of the progress timeout: the master hears of progress only with the next heartbeat


class Liveness:
    """One session's liveness, in seconds of a clock that counts suspended time.

    Sure while its stream stands and a recent heartbeat was answered. Whatever breaks that raises a *doubt*,
    which a heartbeat does not remove: the leases must be presented. A call counts from when it was made, not
    from its answer, so that a stop between the two counts in full.
    """

    def __init__(self) -> None:
        self.member: int  # as which heartbeats are sent, once the trainer is registered
        self.progress = 0  # how often the training loop has moved on; heartbeats carry it
        self.standing = False  # whether the stream stands
        self.doubts = 0  # a mark to be taken before leases are presented
        self.presented = 0  # how often leases were
        self._settled = 0
        self._sure_for_s = 0.0
        self._sure_until = -math.inf
        self._stall_s = math.inf
        self._moved_at = math.inf  # nothing rests before the session is attended

    def __repr__(self) -> str:
        return f"<Liveness standing={self.standing} doubts={self.doubts - self._settled}>"

    def sure(self, now: float) -> bool:
        """Whether the leases are this trainer's beyond doubt."""
        return self._settled == self.doubts and now < self._sure_until

    # What keeps the stream and the heartbeat says ---------------------------------------------------------

    def stood(self, asked_at: float, *, lease_timeout_s: float, progress_timeout_s: float = 0.0) -> None:
        """Note that the stream, asked for at `asked_at`, stands."""
        self.standing = True
        self._sure_for_s = SURE_PART * lease_timeout_s
        self._stall_s = MOVING_PART * progress_timeout_s or math.inf
        self.answered(asked_at)

    def broke(self) -> None:
        """Note that the stream does not stand any more."""
        if self.standing:
            self.standing = False
            self.doubts += 1

    def answered(self, asked_at: float) -> None:
        """Note that the master answered a heartbeat, or the like, that was sent at `asked_at`."""
        self._sure_until = max(self._sure_until, asked_at + self._sure_for_s)

    def doubt(self) -> None:
        """Note that the master does not know the session, or was not asked about all that it holds."""
        self.doubts += 1

    def begin(self, now: float) -> None:
        """Note that the session is attended from now on."""
        self._moved_at = now

    # What the trainer says --------------------------------------------------------------------------------

    def moved_on(self, now: float) -> None:
        """Note that the training loop asks for a batch, or is done with one.

        Long after the last time, the master may have taken the leases for want of progress.
        """
        if now >= self._moved_at + self._stall_s:
            self.doubts += 1
        self._moved_at = now
        self.progress += 1

    def confirmed(self, doubts: int, asked_at: float) -> None:
        """Note that leases were presented at `asked_at`, with so many doubts; the void ones are gone."""
        self._settled = max(doubts, self._settled)
        self.answered(asked_at)


FIRST_S = 5.0
AGAIN_S = 60.0


class WaitLogSchedule:
    """A schedule of messages about one wait."""

    def __init__(self) -> None:
        self.due_s = FIRST_S  # how long a wait may last before the next message

    def __repr__(self) -> str:
        return f"<WaitLogSchedule due_s={self.due_s:g}>"

    def is_due(self, waited_s: float) -> bool:
        """Return whether a message is due after so many seconds; the next one is due a minute later."""
        if waited_s < self.due_s:
            return False
        self.due_s = waited_s + AGAIN_S
        return True

    def end(self) -> None:
        """Note that the wait is over."""
        self.due_s = FIRST_S
