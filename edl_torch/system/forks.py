"""What forked children do with what they inherit: connections to a master, and what grpc.aio left behind.

A child inherits every socket. While it lives the kernel keeps the connection open, and the master could
not see that the trainer itself was killed. So each child drops, right after the fork, what is connected to a
guarded master. It must not know grpc: sockets are found by their peer.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
import weakref
from functools import cache
from pathlib import Path

from edl_torch.system.address import Address, HostPort, plain_ip

_FD_FOLDERS = (Path("/proc/self/fd"), Path("/dev/fd"))


class ForkGuard:
    """While alive: children forked from this process do not keep connections to `master` open."""

    def __init__(self, master: HostPort) -> None:
        self._master = master
        self.addresses: frozenset[Address] = frozenset()
        self.refresh()
        _guards.add(self)

    def refresh(self) -> None:
        """Look the name up (again): call at each new connection. Earlier addresses stay guarded."""
        try:
            self.addresses |= self._master.resolve()
        except OSError:
            return  # without an address there will be no connection either

    def covers(self, address: Address, port: int) -> bool:
        """Whether a socket with this peer belongs to the master's connection."""
        return port == self._master.port and address in self.addresses

    def release(self) -> None:
        """Guard no longer."""
        _guards.discard(self)

    def __repr__(self) -> str:
        return f"<ForkGuard {self._master} addresses={sorted(map(str, self.addresses))}>"


# Of the process, as fork handlers are: they can be registered once and never taken back.
_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()


def drop_inherited_connections() -> None:
    """In a forked child: let go of every connection to a guarded master, without a word to the master.

    The descriptors stay taken (by the null device), so that a late close by the library that opened them
    cannot hit a file of the child. `shutdown` would end the trainer's own connection; close does not.
    """
    guards = tuple(_guards)
    if not guards:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for number in _open_descriptors():
            peer = _tcp_peer(number)
            if peer is not None and any(guard.covers(*peer) for guard in guards):
                os.dup2(null, number, inheritable=False)
    finally:
        os.close(null)


def _open_descriptors() -> list[int]:
    for folder in _FD_FOLDERS:
        try:
            return [int(name) for name in os.listdir(folder)]
        except OSError:
            continue
    return []


def _tcp_peer(number: int) -> tuple[Address, int] | None:
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        borrowed = socket.socket(fileno=number)
    except OSError:
        return None
    try:
        if borrowed.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        peer = borrowed.getpeername()
        return plain_ip(peer[0]), int(peer[1])
    except OSError:
        return None  # not connected
    finally:
        borrowed.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=drop_inherited_connections)


@cache  # fork handlers are the process's, and cannot be taken back
def keep_children_alive() -> None:
    """From now on children of this process leave alone what their parent had thrown away.

    For a process that serves or has served with grpc.aio. What that leaves behind joins, when it is
    collected, a thread that no child has, over and over: a child whose garbage collector found it would never
    do anything else.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)
