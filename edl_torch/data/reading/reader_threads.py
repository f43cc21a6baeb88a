"""A few threads that run jobs in order: they read and transform records for one loop.

It must not know what a record is, or where the jobs come from.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, SimpleQueue
from typing import Literal, Protocol

import torch

from edl_torch.errors import InvalidArgument

MOST_BY_THEMSELVES = 8  # threads of "auto": with more of them the interpreter's lock is what they wait for
_JOIN_S = 0.5
_FORK_S = 0.5

NumThreads = int | Literal["auto"] | None


class ThreadJob(Protocol):
    """What a thread runs: first `read`, then `finish`. Neither may raise."""

    def read(self) -> None: ...

    def finish(self) -> None: ...


class ReaderThreads:
    """`count` daemon threads, which run jobs until `close`.

    With `one_reads` one job is read at a time, in the order in which they were added, while others are
    finished. torch computes by one thread in each of them, as in loader workers; other threads keep the
    number that they have.
    """

    def __init__(self, count: int, *, one_reads: bool) -> None:
        self._jobs: SimpleQueue[ThreadJob | None] = SimpleQueue()
        self._turn: AbstractContextManager[object] = threading.Lock() if one_reads else nullcontext()
        self.running = _Running()
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=self._work, name=f"edl-read-{number}", daemon=True)
            for number in range(count)
        ]
        self._start()
        _pools.add(self)

    def __repr__(self) -> str:
        alive = sum(thread.is_alive() for thread in self._threads)
        return f"<ReaderThreads alive={alive} of={len(self._threads)} waiting={self._jobs.qsize()}>"

    def _start(self) -> None:
        before = torch.get_num_threads()
        computes_alone: SimpleQueue[None] = SimpleQueue()
        self._on_start = computes_alone if before > 1 else None
        try:
            for thread in self._threads:
                thread.start()
            if self._on_start is not None:
                for _ in self._threads:
                    computes_alone.get()
        except BaseException:  # no thread to be had, or Ctrl-C: nobody else would end those that run
            self.close()
            raise
        finally:
            torch.set_num_threads(before)  # the number for threads to come, which each of them has set

    def add(self, jobs: Iterable[ThreadJob]) -> None:
        """Let the threads run these, after those that wait."""
        for job in jobs:
            self._jobs.put(job)

    def _work(self) -> None:
        if self._on_start is not None:
            torch.get_num_threads()  # first: it is what gives a thread the process's number, once
            torch.set_num_threads(1)
            self._on_start.put(None)
        while True:
            with self._turn:
                job = self._jobs.get()
                if job is None:
                    return
                self.running.begin()
                job.read()
            job.finish()
            self.running.end()
            del job  # what it read would outlive its batch

    def stop(self) -> None:
        """Let each thread end after its job, and forget the others. Takes no lock: finalisers may call it."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)

    def close(self) -> None:
        """End the threads. One whose read hangs is not waited for longer than half a second."""
        self.stop()
        if self._pid != os.getpid():
            return  # the threads are those of the process that this one was forked from
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))


class _Running:
    """The threads that run jobs, and whether more may begin."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._threads: set[int] = set()
        self._paused = False

    def begin(self) -> None:
        with self._changed:
            while self._paused:
                self._changed.wait()
            self._threads.add(threading.get_ident())

    def end(self) -> None:
        with self._changed:
            self._threads.discard(threading.get_ident())
            if self._paused:
                self._changed.notify_all()

    def pause(self) -> None:
        """Begin no job any more, and wait, within bounds, for those that run."""
        own = {threading.get_ident()}  # a transform may be what forks
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: self._threads <= own, _FORK_S)

    def go_on(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()


# Of the process, as exit and fork handlers are.
_pools: weakref.WeakSet[ReaderThreads] = weakref.WeakSet()


def _close_all() -> None:
    for pool in tuple(_pools):
        pool.close()


def _pause_all() -> None:
    """A thread that held a reader's lock as its process was forked would leave it locked in the child."""
    for pool in tuple(_pools):
        pool.running.pause()


def _all_go_on() -> None:
    for pool in tuple(_pools):
        pool.running.go_on()


atexit.register(_close_all)  # a thread that computes while the interpreter is torn down can abort it
if hasattr(os, "register_at_fork"):
    # The child has none of the threads, and maybe a lock that one of them held: it forgets the pools.
    os.register_at_fork(before=_pause_all, after_in_parent=_all_go_on, after_in_child=_pools.clear)


def thread_count(num_threads: NumThreads, num_workers: int) -> int:
    """Return how many threads are meant; 0 for none. Raises InvalidArgument.

    "auto" is the cores that this process may use, shared by loader workers and by the trainers that torchrun
    started on this machine; eight at most.
    """
    if num_threads is None:
        return 0
    if num_threads == "auto":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        trainers = os.environ.get("LOCAL_WORLD_SIZE", "1")
        sharing = max(1, num_workers) * (int(trainers) if trainers.isdecimal() and int(trainers) else 1)
        return min(MOST_BY_THEMSELVES, max(1, cores // sharing))
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 0:
        raise InvalidArgument(
            f"num_threads is {num_threads!r}: it must be a number of threads, 'auto' for as many as there "
            f"are cores, or None for none"
        )
    return num_threads
