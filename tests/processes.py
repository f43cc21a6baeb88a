"""Ports for processes that tests start, whether such a process lives, and channels to none.

It must not know what runs in them.
"""

from __future__ import annotations

import os
import random
import socket
from dataclasses import dataclass, field
from pathlib import Path

from edl_torch.system.address import HostPort

_WORKERS = 16  # of pytest, beside each other: each has ports of its own
_given: set[int] = set()


def quiet_port() -> int:
    """A new free port that no outgoing connection gets: it stays its owner's while that is down."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    while True:
        port = random.SystemRandom().randrange(20_000 + worker, 32_000, _WORKERS)
        if port in _given:
            continue
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        _given.add(port)
        return port


def alive(pid: int) -> bool:
    """Whether the process is there, and has not ended. Needs /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


# Channels that lead nowhere -------------------------------------------------------------------------------


@dataclass
class Nowhere:
    """What a `Caller` asks of its channel. `wrong` is what is wrong with the address, each time; then ''."""

    wrong: list[str] = field(default_factory=list)
    address: HostPort = field(default_factory=lambda: HostPort("m", 1))

    def explain(self, timeout_s: float) -> str:
        return self.wrong.pop(0) if self.wrong else ""
