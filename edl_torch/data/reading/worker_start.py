"""Loader workers leave SIGTERM and Ctrl-C to their trainer: who sends them to all processes means the job.

A worker that SIGTERM killed would end the trainer's loop before that can save. One that Ctrl-C ended would
not be there when a notebook begins its loop again, or take a lock of torch's queues with it, for which the
trainer waits for ever. Workers go when their trainer ends them, or is gone.
"""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from multiprocessing import forkserver, get_start_method, resource_tracker
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar, cast

from torch.utils.data._utils.fetch import _IterableDatasetFetcher

from edl_torch.client.workers.links import SocketLink

T = TypeVar("T")

_LEFT_TO_TRAINER = (signal.SIGTERM, signal.SIGINT)
QUEUE_PATIENCE_S = 0.5  # for what a worker has read and nobody takes any more


class WorkerStart:
    """A `worker_init_fn` that makes the worker deaf to SIGTERM and SIGINT, and then calls the user's."""

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self._user_init = user_init

    def __call__(self, worker_id: int) -> None:
        # Not SIG_IGN, which programs that a transform runs would inherit.
        for number in _LEFT_TO_TRAINER:
            signal.signal(number, _do_nothing)
            signal.siginterrupt(number, False)
        atexit.register(_ignore)
        atexit.register(_end_queue_threads)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_TRAINER)
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


def tell_what_ends_worker(link: SocketLink) -> None:
    """In a worker: say goodbye while an error that torch lets pass, as `sys.exit()`'s, is on its way.

    From Python 3.13 on multiprocessing runs finalizers when such an error is gone.
    """
    fetch: Callable[[Any, Any], Any] = _IterableDatasetFetcher.fetch

    def watched(fetcher: Any, index: Any) -> Any:
        try:
            return fetch(fetcher, index)
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException:
            link.say_goodbye()
            raise

    _IterableDatasetFetcher.fetch = watched  # type: ignore[method-assign]


def started_beside(make: Callable[[], T], context: Any) -> T:
    """Return, or raise, what `make` does, which starts loader workers. It runs in a thread of its own.

    Signal handlers do not run there. In the midst of a fork Python would lose what one raises, Ctrl-C too,
    and might leave a lock of its own taken. What one raises here is raised when `make` is done, and what that
    has made goes. The thread holds SIGTERM and SIGINT back from the processes until `WorkerStart` runs there.

    `context` is multiprocessing's; None for the default one.
    """
    begins: list[bool] = [True]  # whoever takes it out decides whether the thread does anything
    made: list[tuple[T | None, BaseException | None]] = []
    ended: SimpleQueue[None] = SimpleQueue()  # neither waiting nor saying so runs Python
    start = partial(copy_context().run, _start, make, context, begins, made, ended)
    try:
        threading.Thread(target=start, name="edl-start").start()
        ended.get()
    except BaseException as exc:
        if not _takes(begins) and not made:
            ended.get()
        del made, start  # a traceback keeps this frame, and would keep the workers
        if isinstance(exc, KeyError) and exc.__context__ is not None:
            raise exc.__context__ from None  # `Thread.start` could not undo what had begun
        raise
    result, error = made.pop()
    if error is not None:
        raise error
    return cast("T", result)


def _takes(begins: list[bool]) -> bool:
    try:
        return begins.pop()
    except IndexError:
        return False


def _start(
    make: Callable[[], Any], context: Any, begins: list[bool], made: list[Any], ended: SimpleQueue[None]
) -> None:
    if not _takes(begins):
        return
    try:
        method = get_start_method() if context is None else context.get_start_method()
        if method != "fork":
            resource_tracker.ensure_running()  # first: to start it lets signals through again
        if method == "forkserver":
            forkserver.ensure_running()  # first: its other children are not to be deaf
        signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_TRAINER)
        made.append((make(), None))
    except BaseException as exc:  # noqa: BLE001  the top of a thread
        made.append((None, exc))
    finally:
        ended.put(None)


def end_by_kill(iterator: Any) -> None:
    """Let `terminate`, torch's last resort for the workers of its `iterator`, reach those that are deaf."""
    for worker in getattr(iterator, "_workers", ()):
        worker._popen.terminate = worker._popen.kill
