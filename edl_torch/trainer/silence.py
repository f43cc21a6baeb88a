"""When a wait is logged: after a few seconds, then every minute."""

from __future__ import annotations

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
