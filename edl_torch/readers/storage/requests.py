"""Requests that are tried again until they are answered, and many of them under way at once.

The threads are the process': they begin with the first request and end when there has been none for a while.
What a forked child inherits of them is not used.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from edl_torch.errors import SourceUnavailable
from edl_torch.readers.storage.drivers import CredentialsRefused, Transient
from edl_torch.system.backoff import JITTER, backoff

log = logging.getLogger("edl_torch.readers")

MOST_REQUESTS = 96  # under way in a process
_MOST_AHEAD = 256  # answers of one reading: some have come already, and are waited for by none
MOST_BYTES = 128 << 20  # of answers that nobody has taken yet, and of requests under way
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_SAID_AFTER_S = 5.0
_REFUSALS = 4  # in a row, of credentials that were good before
_IDLE_S = 5.0
# A request that the reader waits for, and that takes so many times as long as others, is sent once more.
_SLOW, _LEAST_SLOW_S = 3.0, 0.1
_SENT_AGAIN = 0.04  # of all requests, at most

T = TypeVar("T")


class Trying:
    """Tries requests again. One for each process and storage: a busy server makes all requests wait."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._quiet_until = 0.0  # the server asked for fewer requests
        self._was_let_in = False

    def until_done(self, name: str, attempt: Callable[[bool], T], *, once: bool = False) -> T:
        """Return `attempt(anew)`, which is to use a new connection and credentials where `anew`; `once` is
        for what cannot be tried again.

        Raises SourceUnavailable after `patience_s`, CredentialsRefused, and what else it raises.
        """
        began, refusals, told, anew = time.monotonic(), 0, False, False
        pauses = backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            wait_s = self._quiet_until - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s * JITTER.uniform(1.0, 1.5))
            try:
                done = attempt(anew)
            except CredentialsRefused:
                pause_s = next(pauses)
                refusals += 1
                if once or not self._was_let_in or refusals == _REFUSALS:
                    raise
                anew = True  # they may have been renewed meanwhile
            except Transient as exc:
                pause_s, tried_s = next(pauses), time.monotonic() - began
                if once or tried_s + pause_s > self._patience_s:
                    raise SourceUnavailable(
                        f"'{name}' cannot be reached ({exc}), tried for {tried_s:.0f} s; check the "
                        "network, the endpoint and storage_options"
                    ) from exc
                if exc.busy:
                    self._quiet_until = time.monotonic() + pause_s
                if not told and tried_s > _SAID_AFTER_S:
                    told = True
                    log.warning("url=%s cannot be read for %.0f s: %s; trying again", name, tried_s, exc)
            else:
                self._was_let_in = True
                return done
            time.sleep(pause_s)


class Fetch:
    """One request: run by a thread, or by whoever needs the answer first."""

    __slots__ = ("_claimed", "_done", "_run", "answer", "began_s", "error", "nbytes")

    def __init__(self, run: Callable[[], Any], nbytes: int) -> None:
        self._run = run
        self._claimed = threading.Lock()
        self._done = threading.Lock()  # held until it is: an Event costs more to make
        self._done.acquire()
        self.answer: Any = None
        self.error: Exception | None = None
        self.nbytes = nbytes
        self.began_s: float | None = None

    def run(self) -> None:
        """Run it, unless another thread does or it was given up."""
        if self._claimed.acquire(blocking=False):
            self.began_s = time.monotonic()
            try:
                self.answer = self._run()
            except Exception as exc:  # noqa: BLE001  who takes the answer raises it
                self.error = exc
            finally:
                self._done.release()

    def give_up(self) -> None:
        """It need not run any more."""
        self._claimed.acquire(blocking=False)

    def take(self, pace: Pace | None = None) -> Any:
        """The answer. Raises what came instead of it. One that is slow by its `pace` is asked for again."""
        self.run()
        if pace is not None and not self._is_done_within(pace.slow_s) and pace.may_send_again():
            with suppress(Exception):  # the first one says what is wrong
                return self._run()
        with self._done:
            pass
        if self.error is not None:
            raise self.error
        return self.answer

    def _is_done_within(self, slow_s: float) -> bool:
        now_s = time.monotonic()
        left_s = slow_s - (now_s - (self.began_s or now_s))
        done = self._done.acquire(timeout=left_s) if left_s > 0 else self._done.acquire(blocking=False)
        if done:
            self._done.release()
        return done


class Pace:
    """How long requests of a process take, and how many may be sent again because they are slow; both about,
    as no lock is taken for each request."""

    def __init__(self) -> None:
        self._mean_s = 0.0
        self._credit = 0.0

    def note(self, took_s: float) -> None:
        """A request took so long."""
        self._mean_s += (took_s - self._mean_s) / (16 if self._mean_s else 1)
        self._credit = min(self._credit + _SENT_AGAIN, 8.0)

    @property
    def slow_s(self) -> float:
        """What takes longer is slow."""
        return max(_LEAST_SLOW_S, _SLOW * self._mean_s)

    def may_send_again(self) -> bool:
        """Whether one more may be; it counts as sent."""
        if self._credit < 1:
            return False
        self._credit -= 1
        return True


class Threads:
    """Threads of this process that run jobs: as many as there are jobs, up to a limit."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._jobs: queue.SimpleQueue[Fetch] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._count = self._idle = 0  # threads, and those of them that wait for a job
        self.nbytes = 0  # of jobs whose answer nobody has taken
        self.pace = Pace()

    def has_room(self) -> bool:
        """Whether another job's answer may be kept."""
        return self.nbytes < MOST_BYTES

    def add(self, job: Fetch) -> None:
        """Run a job soon."""
        with self._lock:
            self.nbytes += job.nbytes
            self._jobs.put(job)
            if self._jobs.qsize() <= self._idle or self._count == MOST_REQUESTS:
                return
            self._count += 1
        threading.Thread(target=self._run, name=f"edl-request-{self._count}", daemon=True).start()

    def drop(self, job: Fetch) -> None:
        """Its answer is taken, or nobody wants it."""
        with self._lock:
            self.nbytes -= job.nbytes

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                waited = self._wait()
                if waited is None:
                    return
                job = waited
            job.run()
            if job.began_s is not None:
                self.pace.note(time.monotonic() - job.began_s)
            del job  # its answer is not this thread's

    def _wait(self) -> Fetch | None:
        """Wait for a job; None ends the thread."""
        while True:
            with self._lock:
                self._idle += 1
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                job = None
            with self._lock:
                self._idle -= 1
                if job is None and self._jobs.empty():
                    self._count -= 1
                    return None
            if job is not None:
                return job


_threads: Threads | None = None


def threads() -> Threads:
    global _threads
    if _threads is None or _threads.pid != os.getpid():
        _threads = Threads()
    return _threads


class Ahead:
    """Answers by number, asked for in about their order: requests for the next ones are under way.

    Several threads may take. Let go of, or closed, it asks for nothing more.

    Args:
        count: How many there are.
        job: Makes the request for one, of no bytes where it makes several: each of these is tried again.
        most: How many may be under way.
    """

    def __init__(self, count: int, job: Callable[[int], Fetch], most: int = _MOST_AHEAD) -> None:
        self._count, self._most = count, most
        self._job = job
        self._lock = threading.Lock()
        self._under_way: dict[int, Fetch] = {}
        self._next = 0
        self._threads = threads()
        self._refill()

    @property
    def is_all_asked(self) -> bool:
        """Whether every request has begun, so that others may."""
        return self._next >= self._count

    def take(self, number: int) -> Any:
        """The answer. Raises what its request raised; asked for again, it is requested anew."""
        with self._lock:
            job = self._under_way.pop(number, None)
            known = job is not None
            if job is None:
                job = self._job(number)
                self._next = max(self._next, number + 1)
            self._refill()  # while this one is waited for
        try:
            return job.take(self._threads.pace if job.nbytes else None)
        finally:
            if known:
                self._threads.drop(job)
            if len(self._under_way) < 2 and not self.is_all_asked:  # answers are large, and there is room now
                with self._lock:
                    self._refill()

    def _refill(self) -> None:
        while self._next < self._count and len(self._under_way) < self._most:
            if self._under_way and not self._threads.has_room():
                break
            job = self._job(self._next)
            self._under_way[self._next] = job
            self._next += 1
            self._threads.add(job)

    def close(self) -> None:
        """Give up what nobody has taken. A forked child has a copy, and no business with it."""
        if self._threads.pid != os.getpid():
            return
        with self._lock:
            self._next = self._count
            given_up = list(self._under_way.values())
            self._under_way.clear()
        for job in given_up:
            job.give_up()
            self._threads.drop(job)

    __del__ = close
