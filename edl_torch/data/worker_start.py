"""Loader workers leave SIGTERM to their trainer: whoever sends it to all processes means the job.

A worker that it killed would end the trainer's loop before that can save. Workers go when their trainer ends
them, or is gone. Those that persist leave Ctrl-C to it too: a notebook begins its loop again.
"""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_start_method, resource_tracker
from types import FrameType
from typing import Any

from edl_torch.system.interrupts import forget_switch

QUEUE_PATIENCE_S = 0.5  # for what a worker has read and nobody takes any more


class WorkerStart:
    """A `worker_init_fn` that makes the worker deaf to SIGTERM, and then calls the user's.

    One that `persists` is deaf to SIGINT as well.
    """

    def __init__(self, user_init: Callable[[int], None] | None, *, persists: bool = False) -> None:
        self._user_init = user_init
        self._persists = persists

    def __call__(self, worker_id: int) -> None:
        # Not SIG_IGN, which programs that a transform runs would inherit.
        signal.signal(signal.SIGTERM, _do_nothing)
        signal.siginterrupt(signal.SIGTERM, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        atexit.register(_ignore)
        atexit.register(_end_queue_threads)
        forget_switch()
        if self._persists:
            signal.signal(signal.SIGINT, _do_nothing)
            signal.siginterrupt(signal.SIGINT, False)
        if self._user_init is not None:
            self._user_init(worker_id)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    return


def _ignore() -> None:
    """Stay deaf while the interpreter ends: a spawned worker's puts handlers back before it is gone."""
    if signal.getsignal(signal.SIGTERM) == _do_nothing:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_queue_threads() -> None:
    """Wait for the threads that write to queues: the end of a spawned worker's interpreter would abort it.

    torch lets them run on, for nobody may read any more what they write. One that the interpreter stops in
    torch's code, where a tensor moves to shared memory, takes the process with it (SIGABRT); one that a full
    pipe holds does not.
    """
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(QUEUE_PATIENCE_S)


@contextmanager
def starting_workers(context: Any) -> Iterator[None]:
    """Hold SIGTERM back from processes that this thread starts, until `WorkerStart` runs in them.

    `context` is multiprocessing's; None for the default one.
    """
    method = get_start_method() if context is None else context.get_start_method()
    if method != "fork":
        resource_tracker.ensure_running()  # first: to start it lets the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_by_kill(iterator: Any) -> None:
    """Let `terminate`, torch's last resort for the workers of its `iterator`, reach those that are deaf."""
    for worker in getattr(iterator, "_workers", ()):
        worker._popen.terminate = worker._popen.kill
