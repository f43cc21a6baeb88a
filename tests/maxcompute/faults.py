"""What goes wrong, and when: planned by the test, request by request; nothing here is random.

Operations of the service: `tenant`, `table`, `partitions`, `partition`, `tunnel`; of the tunnel: `session`,
`reload`, `data`.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fail:
    """An error in the place of an answer, as the service words it."""

    status: int = 503
    code: str = "ServiceUnavailable"
    message: str = "Service is temporarily unavailable"
    html: bool = False  # as a proxy on the way words it


@dataclass(frozen=True, slots=True)
class Refuse:
    """The connection is closed without an answer."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The body ends after so many bytes; `clean`: as if that were its proper end."""

    after: int
    clean: bool = False


@dataclass(frozen=True, slots=True)
class Corrupt:
    """One bit of the byte at this place of the body is turned over (from the end where negative)."""

    at: int


@dataclass(frozen=True, slots=True)
class Rows:
    """So many rows are sent, fewer or more than were asked for, in a body that is whole in itself.

    With fewer it is what a cut at the border of a chunk and a message looks like: no checksum misses them.
    """

    count: int


@dataclass(frozen=True, slots=True)
class Hold:
    """The body stops after so many bytes until `go` is set; `reached` says that it has come so far."""

    after: int = 0
    go: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)


Fault = Fail | Refuse | Cut | Corrupt | Rows | Hold


class Faults:
    """Planned faults by operation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: dict[str, deque[Fault | None]] = {}
        self._lasting: dict[str, Fault] = {}
        self._holds: list[Hold] = []

    def plan(self, operation: str, *faults: Fault | None) -> None:
        """The next requests suffer these faults, one each; None is a request without a fault."""
        with self._lock:
            self._planned.setdefault(operation, deque()).extend(faults)
            self._note(*faults)

    def always(self, operation: str, fault: Fault | None) -> None:
        """Every request that has no planned fault suffers this one; None ends that."""
        with self._lock:
            self._lasting.pop(operation, None)
            if fault is not None:
                self._lasting[operation] = fault
                self._note(fault)

    def next(self, operation: str) -> Fault | None:
        """The fault of the request that is made now."""
        with self._lock:
            planned = self._planned.get(operation)
            return planned.popleft() if planned else self._lasting.get(operation)

    def let_go(self) -> None:
        """End all holds."""
        with self._lock:
            for hold in self._holds:
                hold.go.set()

    def _note(self, *faults: Fault | None) -> None:
        self._holds.extend(fault for fault in faults if isinstance(fault, Hold))

    def __repr__(self) -> str:
        planned = {name: len(faults) for name, faults in self._planned.items() if faults}
        return f"<Faults planned={planned} always={sorted(self._lasting)}>"
