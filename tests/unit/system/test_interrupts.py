from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from edl_torch import DataShardService, LocalMaster
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.system.interrupts import hold_interrupts, release_interrupts


@pytest.fixture(autouse=True)
def the_handler_is_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


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


def of_an_embedded_master(change: Change) -> None:
    def act(dispatcher: Dispatcher, now: float) -> None:
        change()

    LocalMaster().apply(act)


@pytest.mark.parametrize("make", [of_a_trainer, of_an_embedded_master])
def test_ctrl_c_in_the_middle_of_a_change_comes_when_it_is_whole(make: Callable[[Change], None]) -> None:
    change = Change()
    with pytest.raises(KeyboardInterrupt):
        make(change)
    assert change.is_whole


def test_what_is_held_back_goes_to_the_programs_handler_once_and_only_then() -> None:
    seen: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        held = hold_interrupts()
        assert held is handler
        assert hold_interrupts() is None, "they are held already"
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert not seen
        release_interrupts(held)
        assert seen == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_program_that_ignores_ctrl_c_goes_on_doing_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert hold_interrupts() is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_hold_nothing() -> None:
    held: list[object] = []
    thread = threading.Thread(target=lambda: held.append(hold_interrupts()))
    thread.start()
    thread.join()
    assert held == [None]


def test_an_interrupt_that_a_later_one_overtook_is_not_raised_again() -> None:
    held = hold_interrupts()
    assert held is not None
    signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, held)  # as a release begins, which the next one cuts short
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    held = hold_interrupts()
    assert held is not None
    release_interrupts(held)
