"""The stream of one session, and the heartbeats that the master asks for on it: one thread for both."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from grpc_errors import CallFailed

from edl_torch.client.grpc.channel import FollowingStream
from edl_torch.client.grpc.client import Heartbeat
from edl_torch.client.liveness import LivenessFeed
from edl_torch.core.status import Measures
from edl_torch.errors import SessionLost
from edl_torch.rpc import edl_torch_pb2 as pb
from edl_torch.rpc.status import to_status
from edl_torch.system.address import HostPort
from edl_torch.system.processes import ForkGuard
from edl_torch.testing import FakeClock, wait_until
from edl_torch.testing.fake_master import Listening
from edl_torch.trainer.liveness import Liveness
from edl_torch.trainer.measuring import Measuring

LEASE_TIMEOUT_S = 30.0


class Stream:
    """Events that a test puts in; an exception ends it."""

    def __init__(self) -> None:
        self._events: queue.Queue[pb.AttendEvent | Exception] = queue.Queue()
        self.taken = 0

    def __iter__(self) -> Iterator[pb.AttendEvent]:
        while True:
            event = self._events.get(timeout=30)
            self.taken += 1
            if isinstance(event, Exception):
                raise event
            yield event

    def cancel(self) -> None:
        self.put(CallFailed())

    def put(self, *events: pb.AttendEvent | Exception) -> None:
        for event in events:
            self._events.put(event)


class Master:
    """A stub. `answer` is called for each heartbeat, with its request, and may raise."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.beats: list[pb.HeartbeatRequest] = []
        self.limits: list[float] = []
        self.answer: Callable[[pb.HeartbeatRequest], None] = lambda request: None

    def Attend(self, request: pb.AttendRequest, **options: Any) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def Heartbeat(self, request: pb.HeartbeatRequest, timeout: float) -> pb.HeartbeatResponse:
        self.limits.append(timeout)
        try:
            self.answer(request)
        finally:
            self.beats.append(request)
        return pb.HeartbeatResponse()

    def stream(self, number: int = 1) -> Stream:
        """The session's stream, once it has been asked for so often."""
        return wait_until(lambda: len(self.streams) >= number and self.streams[number - 1])

    def heard(self, beats: int) -> None:
        """Wait for so many heartbeats in all; there are no more."""
        wait_until(lambda: len(self.beats) >= beats)
        assert len(self.beats) == beats


class Guard(ForkGuard):
    """Counts how often the master's name was looked up."""

    looks = 0

    def refresh(self) -> None:
        self.looks += 1


def asks(lease_timeout_s: float = LEASE_TIMEOUT_S, progress_timeout_s: float = 0.0) -> pb.AttendEvent:
    return pb.AttendEvent(
        attending=pb.Attending(lease_timeout_s=lease_timeout_s, progress_timeout_s=progress_timeout_s)
    )


def wants(dataset: str) -> pb.AttendEvent:
    return pb.AttendEvent(wanted=pb.Wanted(dataset=dataset))


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def wanted() -> list[str]:
    return []


@pytest.fixture
def listening(wanted: list[str]) -> Listening:
    return Listening(7, wanted.append)


@pytest.fixture
def guard() -> Guard:
    return Guard(HostPort("127.0.0.1", 1))


@pytest.fixture
def heartbeat(master: Master, listening: Listening, guard: Guard, clock: FakeClock) -> Iterator[Heartbeat]:
    guard.looks = 0
    heartbeat = Heartbeat(master, "session", listening, guard=guard, clock=clock)
    heartbeat.start()
    yield heartbeat
    heartbeat.close()


@pytest.mark.usefixtures("heartbeat")
def test_the_master_is_answered_each_time_that_it_asks(master: Master, listening: Listening) -> None:
    stream = master.stream()
    assert not master.beats
    stream.put(asks())
    master.heard(1)
    listening.measuring.reported(4)
    listening.liveness.progress = 3
    stream.put(asks(), asks())
    master.heard(3)
    first, second, _ = master.beats
    assert (first.session, first.member, first.progress, first.measures.batches) == ("session", 7, 0, 0)
    assert (second.session, second.member, second.progress, second.measures.batches) == ("session", 7, 3, 1)


@pytest.mark.usefixtures("heartbeat")
def test_one_thread_does_it(master: Master) -> None:
    threads = []
    master.answer = lambda request: threads.append(threading.current_thread().name)
    master.stream().put(asks())
    master.heard(1)
    ours = [thread.name for thread in threading.enumerate() if thread.name.endswith("-session")]
    assert ours == threads == ["edl-attend-session"]


@pytest.mark.usefixtures("heartbeat")
def test_a_stream_stands_once_however_often_the_master_asks(
    master: Master, listening: Listening, guard: Guard, clock: FakeClock
) -> None:
    stream = master.stream()
    clock.advance(10.0)
    stream.put(asks(progress_timeout_s=9.0), asks(), asks())
    master.heard(3)
    assert (guard.looks, listening.liveness.doubts) == (1, 0)
    listening.liveness.begin(110.0)
    listening.liveness.moved_on(113.0)  # a third of the progress timeout later
    assert listening.liveness.doubts == 1


@pytest.mark.usefixtures("heartbeat")
def test_an_answer_counts_from_when_the_heartbeat_was_sent(
    master: Master, listening: Listening, clock: FakeClock
) -> None:
    def answer_late(request: pb.HeartbeatRequest) -> None:
        clock.advance(10.0)

    master.answer = answer_late
    stream = master.stream()
    clock.advance(50.0)  # the stream, asked for at 100, stands now
    stream.put(asks(), wants("next"))
    wait_until(lambda: stream.taken == 2)
    assert listening.liveness.sure(169.9)
    assert not listening.liveness.sure(170.0)


@pytest.mark.usefixtures("heartbeat")
def test_a_heartbeat_that_is_not_answered_says_nothing_and_the_next_one_is_sent(
    master: Master, listening: Listening, clock: FakeClock
) -> None:
    def away(request: pb.HeartbeatRequest) -> None:
        raise CallFailed

    master.answer = away
    stream = master.stream()
    clock.advance(50.0)
    stream.put(asks())
    master.heard(1)
    assert listening.standing
    assert listening.liveness.doubts == 0
    assert not listening.liveness.sure(150.0)  # only the stream was answered, which was asked for at 100
    master.answer = lambda request: None
    stream.put(asks(), wants("next"))
    wait_until(lambda: stream.taken == 3)
    assert listening.liveness.sure(169.9)


@pytest.mark.usefixtures("heartbeat")
def test_a_master_that_does_not_know_the_session_is_a_doubt_at_once(
    master: Master, listening: Listening
) -> None:
    def refuse(request: pb.HeartbeatRequest) -> None:
        raise CallFailed(*to_status(SessionLost("who?")))

    master.answer = refuse
    master.stream().put(asks())
    wait_until(lambda: listening.liveness.doubts)
    assert listening.standing


@pytest.mark.parametrize(
    ("lease_timeout_s", "progress_timeout_s", "limit_s"),
    [(30.0, 0.0, 5.0), (6.0, 0.0, 2.0), (6.0, 30.0, 2.0), (30.0, 6.0, 2.0), (3600.0, 0.0, 5.0)],
)
@pytest.mark.usefixtures("heartbeat")
def test_a_heartbeat_that_is_lost_leaves_time_for_others(
    master: Master, lease_timeout_s: float, progress_timeout_s: float, limit_s: float
) -> None:
    master.stream().put(asks(lease_timeout_s, progress_timeout_s))
    master.heard(1)
    assert master.limits == [limit_s]


@pytest.mark.usefixtures("heartbeat")
def test_others_that_wait_are_heard_and_unknown_events_are_not(master: Master, wanted: list[str]) -> None:
    master.stream().put(asks(), wants("d"), pb.AttendEvent(), wants("e"))
    wait_until(lambda: len(wanted) == 2)
    assert wanted == ["d", "e"]
    master.heard(1)


@pytest.mark.usefixtures("heartbeat")
def test_without_a_stream_there_are_no_heartbeats_and_the_new_one_begins_with_one(
    master: Master, listening: Listening, guard: Guard
) -> None:
    master.stream().put(asks(), CallFailed())
    again = master.stream(2)
    assert (listening.standing, listening.liveness.doubts) == (False, 1)
    master.heard(1)
    again.put(asks())
    master.heard(2)
    assert (listening.standing, guard.looks) == (True, 2)


@pytest.mark.usefixtures("heartbeat")
def test_a_listener_that_fails_ends_the_stream_and_not_the_session(
    master: Master, listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(dataset: str) -> None:
        raise RuntimeError("a bug")

    listening.wanted = fail
    with caplog.at_level("ERROR"):
        master.stream().put(asks(), wants("d"))
        master.stream(2).put(asks())
        master.heard(2)
    assert "a bug" in caplog.text


def test_close_ends_it_within_a_heartbeat_that_is_not_answered(master: Master, heartbeat: Heartbeat) -> None:
    ended = threading.Event()

    def wait(request: pb.HeartbeatRequest) -> None:
        ended.wait(30)
        raise CallFailed

    master.answer = wait
    master.stream().put(asks())
    wait_until(lambda: master.limits)
    threading.Timer(0.05, ended.set).start()
    heartbeat.close()
    assert repr(heartbeat) == "<Heartbeat session closed>"
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("-session")]
    assert len(master.streams) == 1


# Where the master may have moved ----------------------------------------------------------------------------


class Following:
    """Notes what streams tell a channel that follows a master."""

    doubts = 0
    current: Any = None

    def doubt(self) -> None:
        self.doubts += 1


class Opened:
    """A stream of grpc."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.end = lambda: callback(self)


def test_a_stream_that_is_opened_again_is_in_doubt_until_somebody_is_answered() -> None:
    """It waits for a master that may be there no more, and without it there is no heartbeat that fails."""
    channel = Following()
    attend = FollowingStream(channel, lambda current: lambda request, **options: Opened())  # type: ignore[arg-type]
    first = attend("request", wait_for_ready=True)
    assert channel.doubts == 0  # nobody is asked in peace
    first.end()
    assert channel.doubts == 1
    attend("request", wait_for_ready=True)
    assert channel.doubts == 2


# What keeps a session alive writes its liveness: the clock by which that goes, and who is woken -------------


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


def test_measures_are_those_of_the_moment_and_need_no_lock(liveness: Liveness) -> None:
    changed, measuring = threading.Condition(), Measuring()
    feed = LivenessFeed(liveness, measuring, changed, lambda _: None)
    measuring.reported(4)
    with changed:
        looked: list[Measures] = []
        look = threading.Thread(target=lambda: looked.append(feed.measures))
        look.start()
        look.join(60)
    assert [measures.batches for measures in looked] == [1]
    measuring.reported(4)
    assert feed.measures.batches == 2
