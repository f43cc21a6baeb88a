"""What a loop sees of a notice: at once where it trains alone, after a vote where ranks train together."""

from __future__ import annotations

import logging
import signal
import threading
import warnings
from collections.abc import Iterator

import pytest

from edl_torch.data.loop.notice import Notice
from edl_torch.system.termination import Termination

NUMBER = signal.SIGUSR2


@pytest.fixture
def termination() -> Iterator[Termination]:
    """Of a signal that does nothing else here."""
    before = signal.signal(NUMBER, signal.SIG_IGN)
    yield Termination(NUMBER)
    signal.signal(NUMBER, before)


def test_a_signal_counts_from_the_first_look_on(termination: Termination) -> None:
    notice = Notice(together=False, termination=termination)
    signal.raise_signal(NUMBER)
    assert not notice.came
    assert not notice.is_to_end()
    signal.raise_signal(NUMBER)
    assert notice.came
    assert not notice.seen, "the program has not looked yet"
    assert notice.is_to_end()
    assert notice.seen
    notice.close()
    assert notice.is_to_end(), "what came is still known"


def test_who_never_looks_listens_to_nothing(termination: Termination) -> None:
    notice = Notice(together=False, termination=termination)
    assert not notice.came
    notice.close()
    assert signal.getsignal(NUMBER) == signal.SIG_IGN


def test_closed_it_listens_no_more(termination: Termination) -> None:
    notice = Notice(together=False, termination=termination)
    notice.is_to_end()
    assert signal.getsignal(NUMBER) != signal.SIG_IGN
    notice.close()
    assert signal.getsignal(NUMBER) == signal.SIG_IGN
    signal.raise_signal(NUMBER)
    assert not notice.is_to_end()


def test_what_comes_for_another_loader_is_nothing_to_one_that_is_closed(termination: Termination) -> None:
    closed, other = (Notice(together=False, termination=termination) for _ in range(2))
    closed.is_to_end()
    other.is_to_end()
    closed.close()
    signal.raise_signal(NUMBER)
    assert other.is_to_end()
    assert not closed.is_to_end()
    other.close()


def test_a_rank_sees_nothing_before_all_know(termination: Termination) -> None:
    notice = Notice(together=True, termination=termination)
    notice.is_to_end()
    notice.give()
    signal.raise_signal(NUMBER)
    assert notice.came
    assert not notice.is_to_end()
    notice.agree()
    assert notice.is_to_end()


@pytest.mark.parametrize("why", ["SIGTERM", "preempt()", "a notice to another rank"])
def test_it_is_logged_once(termination: Termination, why: str, caplog: pytest.LogCaptureFixture) -> None:
    notice = Notice(together=True, termination=termination)
    notice.is_to_end()
    if why == "SIGTERM":
        signal.raise_signal(NUMBER)
    elif why == "preempt()":
        notice.give()
    notice.agree()
    with caplog.at_level(logging.WARNING):
        assert notice.is_to_end()
        assert notice.is_to_end()
    (message,) = caplog.messages
    assert f"({why})" in message


def look_in_a_thread(notice: Notice) -> list[str]:
    """What it warned of."""
    said: list[str] = []

    def look() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            notice.is_to_end()
            notice.is_to_end()
        said.extend(str(warning.message) for warning in caught)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return said


def test_in_another_thread_it_says_once_what_to_do(termination: Termination) -> None:
    signal.signal(NUMBER, signal.SIG_DFL)
    notice = Notice(together=False, termination=termination)
    (said,) = look_in_a_thread(notice)
    assert "signal.signal(signal.SIGTERM, lambda *_: loader.preempt())" in said
    notice.is_to_end()
    assert signal.getsignal(NUMBER) != signal.SIG_DFL, "the main thread may still begin to listen"
    notice.close()


def test_in_another_thread_it_says_nothing_where_the_program_has_a_handler(termination: Termination) -> None:
    notice = Notice(together=False, termination=termination)
    signal.signal(NUMBER, lambda *_: notice.give())
    assert look_in_a_thread(notice) == []
    signal.raise_signal(NUMBER)
    assert notice.is_to_end()
    notice.close()
