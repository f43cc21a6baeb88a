"""The first signal is noted while somebody listens, what was there is called, and later ones are as ever."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from edl_torch.system.termination import Termination

NUMBER = signal.SIGUSR1
ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")


class Listener:
    """Anything."""


class Handler:
    """One that the program has installed before."""

    def __init__(self) -> None:
        self.called: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.called.append(number)


@pytest.fixture
def handler() -> Iterator[Handler]:
    handler = Handler()
    before = signal.signal(NUMBER, handler)
    yield handler
    signal.signal(NUMBER, before)


def send() -> None:
    signal.raise_signal(NUMBER)


def test_the_first_is_noted_and_the_handler_of_before_called_each_time(handler: Handler) -> None:
    termination, listener = Termination(NUMBER), Listener()
    assert termination.listen(listener)
    assert not termination.came
    send()
    assert termination.came
    assert handler.called == [NUMBER]
    assert signal.getsignal(NUMBER) is handler, "the second one is as ever"
    send()
    assert handler.called == [NUMBER] * 2


def test_ours_that_a_framework_has_restored_goes_when_nobody_listens(handler: Handler) -> None:
    termination, listener = Termination(NUMBER), Listener()
    termination.listen(listener)
    ours = signal.getsignal(NUMBER)
    send()
    signal.signal(NUMBER, ours)  # what it had found when it installed its own
    termination.leave(listener)
    assert signal.getsignal(NUMBER) is handler


def test_ours_that_a_framework_has_restored_too_late_is_taken_up_again(handler: Handler) -> None:
    termination, listener = Termination(NUMBER), Listener()
    termination.listen(listener)
    ours = signal.getsignal(NUMBER)
    send()
    termination.leave(listener)
    signal.signal(NUMBER, ours)
    termination.listen(listener)
    assert not termination.came
    send()
    assert termination.came
    assert handler.called == [NUMBER] * 2
    assert signal.getsignal(NUMBER) is handler


def test_an_error_of_the_handler_of_before_goes_on_to_the_program(handler: Handler) -> None:
    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(7)

    signal.signal(NUMBER, leave)
    termination, listener = Termination(NUMBER), Listener()
    termination.listen(listener)
    with pytest.raises(SystemExit):
        send()
    assert termination.came


def test_the_last_one_to_leave_puts_the_handler_of_before_back(handler: Handler) -> None:
    termination, one, other = Termination(NUMBER), Listener(), Listener()
    termination.listen(one)
    termination.listen(other)
    termination.leave(one)
    assert signal.getsignal(NUMBER) is not handler
    termination.leave(other)
    assert signal.getsignal(NUMBER) is handler
    send()
    assert not termination.came
    for _ in range(2):
        assert termination.listen(one), "and anew"
        assert not termination.came
        send()
        assert termination.came
        termination.leave(one)


def test_nothing_is_noted_for_those_that_are_no_more(handler: Handler) -> None:
    termination, listener = Termination(NUMBER), Listener()
    termination.listen(listener)
    del listener
    gc.collect()
    send()
    assert not termination.came
    assert handler.called == [NUMBER]
    assert signal.getsignal(NUMBER) is handler


def test_a_handler_that_was_put_in_front_later_stays_and_calls_ours(handler: Handler) -> None:
    termination, listener, other = Termination(NUMBER), Listener(), Listener()
    termination.listen(listener)
    ours = signal.getsignal(NUMBER)
    assert callable(ours)

    def later(number: int, frame: FrameType | None) -> None:
        ours(number, frame)

    signal.signal(NUMBER, later)
    assert termination.listen(other)
    termination.leave(other)
    send()
    assert termination.came
    assert signal.getsignal(NUMBER) is later
    assert handler.called == [NUMBER]
    termination.leave(listener)
    assert signal.getsignal(NUMBER) is later
    send()
    assert handler.called == [NUMBER] * 2


def test_outside_of_the_main_thread_nobody_can_begin_to_listen(handler: Handler) -> None:
    termination, listener = Termination(NUMBER), Listener()
    said: list[bool] = []

    def ask() -> None:
        said.append(termination.listen(listener))
        termination.leave(listener)

    def in_thread() -> None:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    in_thread()
    assert signal.getsignal(NUMBER) is handler
    assert termination.listen(listener)
    in_thread()
    assert said == [False, True], "where the main thread has begun, others may"
    assert signal.getsignal(NUMBER) is not handler, "and cannot put back"
    send()
    assert not termination.came, "but nobody listens any more"
    assert handler.called == [NUMBER]


def test_what_ignored_the_signal_ignores_it_again() -> None:
    before = signal.signal(NUMBER, signal.SIG_IGN)
    try:
        termination, listener = Termination(NUMBER), Listener()
        assert termination.is_handled
        termination.listen(listener)
        send()
        assert termination.came
        assert signal.getsignal(NUMBER) == signal.SIG_IGN
    finally:
        signal.signal(NUMBER, before)


PROGRAM = """
import os, signal, sys
from edl_torch.system.termination import Termination

class Listener: pass
termination, listener = Termination(), Listener()
assert not termination.is_handled
assert termination.listen(listener)
def told():
    os.kill(os.getpid(), signal.SIGTERM)
    return termination.came
"""


def run(rest: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + rest], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert not done.stderr
    return done.returncode, done.stdout


def test_where_nothing_was_there_the_second_one_ends_the_process() -> None:
    assert run("print(told(), flush=True); print(told())") == (-signal.SIGTERM, "True\n")


def test_where_nobody_listens_any_more_the_first_one_ends_the_process() -> None:
    assert run("del listener; print(told())") == (-signal.SIGTERM, "")


def test_a_forked_child_ends_as_ever_unless_it_listens_itself() -> None:
    assert run(
        """
for listens in (False, True):
    child = os.fork()
    if not child:
        assert not listens or termination.listen(listener)
        os._exit(told())
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(termination.came)
"""
    ) == (0, f"{-signal.SIGTERM}\n1\nFalse\n")


def test_a_child_of_a_process_that_was_told_was_not_told() -> None:
    assert run(
        """
assert told()
child = os.fork()
if not child:
    termination.listen(listener)
    os._exit(termination.came)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ) == (0, "0\n")
