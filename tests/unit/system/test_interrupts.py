from __future__ import annotations

import asyncio
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest

from edl_torch import DataShardService, ElasticDataLoader, LocalMaster
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.system import interrupts
from edl_torch.system.interrupts import Switch, drop_switch, keep_switch, uninterrupted

RECORDS = 8


@pytest.fixture(autouse=True)
def the_handler_is_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


@contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Seen:
    """A program's handler, which goes on."""

    def __init__(self, *, then: Any = None) -> None:
        self.frames: list[FrameType | None] = []
        self._then = then

    def __call__(self, number: int, frame: FrameType | None) -> None:
        assert number == signal.SIGINT
        self.frames.append(frame)
        if self._then is not None:
            self._then(number, frame)


class Change:
    """A change of two halves; Ctrl-C comes between them."""

    def __init__(self) -> None:
        self.is_whole = False

    def __call__(self) -> None:
        signal.raise_signal(signal.SIGINT)
        self.is_whole = True


def of_a_trainer(change: Change) -> None:
    with DataShardService(batch_size=1, dataset_size=1, master_client=LocalMaster()) as service:
        service._live_session.do(change)


def of_a_trainer_in_a_loop(change: Change) -> None:
    with made() as loader:
        for _ in loader:
            loader.service._live_session.do(change)


def of_an_embedded_master(change: Change) -> None:
    def act(dispatcher: Dispatcher, now: float) -> None:
        change()

    LocalMaster().apply(act)


def made(records: int = RECORDS) -> ElasticDataLoader:
    return ElasticDataLoader(range(records), batch_size=1, master_client=LocalMaster(), num_epochs=4)


def interrupt_once_in(loader: ElasticDataLoader) -> None:
    for _ in loader:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")


def installed() -> Any:
    return signal.getsignal(signal.SIGINT)


@pytest.mark.parametrize("make", [of_a_trainer, of_a_trainer_in_a_loop, of_an_embedded_master])
def test_ctrl_c_in_the_middle_of_a_change_comes_when_it_is_whole(make: Callable[[Change], None]) -> None:
    change = Change()
    with pytest.raises(KeyboardInterrupt):
        make(change)
    assert change.is_whole


@pytest.mark.filterwarnings("ignore:the loop was left:UserWarning")
def test_ctrl_c_between_two_changes_of_a_loop_comes_at_once() -> None:
    with made() as loader:
        with pytest.raises(KeyboardInterrupt):
            interrupt_once_in(loader)
        assert len(list(loader)) == RECORDS


@pytest.fixture(params=["for one change", "kept"])
def program(request: pytest.FixtureRequest) -> Iterator[Seen]:
    """The program's handler, while changes are held together in either way."""
    handler = Seen()
    with handled_by(handler):
        kept = keep_switch() if request.param == "kept" else None
        yield handler
        if kept is not None:
            drop_switch(kept)
        assert installed() is handler


def test_what_is_held_back_goes_to_the_programs_handler_once_and_only_then(program: Seen) -> None:
    def change() -> str:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert not program.frames
        return "changed"

    assert uninterrupted(change) == "changed"
    (frame,) = program.frames
    assert frame is not None
    assert frame.f_code is change.__code__
    uninterrupted(int)
    assert len(program.frames) == 1
    signal.raise_signal(signal.SIGINT)
    assert len(program.frames) == 2


def test_a_change_within_a_change_ends_with_it(program: Seen) -> None:
    def inner() -> None:
        signal.raise_signal(signal.SIGINT)

    def outer() -> None:
        uninterrupted(inner)
        assert not program.frames
        signal.raise_signal(signal.SIGINT)
        uninterrupted(int)
        assert not program.frames

    uninterrupted(outer)
    assert len(program.frames) == 1


def test_an_interrupt_in_a_change_that_fails_comes_with_its_error() -> None:
    def change() -> None:
        signal.raise_signal(signal.SIGINT)
        raise ValueError("failed")

    with pytest.raises(KeyboardInterrupt) as raised:
        uninterrupted(change)
    assert isinstance(raised.value.__context__, ValueError)


def test_what_the_programs_handler_raises_is_raised_once(program: Seen) -> None:
    program._then = lambda number, frame: sys.exit(7)
    with pytest.raises(SystemExit):
        uninterrupted(lambda: signal.raise_signal(signal.SIGINT))
    uninterrupted(int)
    assert len(program.frames) == 1


@pytest.mark.parametrize("nothing", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_program_without_a_handler_in_python_goes_on_as_it_does(nothing: signal.Handlers) -> None:
    with handled_by(nothing):
        with made() as loader:
            for _ in loader:
                assert installed() is nothing
            uninterrupted(lambda: None)
            assert uninterrupted(installed) is nothing
        assert installed() is nothing


def test_other_threads_hold_nothing(program: Seen) -> None:
    before = installed()

    def change() -> None:
        assert installed() is before
        come.set()
        assert seen.wait(10)

    come, seen = threading.Event(), threading.Event()
    thread = threading.Thread(target=uninterrupted, args=[change])
    thread.start()
    assert come.wait(10)
    signal.raise_signal(signal.SIGINT)
    assert len(program.frames) == 1
    seen.set()
    thread.join()


def test_a_switch_that_another_thread_lets_go_goes_with_the_next_change() -> None:
    before = installed()
    switch = keep_switch()
    thread = threading.Thread(target=drop_switch, args=[switch])
    thread.start()
    thread.join()
    assert installed() is switch
    uninterrupted(int)
    assert installed() is before


def test_an_interrupt_at_any_line_of_a_change_comes_once_and_none_is_left(program: Seen) -> None:
    """A debugger's hook runs between any two lines, and so may handlers."""

    def interrupted_at(left: int, times: int) -> bool:
        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename == interrupts.__file__ and event == "line":
                left -= 1
                if -times < left <= 0:
                    signal.raise_signal(signal.SIGINT)
            return trace

        with suppress(KeyboardInterrupt):
            sys.settrace(trace)
            try:
                uninterrupted(int)
            finally:
                sys.settrace(before)
        return left <= 0

    before = sys.gettrace()
    program._then = signal.default_int_handler
    for times in (1, 2):
        line = 0
        while interrupted_at(line := line + 1, times):
            assert 1 <= len(program.frames) <= times
            program.frames.clear()
            uninterrupted(int)
            assert not program.frames, line
            assert (not isinstance(installed(), Switch)) or installed().kept
        assert line > 5


# What a program sees of it --------------------------------------------------------------------------------


def test_the_programs_handler_is_back_where_a_loop_ends() -> None:
    before = installed()
    with made() as loader:
        for _ in range(2):
            for _ in loader:
                assert isinstance(installed(), Switch)
            assert installed() is before
        for _ in loader:
            break
        assert installed() is before, "its iterator was collected"
        kept = iter(loader)
        next(kept)
        assert isinstance(installed(), Switch)
    assert installed() is before, "the loader was closed"


@pytest.mark.filterwarnings("ignore:the loop was left:UserWarning")
def test_the_programs_handler_is_back_where_an_older_iterator_is_kept() -> None:
    before = installed()
    with made() as loader:
        older = iter(loader)
        next(older)
        for _ in loader:
            pass
        assert installed() is before
        older.close()  # type: ignore[attr-defined]


def test_two_loops_side_by_side_share_the_switch() -> None:
    before = installed()
    with made() as long, made(RECORDS // 2) as short:
        switches = [installed() for _ in zip(long, short, strict=False)]
        assert len(set(switches)) == 1
        assert isinstance(switches[0], Switch)
    assert installed() is before


def test_no_frame_of_ours_ends_the_traceback_of_a_program() -> None:
    with made() as loader, pytest.raises(KeyboardInterrupt) as raised:
        interrupt_once_in(loader)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.name for frame in frames][1:] == ["interrupt_once_in"]


def test_a_handler_that_a_program_installs_in_a_loop_is_its_own_and_is_held_back_too() -> None:
    before = installed()
    seen = Seen()
    with made() as loader:
        for at, _ in enumerate(loader):
            if at == 2:
                replaced = signal.signal(signal.SIGINT, seen)
                assert isinstance(replaced, Switch)
            if at > 2:
                assert installed() is seen
                change = Change()
                loader.service._live_session.do(change)
                assert change.is_whole
                assert len(seen.frames) == at - 2
        assert installed() is seen
    assert installed() is seen
    signal.signal(signal.SIGINT, before)


def test_a_handler_that_calls_the_one_before_it_ends_at_the_programs() -> None:
    """As a program does that delays Ctrl-C while it saves: it restores what it saw, maybe too late."""
    before = installed()
    with made() as loader:
        for at, _ in enumerate(loader):
            if at == 0:
                replaced = installed()
                seen = Seen(then=replaced)
                signal.signal(signal.SIGINT, seen)
        for _ in loader:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                loader.service._live_session.do(Change())
        assert len(seen.frames) == 2 * RECORDS
        assert installed() is seen
        signal.signal(signal.SIGINT, replaced)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        for _ in loader:
            with pytest.raises(KeyboardInterrupt):
                loader.service._live_session.do(Change())
        assert installed() is before
        signal.signal(signal.SIGINT, replaced)
    assert installed() is before, "the next change finds it"


def test_asyncio_cancels_its_task_by_ctrl_c_before_after_and_around_a_loop() -> None:
    async def cancelled() -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(10)

    async def trained(loader: ElasticDataLoader) -> int:
        batches = [await asyncio.sleep(0, batch) for batch in loader]
        await asyncio.sleep(0)
        return len(batches)

    with made() as loader:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt) as raised:
                asyncio.run(cancelled())
            assert isinstance(raised.value.__context__, asyncio.CancelledError)
            assert asyncio.run(trained(loader)) == RECORDS
            assert installed() is signal.default_int_handler
