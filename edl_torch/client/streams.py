"""Reading processes that died in the middle of a pass, and which records they held.

It knows the book and the plan, so as to name the records; what becomes of them is not decided here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from edl_torch.client.leases import LeaseSource
from edl_torch.client.tickets import Book
from edl_torch.core.plan import Plan
from edl_torch.shard import Shard

log = logging.getLogger("edl_torch.client")


class BrokenStreams:
    """The streams that died in this pass, and the records that they were at."""

    def __init__(self, book: Book, leases: LeaseSource, plan: Callable[[], Plan]) -> None:
        self._book = book
        self._leases = leases
        self._plan = plan
        self._hung_up = threading.Condition(book.lock)
        self._broken: dict[str, str] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<BrokenStreams {self._broken}>"

    def clear(self) -> None:
        """Another pass begins."""
        self._broken.clear()

    def broke(self, stream: str) -> None:
        """A reading process hung up. While its pass is open that means that it died."""
        if not self._leases.is_open:
            return
        plan = self._plan()  # before the lock: it may be joining anew, for which the book must be free
        with self._hung_up:
            if self._leases.is_open and not self._closed:
                self._broken.setdefault(stream, self._whereabouts(plan, stream))
                log.warning("loader %s ended before its pass: %s", stream, self._broken[stream])
            self._hung_up.notify_all()

    def _whereabouts(self, plan: Plan, stream: str) -> str:
        shards = [plan.shard(part) for part in self._book.unhanded(stream)]
        *before, at = map(describe_shard, shards) if shards else ("no record",)
        return f"{at} (before them {', '.join(before)}, not delivered yet)" if before else at

    def wait(self, timeout_s: float) -> dict[str, str]:
        """Reading processes of this pass that died, and what they were at; waits for the first to be seen."""
        with self._hung_up:
            self._hung_up.wait_for(lambda: self._broken, timeout_s)
            return dict(self._broken)

    def close(self) -> None:
        """The session ends: whoever hangs up from now on did not die."""
        self._closed = True


def describe_shard(shard: Shard) -> str:
    """The shard's records, for people."""
    some = "some of " if shard.shuffled else ""
    return f"{some}records {shard.start} to {shard.end - 1} of {shard.name!r}"
