"""What keeps a session alive writes its liveness: the clock by which that goes, and who is woken."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from edl_torch.client.liveness import LivenessFeed, suspended_clock
from edl_torch.core.status import Measures
from edl_torch.trainer.liveness import Liveness
from edl_torch.trainer.measuring import Measuring


@pytest.fixture
def liveness() -> Liveness:
    return Liveness()


@pytest.fixture
def feed(liveness: Liveness) -> LivenessFeed:
    return LivenessFeed(liveness, Measuring(), threading.Condition(), lambda _: None)


def test_who_waits_for_the_stream_is_woken(feed: LivenessFeed) -> None:
    assert not feed.wait_standing(0.01)
    stands = threading.Timer(0.02, feed.stood, (100.0,), {"lease_timeout_s": 30.0})
    stands.start()
    assert feed.wait_standing(10)
    stands.join()


def test_what_is_told_is_what_the_trainer_sees(feed: LivenessFeed, liveness: Liveness) -> None:
    feed.stood(100.0, lease_timeout_s=30.0, progress_timeout_s=9.0)
    liveness.begin(100.0)
    assert feed.standing
    assert liveness.sure(100.0)
    feed.answered(110.0)
    assert liveness.sure(125.0)
    liveness.moved_on(102.9)
    assert liveness.sure(102.9)
    feed.doubt()
    assert not liveness.sure(110.0)
    feed.broke()
    assert (feed.standing, liveness.doubts) == (False, 2)


def test_heartbeats_carry_what_the_trainer_says(feed: LivenessFeed, liveness: Liveness) -> None:
    liveness.member = 7
    liveness.moved_on(100.0)
    assert (feed.member, feed.progress) == (7, 1)


def test_measures_are_those_of_the_moment_and_need_no_lock(liveness: Liveness) -> None:
    changed, measuring = threading.Condition(), Measuring()
    feed = LivenessFeed(liveness, measuring, changed, lambda _: None)
    measuring.handed(4, 0.5)
    with changed:
        looked: list[Measures] = []
        look = threading.Thread(target=lambda: looked.append(feed.measures))
        look.start()
        look.join(10)
    assert [measures.batches for measures in looked] == [1]
    measuring.handed(4, 0.5)
    assert feed.measures.batches == 2


def test_the_clock_counts_seconds_and_never_goes_back() -> None:
    began = time.monotonic()
    before, after = suspended_clock(), suspended_clock()
    assert 0 <= after - before <= time.monotonic() - began + 0.01


def test_repr_shows_state(feed: Any) -> None:
    assert repr(feed) == "<LivenessFeed <Liveness standing=False doubts=0>>"
