"""The notice that a trainer is to end soon, and what of it the loop may see.

Ranks that step together see it at the same step, with the votes. It does not know how votes travel.
"""

from __future__ import annotations

import logging

from edl_torch.system.termination import Termination, sigterm
from edl_torch.system.user_warnings import warn_user

log = logging.getLogger("edl_torch.client")


class Notice:
    """Whether this trainer was told to end soon.

    Args:
        together: whether it is one of several ranks that must see it at the same step.
        termination: the signal that is such a notice, from the first `is_to_end` on.
    """

    def __init__(self, *, together: bool, termination: Termination = sigterm) -> None:
        self._together = together
        self._termination = termination
        self._warned = False
        self._listens = False
        self._closed = False
        self._heard = False  # whether the signal had come when it was closed
        self._given = False
        self._agreed = False
        self.seen = False  # whether the program was told, by `is_to_end`

    def __repr__(self) -> str:
        return f"<Notice came={self.came} shown={self._shown}>"

    def give(self) -> None:
        """Tell this trainer to end soon. For signal handlers too: takes no lock, and says nothing."""
        self._given = True

    @property
    def came(self) -> bool:
        """Whether this trainer was told, itself."""
        return self._given or self._signalled

    @property
    def _signalled(self) -> bool:
        return self._heard or (self._listens and self._termination.came)

    def agree(self) -> None:
        """Note that a vote has told all ranks that one of them is to end soon."""
        self._agreed = True

    @property
    def _shown(self) -> bool:
        return self._agreed if self._together else self.came

    def is_to_end(self) -> bool:
        """Whether the program is to end. The first call begins to listen for the signal."""
        if not (self._listens or self._closed):
            self._listens = self._termination.listen(self)
            if not (self._listens or self._warned or self._termination.is_handled):
                self._warned = True
                warn_user(
                    "loader.preempted is read outside of the main thread, where Python allows no signal "
                    "handlers: SIGTERM still ends this process at once. Read it once in the main thread, "
                    "before the loop, or install there what gives the notice: "
                    "signal.signal(signal.SIGTERM, lambda *_: loader.preempt())"
                )
        if self._shown and not self.seen:
            self.seen = True
            log.warning(
                "this trainer is to end soon (%s): loader.preempted is true. Another SIGTERM ends it as ever",
                "SIGTERM" if self._signalled else "preempt()" if self._given else "a notice to another rank",
            )
        return self._shown

    def close(self) -> None:
        """Listen no more. What came is still known."""
        self._heard = self._signalled
        self._closed = True
        if self._listens:
            self._listens = False
            self._termination.leave(self)
