"""Who counts as alive, and until when."""

from __future__ import annotations

import pytest

from edl_torch.core.members import Member, Members
from edl_torch.errors import StaleLease


def sessions(members: tuple[Member, ...]) -> tuple[str, ...]:
    return tuple(member.session for member in members)


@pytest.fixture
def members() -> Members:
    members = Members(lease_timeout_s=30.0, grace_s=1.0)
    members.enter("s", "worker-0", 100.0)
    return members


def test_a_silent_session_is_dead_after_the_lease_timeout(members: Members) -> None:
    assert members.next_deadline() == 130.0
    assert members.dead(129.9) == ()
    assert sessions(members.dead(130.0)) == ("s",)


def test_a_session_that_is_heard_lives_on(members: Members) -> None:
    members.heard("s", 1, 120.0)
    assert members.dead(149.9) == ()
    assert sessions(members.dead(150.0)) == ("s",)


def test_a_broken_stream_leaves_the_grace(members: Members) -> None:
    members.stream_opened("s", 100.0)
    members.stream_broke("s", 110.0)
    assert members.dead(110.9) == ()
    assert sessions(members.dead(111.0)) == ("s",)


def test_a_stream_that_comes_back_within_the_grace_ends_it(members: Members) -> None:
    members.stream_broke("s", 110.0)
    members.stream_opened("s", 110.5)
    assert members.dead(120.0) == ()
    assert members.next_deadline() == 140.5


def test_a_call_after_the_stream_broke_extends_the_grace_once(members: Members) -> None:
    members.stream_broke("s", 110.0)
    members.heard("s", 1, 110.9)
    assert members.dead(111.0) == ()
    assert sessions(members.dead(111.9)) == ("s",)


def test_a_second_break_does_not_extend_the_grace(members: Members) -> None:
    members.stream_broke("s", 110.0)
    members.stream_broke("s", 110.9)
    assert sessions(members.dead(111.0)) == ("s",)


def test_the_grace_never_outlasts_the_lease_timeout() -> None:
    members = Members(lease_timeout_s=2.0, grace_s=10.0)
    members.enter("s", "worker-0", 0.0)
    members.stream_broke("s", 1.0)
    assert members.next_deadline() == 2.0


def test_a_session_that_enters_again_keeps_what_is_known_of_it(members: Members) -> None:
    members.get("s").reports["training"] = 7
    assert members.enter("s", "worker-0", 105.0).reports == {"training": 7}
    assert members.next_deadline() == 135.0


def test_a_session_that_left_is_stale(members: Members) -> None:
    assert members.leave("s") is not None
    assert members.leave("s") is None
    assert len(members) == 0
    with pytest.raises(StaleLease, match="'s' is not known"):
        members.heard("s", 1, 101.0)


def test_streams_of_strangers_are_ignored(members: Members) -> None:
    members.stream_opened("stranger", 100.0)
    members.stream_broke("stranger", 100.0)
    assert [member.session for member in members] == ["s"]


def test_nobody_has_no_deadline() -> None:
    assert Members(lease_timeout_s=30.0, grace_s=1.0).next_deadline() is None


def test_without_a_progress_timeout_nobody_is_stalled(members: Members) -> None:
    assert members.progress_deadline(members.get("s")) == float("inf")


def test_a_start_of_the_master_gives_everybody_the_full_timeout(members: Members) -> None:
    members.stream_broke("s", 110.0)
    members.resume(500.0)
    assert members.dead(529.9) == ()
    assert sessions(members.dead(530.0)) == ("s",)


@pytest.mark.parametrize(
    ("lease_timeout_s", "progress_timeout_s", "heartbeat_s"),
    [(30.0, 0.0, 10.0), (30.0, 6.0, 2.0), (6.0, 30.0, 2.0), (1e9, 0.0, 1200.0), (1e9, 1e9, 1200.0)],
)
def test_heartbeats_come_several_times_before_silence_or_standstill_counts(
    lease_timeout_s: float, progress_timeout_s: float, heartbeat_s: float
) -> None:
    members = Members(lease_timeout_s=lease_timeout_s, grace_s=1.0, progress_timeout_s=progress_timeout_s)
    assert members.heartbeat_s == heartbeat_s
