"""Locks that know what their thread holds: potential deadlocks are found though none happens.

Every lock, condition and event that modules of the package make is replaced by a checked one, named by where
it is made. At each acquisition the locks that the thread holds are noted as taken before it; a cycle among
these notes is two threads that may wait for each other. A lock awaited, or a condition, while the same thread
holds another is noted too, and so is a finaliser that takes any lock: the garbage collector runs it at any
allocation, whatever is held.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import pkgutil
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import edl_torch

_ENDLESS = -1.0


class LockOrderViolated(AssertionError):
    """What the checked locks have seen; says it with stacks."""


class Watch:
    """All checked locks of a test, and what was seen of them.

    `collects` runs the garbage collector at each acquisition, with the lock held. `before_acquiring` and
    `on_acquired` are called with the lock's name and the names of those that the thread held before.
    """

    def __init__(self, *, collects: bool = False) -> None:
        self.collects = collects
        self.on_acquired: Callable[[str, tuple[str, ...]], None] = lambda name, held: None
        self.before_acquiring: Callable[[str, tuple[str, ...]], None] = lambda name, held: None
        self.names: set[str] = set()
        self.acquisitions = 0
        self.faults: list[str] = []
        self._stacks: dict[tuple[str, str], str] = {}
        self._mine = threading.local()
        self._guard = threading.Lock()
        self._pid = os.getpid()

    # What the thread holds --------------------------------------------------------------------------------

    @property
    def held(self) -> list[CheckedLock]:
        """The locks of this thread, each as often as it has it, in the order of acquisition."""
        if not hasattr(self._mine, "held"):
            self._mine.held = []
        held: list[CheckedLock] = self._mine.held
        return held

    @property
    def _finalising(self) -> bool:
        return getattr(self._mine, "finalising", False)

    @contextmanager
    def as_finaliser(self) -> Iterator[None]:
        """What runs in the block may be run by the garbage collector, at any allocation of any thread."""
        before = self._finalising
        self._mine.finalising = True
        try:
            yield
        finally:
            self._mine.finalising = before

    @property
    def counts(self) -> bool:
        """Whether this is the test's own process, and not a loader worker that was forked from it."""
        return os.getpid() == self._pid

    # What locks tell --------------------------------------------------------------------------------------

    def acquiring(self, lock: CheckedLock) -> None:
        held = self.held
        if self._finalising:
            self._fault(f"a finaliser takes {lock.name} while its thread holds {names(held)}")
        if lock in held:
            if not lock.reentrant:
                self._fault(f"{lock.name} is taken again by the thread that holds it")
                raise LockOrderViolated(self.faults[-1])
            return
        self.before_acquiring(lock.name, names(held))
        for other in held:
            self._note(other, lock)

    def acquired(self, lock: CheckedLock) -> None:
        held = names(self.held)
        self.held.append(lock)
        self.names.add(lock.name)
        self.acquisitions += 1
        if lock.name not in held:
            self.on_acquired(lock.name, held)
        if self.collects and not self._finalising:
            with self.as_finaliser():
                gc.collect()

    def awaited(self, lock: CheckedLock) -> None:
        """The thread waits for another one to notify this lock's condition."""
        others = [other for other in self.held if other is not lock]
        if others:
            self._fault(f"{lock.name} is awaited while the thread holds {names(others)}")

    def _note(self, first: CheckedLock, then: CheckedLock) -> None:
        pair = (first.name, then.name)
        if pair not in self._stacks:
            with self._guard:
                self._stacks.setdefault(pair, _stack())

    def _fault(self, what: str) -> None:
        self.faults.append(f"{what}\n{_stack()}")

    # The verdict ------------------------------------------------------------------------------------------

    @property
    def order(self) -> set[tuple[str, str]]:
        """Which lock was taken while which was held: pairs (held, taken)."""
        return set(self._stacks)

    def check(self) -> None:
        """Raise LockOrderViolated for a cycle, or anything else that was seen."""
        found = list(self.faults)
        cycle = find_cycle(self.order)
        if cycle:
            found.append(f"the order of locks has a cycle: {' → '.join(cycle)}")
            found += [f"{b} was taken under {a} here:\n{self._stacks[a, b]}" for a, b in pairwise(cycle)]
        if found:
            raise LockOrderViolated("\n".join(dict.fromkeys(found)))


def names(locks: list[CheckedLock]) -> tuple[str, ...]:
    """Their names, each once."""
    return tuple(dict.fromkeys(lock.name for lock in locks))


def find_cycle(pairs: set[tuple[str, str]]) -> list[str]:
    """A way from a lock back to itself, first and last item of the list; empty where there is none."""
    after: dict[str, set[str]] = {}
    for first, then in pairs:
        after.setdefault(first, set()).add(then)

    def walk(path: list[str]) -> list[str]:
        for then in sorted(after.get(path[-1], ())):
            if then in path:
                return [*path[path.index(then) :], then]
            if then not in done and (found := walk([*path, then])):
                return found
        done.add(path[-1])
        return []

    done: set[str] = set()
    return next((found for start in sorted(after) if start not in done and (found := walk([start]))), [])


class CheckedLock:
    """A `threading.Lock` or `RLock` that tells the watch."""

    def __init__(self, watch: Watch, name: str, *, reentrant: bool) -> None:
        self.name = name
        self.reentrant = reentrant
        self._watch = watch
        self._lock: Any = threading.RLock() if reentrant else threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = _ENDLESS) -> bool:
        if not self._watch.counts:
            return bool(self._lock.acquire(blocking, timeout))
        if blocking:
            self._watch.acquiring(self)
        taken = bool(self._lock.acquire(blocking, timeout))
        if taken:
            self._watch.acquired(self)
        return taken

    def release(self) -> None:
        if self._watch.counts:
            self._watch.held.remove(self)
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # What a Condition asks of its lock ----------------------------------------------------------------------

    def _is_owned(self) -> bool:
        return self in self._watch.held if self._watch.counts else True

    def _release_save(self) -> int:
        self._watch.awaited(self)
        depth = self._watch.held.count(self) if self._watch.counts else 1
        for _ in range(depth):
            self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        for _ in range(depth):
            self.acquire()

    def __repr__(self) -> str:
        return f"<CheckedLock {self.name}>"


class _Threading(types.ModuleType):
    """What a module of the package finds under the name `threading`."""

    def __init__(self, watch: Watch) -> None:
        super().__init__("threading")
        self._watch = watch

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def Lock(self) -> CheckedLock:
        return CheckedLock(self._watch, _maker(), reentrant=False)

    def RLock(self) -> CheckedLock:
        return CheckedLock(self._watch, _maker(), reentrant=True)

    def Condition(self, lock: CheckedLock | None = None) -> threading.Condition:
        own = CheckedLock(self._watch, _maker(), reentrant=True) if lock is None else lock
        return threading.Condition(own)  # type: ignore[arg-type]

    def Event(self) -> threading.Event:
        event = threading.Event()
        event._cond = threading.Condition(  # type: ignore[attr-defined]
            CheckedLock(self._watch, _maker(), reentrant=False)  # type: ignore[arg-type]
        )
        return event


def _maker() -> str:
    """The class and attribute that a lock is made for, outside of this file."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back  # type: ignore[assignment]
    owner = type(frame.f_locals["self"]).__name__ if "self" in frame.f_locals else frame.f_code.co_name
    with open(frame.f_code.co_filename, encoding="utf-8") as file:
        line = file.readlines()[frame.f_lineno - 1]
    return f"{owner}.{line.split('=')[0].split(':')[0].strip().removeprefix('self.')}"


def _stack() -> str:
    """The frames of the caller, without those of this file and of the test's machinery."""
    frames = [
        frame
        for frame in traceback.extract_stack()
        if frame.filename != __file__
        and "/_pytest/" not in frame.filename
        and "/pluggy/" not in frame.filename
    ]
    return "".join(traceback.format_list(frames[-14:]))


# A trainer's parts, and those of a master that lives in its process.
PARTS = (
    *("edl_torch.client.", "edl_torch.data.", "edl_torch.audit.log", "edl_torch.master."),
    *("edl_torch.testing.fake_master", "edl_torch.testing.fake_master"),
)


@functools.cache
def package_modules() -> tuple[types.ModuleType, ...]:
    """The modules of those parts that know `threading`."""
    rooms = (f"{room.name}." for room in pkgutil.iter_modules(edl_torch.__path__, "edl_torch.") if room.ispkg)
    paths = {room: [str(Path(edl_torch.__path__[0]) / room.split(".")[1])] for room in rooms}
    found = (name for room, path in paths.items() for _, name, _ in pkgutil.iter_modules(path, room))
    modules = (importlib.import_module(name) for name in found if name.startswith(PARTS))
    return tuple(module for module in modules if getattr(module, "threading", None) is threading)


@contextmanager
def checked_locks(*, collects: bool = False) -> Iterator[Watch]:
    """Locks that the package makes in the block are checked ones. Raises LockOrderViolated at its end.

    Make in the block what makes locks: a service, its master. The collections that `collects` asks for leave
    out what was there before the block, so that they are quick.
    """
    watch = Watch(collects=collects)
    with pytest.MonkeyPatch.context() as patch:
        padding = _Threading(watch)
        for module in package_modules():
            patch.setattr(module, "threading", padding)
        if collects:
            gc.collect()
            gc.freeze()  # for good: `unfreeze` would bring back the collected tests, too
        yield watch
        watch.collects = False
    watch.check()
