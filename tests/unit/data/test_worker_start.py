"""What SIGTERM does to loader workers: as they start, while they read, and as they end."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context, get_start_method, resource_tracker
from types import SimpleNamespace

import pytest

from edl_torch import ElasticDataLoader
from edl_torch.data import worker_start
from edl_torch.data.worker_start import WorkerStart, _ignore, end_by_kill, starting_workers

ENDING = """
import os, signal, sys
from edl_torch import ElasticDataLoader
from edl_torch.data.worker_start import WorkerStart

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

WorkerStart({init})(0)
last = Last()  # goes with the interpreter, when handlers in Python are gone
"""


def status(init: str) -> int:
    program = [sys.executable, "-c", ENDING.format(init=init)]
    return subprocess.run(program, timeout=60, check=False).returncode


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_worker_whose_interpreter_ends_is_deaf_to_the_last() -> None:
    assert status("None") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_what_a_worker_itself_does_with_the_signal_holds_to_the_end() -> None:
    own = "lambda worker: signal.signal(signal.SIGTERM, lambda *_: None)"
    assert status(own) == -signal.SIGTERM


def is_blocked() -> bool:
    return signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_the_signal_is_held_back_from_workers_that_start(
    method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(resource_tracker, "ensure_running", lambda: begun.append(is_blocked()))
    context = None if method is None else get_context(method)
    assert not is_blocked()
    with suppress(KeyError), starting_workers(context):
        assert is_blocked()
        raise KeyError
    assert not is_blocked()
    forks = (method or get_start_method()) == "fork"
    assert begun == ([] if forks else [False]), "what starts a process of its own has done so before"


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_program_that_holds_the_signal_back_goes_on_to_do_so() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with starting_workers(get_context("fork")):
            assert is_blocked()
        assert is_blocked()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.fixture
def started() -> Iterator[list[int]]:
    """What the user's function was called with, in a worker that has started with the signal held back."""
    handler = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    numbers: list[int] = []
    WorkerStart(numbers.append)(3)
    yield numbers
    signal.signal(signal.SIGTERM, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    atexit.unregister(_ignore)


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_worker_is_deaf_once_it_has_started(started: list[int]) -> None:
    assert started == [3]
    assert not is_blocked()
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_the_signal_interrupts_no_system_call_of_a_workers_libraries(started: list[int]) -> None:
    ours, theirs = os.pipe()
    main = threading.get_ident()

    def disturb() -> None:
        time.sleep(0.05)
        signal.pthread_kill(main, signal.SIGTERM)
        time.sleep(0.02)
        os.write(theirs, b"x")

    thread = threading.Thread(target=disturb)
    thread.start()
    found = ctypes.create_string_buffer(1)
    assert ctypes.CDLL(None).read(ours, found, 1) == 1  # Python's own `read` would begin anew
    thread.join()
    os.close(ours)
    os.close(theirs)


def test_torchs_last_resort_for_workers_is_to_kill_them() -> None:
    process = SimpleNamespace(kill=lambda: "killed", terminate=lambda: "told")
    end_by_kill(SimpleNamespace(_workers=[SimpleNamespace(_popen=process)]))
    assert process.terminate() == "killed"
    end_by_kill(object())


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
import multiprocessing, os, sys, threading, time
from edl_torch.data import worker_start

class Slow:
    def __init__(self, begun):
        self.begun = begun

    def __reduce__(self):
        self.begun.set()
        time.sleep(0.3)
        os.write(1, b"whole")
        return bytes, (1_000_000,)  # more than a pipe holds

worker_start.WorkerStart(None)(0)
queue, begun = multiprocessing.Queue(), threading.Event()
queue.put(Slow(begun))
begun.wait()
queue.cancel_join_thread()  # as a worker of torch does that is to end
queue.close()
"""


def test_what_a_worker_writes_as_it_ends_is_not_cut_short_in_the_middle_of_a_tensor() -> None:
    worker = subprocess.run([sys.executable, "-c", WRITING], timeout=60, check=True, stdout=subprocess.PIPE)
    assert worker.stdout == b"whole", (
        "the interpreter ended the thread, which aborts where that is inside of torch"
    )


@pytest.mark.parametrize("persists", [False, True])
def test_a_worker_that_starts_is_prepared_for_signals_and_its_end(
    persists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(signal, "signal", lambda *arguments: done.append(("signal", *arguments)))
    monkeypatch.setattr(signal, "siginterrupt", lambda *arguments: done.append(("interrupts", *arguments)))
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *arguments: done.append(("mask", *arguments)))
    monkeypatch.setattr(atexit, "register", lambda function: done.append(("at exit", function)))
    monkeypatch.setattr(worker_start, "forget_switch", lambda: done.append(("forgets",)))
    start = WorkerStart(
        lambda worker: done.append(("user's", worker)), **{"persists": True} if persists else {}
    )
    start(5)
    assert done == [
        ("signal", signal.SIGTERM, worker_start._do_nothing),
        ("interrupts", signal.SIGTERM, False),
        ("mask", signal.SIG_UNBLOCK, {signal.SIGTERM}),
        ("at exit", _ignore),
        ("at exit", worker_start._end_queue_threads),
        ("forgets",),
        *[
            ("signal", signal.SIGINT, worker_start._do_nothing),
            ("interrupts", signal.SIGINT, False),
        ][: 2 * persists],
        ("user's", 5),
    ]


def test_a_worker_that_ends_waits_for_its_queues_alone() -> None:
    waited: list[str] = []

    def thread(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, join=lambda timeout: waited.append(f"{name} {timeout}"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "enumerate", lambda: [thread("MainThread"), thread("QueueFeederThread")])
        worker_start._end_queue_threads()
    assert waited == ["QueueFeederThread 0.5"]


@pytest.mark.parametrize("deaf", [True, False])
def test_a_worker_that_is_deaf_stays_so_as_it_ends(deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(signal, "getsignal", lambda number: worker_start._do_nothing if deaf else None)
    monkeypatch.setattr(signal, "signal", lambda *arguments: done.append(arguments))
    _ignore()
    assert done == [(signal.SIGTERM, signal.SIG_IGN)] * deaf
