"""The sessions of this process, for one that waits for records which another of them may hold."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from edl_torch.trainer.actions import Neighbour

if TYPE_CHECKING:
    from edl_torch.client.session import Session


class Sessions:
    """Every session that this process has made and that still exists.

    Without a lock, which a fork could leave taken: each change and each copy of the set is one step of
    Python's.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._alive: set[weakref.ref[Session]] = set()

    def __repr__(self) -> str:
        return f"<Sessions {len(self._alive)}>"

    def add(self, session: Session) -> None:
        """Take note of a session."""
        if self._pid != os.getpid():  # a forked child: it has copies of its parent's
            self._pid, self._alive = os.getpid(), set()
        self._alive.add(weakref.ref(session, self._alive.discard))

    def alive(self) -> list[Session]:
        """Return every session that still exists."""
        return [session for reference in list(self._alive) if (session := reference()) is not None]

    def neighbours(self, session: Session) -> tuple[Neighbour, ...]:
        """Return the others whose loops have records of the same dataset, read or to be read.

        Not what they give back by themselves when they hear that somebody waits.
        """
        thread = threading.get_ident()
        found = [
            Neighbour(session=other.id, records=other.drawn_records, same_thread=other.loop_thread == thread)
            for other in self.alive()
            if other is not session and not (other.closed or other.cut) and other.shares_data(session)
        ]
        return tuple([one for one in found if one.records])


# Of the process: two loops of one thread know nothing of each other.
sessions = Sessions()
