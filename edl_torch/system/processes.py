"""Processes of this machine: those that end when another one has ended, and what forked children inherit.

It must not know what any of them does.

A child inherits every socket. While it lives the kernel keeps the connection open, and the master could
not see that the trainer itself was killed. So each child drops, right after the fork, what is connected to a
guarded master. It must not know grpc: sockets are found by their peer.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import socket
import stat
import threading
import time
import weakref
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar

from edl_torch.system.address import Address, HostPort, plain_ip

LOOK_S = 0.5  # where the system has no pidfd
PATIENCE_S = 8.0  # for an end of its own: torch looks every 5 s


def until_gone(pid: int) -> None:
    """Return once the process `pid` has ended; at once where there is none."""
    try:
        number = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not Linux; a kernel before 5.3; a sandbox that forbids it
        _poll_until_gone(pid)
        return
    try:
        poll = select.poll()
        poll.register(number, select.POLLIN)
        poll.poll()
    finally:
        os.close(number)


def _poll_until_gone(pid: int) -> None:
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        except PermissionError:  # it lives, under another user
            pass
        time.sleep(LOOK_S)


def end_with_parent() -> None:
    """End this process, a child made with `multiprocessing`, at the latest some seconds after its parent.

    A loader worker of torch would leave its loop, and then wait for ever to be rid of a batch that nobody
    takes: where the pipe is full, and other workers hold the end that is read.
    """
    parent = multiprocessing.parent_process()  # under forkserver too
    if parent is None or parent.pid is None:
        return

    def watch(pid: int = parent.pid) -> None:
        until_gone(pid)  # `parent.is_alive()` would not tell: children forked later hold that sign of life
        time.sleep(PATIENCE_S)
        os._exit(1)

    threading.Thread(target=watch, name="edl-orphan", daemon=True).start()


# What forked children do with what they inherit -------------------------------------------------------

T = TypeVar("T")

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


class OfThisProcess(Generic[T]):
    """Every object of a kind that this process has made and that still exists.

    Without a lock, which a fork could leave taken: each change and each copy of the set is one step of
    Python's.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._references: set[weakref.ref[T]] = set()

    def add(self, one: T) -> None:
        """Take note of one."""
        if self._pid != os.getpid():  # a forked child: it has copies of its parent's
            self._pid, self._references = os.getpid(), set()
        self._references.add(weakref.ref(one, self._references.discard))

    def alive(self) -> list[T]:
        """Return them all; none in a forked child, which has copies."""
        if self._pid != os.getpid():
            return []
        return [one for reference in list(self._references) if (one := reference()) is not None]
