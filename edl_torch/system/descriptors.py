"""The files that this process may have open, and how many of them its callers may take.

Each connection is one. A process without any left can neither accept a connection nor open a file of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import time
from collections.abc import Callable

FILES = 1 << 17  # a file for each trainer of `core.limits`, and some
OWN_FILES = 64  # the journal, logs, what listens
PEOPLE = 256  # connections of the page
SILENT_S = 10  # that a connection may say nothing when it is new
IDLE_S = 600  # that it may have no call; grpc tells its caller of it in a line
SAY_S = 60.0


def raise_limit() -> None:
    """Raise the limit of open files as far as the system allows.

    Many systems give 1024 to who does not ask for more.
    """
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if most == resource.RLIM_INFINITY else min(FILES, most)
    if least != resource.RLIM_INFINITY and least < wanted:
        with contextlib.suppress(OSError, ValueError):  # more than the system has
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def limit() -> int:
    """Return how many files may be open."""
    least, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FILES if least == resource.RLIM_INFINITY else min(FILES, least)


def in_use() -> int:
    """Return about how many files are open: the lowest free number."""
    try:
        free = os.dup(2)
    except OSError:
        return limit()
    os.close(free)
    return free


def connections(port: int = 0) -> int:
    """Return how many connections a port may have that needs no more than `port`, or one that takes the rest.

    Half of all files are for trainers at least; a port for people or probes has a sixteenth at most.
    """
    files = limit()
    if port:
        return max(1, min(port, files // 16))
    return max(files // 2, files - 2 * connections(PEOPLE) - OWN_FILES)


def bounded(most: int) -> list[tuple[str, int]]:
    """Return the options of a grpc server that has so many connections at most, and none that are silent.

    A trainer is never idle: its stream is a call that goes on.
    """
    return [
        ("grpc.max_allowed_incoming_connections", most),
        ("grpc.server_handshake_timeout_ms", SILENT_S * 1000),  # also of the first frame without TLS
        ("grpc.max_connection_idle_ms", IDLE_S * 1000),
    ]


class Seldom:
    """Whether something that may come thousands of times a second is to be said: once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said_at = -math.inf

    def __call__(self) -> bool:
        now = self._clock()
        if now - self._said_at < SAY_S:
            return False
        self._said_at = now
        return True
