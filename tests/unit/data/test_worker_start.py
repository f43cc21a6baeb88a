"""What SIGTERM does to loader workers: as they start, while they read, and as they end."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
from multiprocessing import forkserver, get_context, get_start_method, resource_tracker
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import preloaded
import pytest

from edl_torch import ElasticDataLoader
from edl_torch.data.reading import worker_start
from edl_torch.data.reading.worker_start import WorkerStart, _ignore, started_beside
from edl_torch.testing import wait_until

ENDING = """
import os, signal, sys
from edl_torch import ElasticDataLoader
from edl_torch.data.reading.worker_start import WorkerStart

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

WorkerStart({init})(0)
last = Last()  # goes with the interpreter, when handlers in Python are gone
"""


def status(init: str) -> int:
    program = [sys.executable, "-c", ENDING.format(init=init)]
    return preloaded.run(program, timeout=60).returncode


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_worker_whose_interpreter_ends_is_deaf_to_the_last() -> None:
    assert status("None") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_what_a_worker_itself_does_with_the_signal_holds_to_the_end() -> None:
    own = "lambda worker: signal.signal(signal.SIGTERM, lambda *_: None)"
    assert status(own) == -signal.SIGTERM


def blocked() -> set[int]:
    return {signal.SIGTERM, signal.SIGINT} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
@pytest.mark.parametrize("method", [None, "fork", "spawn", "forkserver"])
def test_signals_are_held_back_from_workers_that_start_and_from_nobody_else(
    method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[set[int]] = []
    for helper in (resource_tracker, forkserver):
        monkeypatch.setattr(helper, "ensure_running", lambda: begun.append(blocked()))
    before = blocked()
    context = None if method is None else get_context(method)
    assert started_beside(blocked, context) == {signal.SIGTERM, signal.SIGINT}
    assert blocked() == before
    helpers = {"fork": 0, "spawn": 1, "forkserver": 2}[method or get_start_method()]
    assert begun == [set()] * helpers, "what starts a process of its own has done so before"


def test_workers_that_start_find_the_loops_context_and_their_error_is_the_loops() -> None:
    context = ContextVar("context", default="none")
    context.set("the loop's")
    assert started_beside(context.get, None) == "the loop's"
    with pytest.raises(ZeroDivisionError):
        started_beside(lambda: 1 / 0, None)


class Made:
    """What was started."""


def test_ctrl_c_among_workers_that_start_comes_when_they_have_and_they_go() -> None:
    made: list[weakref.ref[Made]] = []
    came = threading.Event()

    def interrupt(*_: object) -> None:
        came.set()
        raise KeyboardInterrupt

    def make() -> Made:
        os.kill(os.getpid(), signal.SIGINT)
        assert came.wait(60)
        it = Made()
        made.append(weakref.ref(it))
        return it

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            started_beside(make, None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(made) == 1
    wait_until(lambda: made[0]() is None)


@pytest.mark.parametrize("at", range(1, 40))
def test_ctrl_c_at_any_line_of_the_start_waits_for_what_has_begun(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A debugger's hook runs between any two lines, and so may handlers."""
    running, is_waited_for = threading.Event(), threading.Event()
    left, ended = at, []

    class Ended(SimpleQueue[None]):
        def get(self) -> None:  # type: ignore[override]
            is_waited_for.set()
            super().get()

    def make() -> None:
        running.set()
        ended.append(is_waited_for.wait(60))

    monkeypatch.setattr(worker_start, "SimpleQueue", Ended)

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename in (worker_start.__file__, threading.__file__) and event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    try:
        with suppress(KeyboardInterrupt):
            sys.settrace(trace)
            try:
                started_beside(make, None)
            finally:
                sys.settrace(before)
    finally:
        assert ended == [True] * running.is_set()


@pytest.fixture
def started() -> Iterator[list[int]]:
    """What the user's function was called with, in a worker that has started with the signal held back."""
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGINT)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    numbers: list[int] = []
    WorkerStart(numbers.append)(3)
    yield numbers
    for number, handler in handlers:
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    atexit.unregister(_ignore)


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_worker_is_deaf_once_it_has_started(started: list[int]) -> None:
    assert started == [3]
    assert not blocked()
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_the_signal_interrupts_no_system_call_of_a_workers_libraries(started: list[int]) -> None:
    ours, theirs = os.pipe()
    main, task = threading.get_ident(), Path(f"/proc/self/task/{threading.get_native_id()}")

    def reads() -> bool:
        return "pipe_read" in (task / "wchan").read_text()

    def is_pending() -> bool:
        (mask,) = re.findall(r"^SigPnd:\s*(\w+)", (task / "status").read_text(), re.MULTILINE)
        return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)

    def disturb() -> None:
        wait_until(reads)
        signal.pthread_kill(main, signal.SIGTERM)
        wait_until(lambda: not is_pending() and reads())
        os.write(theirs, b"x")

    thread = threading.Thread(target=disturb)
    thread.start()
    found = ctypes.create_string_buffer(1)
    assert ctypes.CDLL(None).read(ours, found, 1) == 1  # Python's own `read` would begin anew
    thread.join()
    os.close(ours)
    os.close(theirs)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_the_workers_of_an_elastic_loader_are_killed_by_it() -> None:
    with ElasticDataLoader(range(8), 4, num_workers=1, multiprocessing_context="fork") as loader:
        batches = iter(loader)
        next(batches)
        assert loader._inner._working is not None
        (worker,) = loader._inner._working()._workers
        assert worker._popen.terminate == worker._popen.kill
        del batches


WRITING = """
import multiprocessing, os, sys, threading
from edl_torch.data.reading import worker_start

class Slow:
    def __reduce__(self):
        begun.set()
        is_waited_for.wait()
        os.write(1, b"whole")
        return bytes, (1_000_000,)  # more than a pipe holds

def join(thread, timeout=None, join=threading.Thread.join):
    is_waited_for.set()
    join(thread, timeout)

worker_start.WorkerStart(None)(0)
threading.Thread.join = join
queue, begun, is_waited_for = multiprocessing.Queue(), threading.Event(), threading.Event()
queue.put(Slow())
begun.wait()
queue.cancel_join_thread()  # as a worker of torch does that is to end
queue.close()
"""


def test_what_a_worker_writes_as_it_ends_is_not_cut_short_in_the_middle_of_a_tensor() -> None:
    worker = preloaded.run([sys.executable, "-c", WRITING], timeout=60, check=True, stdout=subprocess.PIPE)
    assert worker.stdout == b"whole", (
        "the interpreter ended the thread, which aborts where that is inside of torch"
    )
