"""Who takes part in which pass, and what a session that was given up does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edl_torch import DataShardService
from edl_torch.client.leases import Mode
from edl_torch.client.plain_pass import NO_PASS, OWN_STREAM, NoIterations
from edl_torch.client.session import Session
from edl_torch.core.calls import Grant
from edl_torch.testing import FakeMaster

PLAIN = Mode.PLAIN


@pytest.fixture
def fake() -> FakeMaster:
    return FakeMaster(grace_s=1.0)


@pytest.fixture
def session(fake: FakeMaster) -> Iterator[Session]:
    with DataShardService(4, fake, dataset_size=64, records_per_shard=8) as service:
        yield service.session


def begin(session: Session, stream: str, run: str = "") -> int:
    return session.begin_stream(stream, PLAIN, run)[0]


def draw(session: Session, stream: str, number: int) -> Grant:
    grant = session.next_grant(stream, number)
    assert grant is not None
    return grant


def test_all_workers_of_one_iteration_share_a_pass(session: Session) -> None:
    assert begin(session, "worker 0", "7 1") == begin(session, "worker 1", "7 1") != NO_PASS


def test_the_next_iteration_is_a_pass_of_its_own_whoever_begins_it(session: Session) -> None:
    first = begin(session, "worker 0", "7 1")
    second = begin(session, "worker 1", "7 2")
    assert second > first
    assert begin(session, "worker 0", "7 2") == second


def test_a_worker_that_begins_after_its_iteration_was_given_up_gets_nothing(session: Session) -> None:
    first = begin(session, "worker 0", "7 1")
    second = begin(session, "worker 0", "7 2")
    late = begin(session, "worker 1", "7 1")
    assert late == NO_PASS
    assert session.next_grant("worker 1", late) is None
    assert session.next_grant("worker 0", first) is None
    assert draw(session, "worker 0", second)


def test_a_late_worker_does_not_bring_back_a_pass_that_a_restore_ended(session: Session) -> None:
    begin(session, "worker 0", "7 1")
    session.position.restore(None)
    assert begin(session, "worker 1", "7 1") == NO_PASS
    assert begin(session, "worker 0", "7 2") != NO_PASS


class Numbered(NoIterations):
    """Iterations of this process: run "i7" is number 7."""

    newest = 9
    over: frozenset[str] = frozenset()

    def number(self, run: str) -> int:
        return int(run[1:]) if run.startswith("i") else 0

    def is_over(self, run: str) -> bool:
        return run in self.over


def test_workers_of_an_older_iteration_get_nothing_though_none_of_them_began_before(session: Session) -> None:
    session.watch(Numbered())
    number = begin(session, "worker 0", "i7 1")
    assert begin(session, "worker 0", "i6 1") == NO_PASS
    assert begin(session, "worker 1", "i7 1") == number
    assert begin(session, "worker 0", "i6 2") > number  # persistent ones begin again
    own = begin(session, OWN_STREAM)
    assert begin(session, "worker 0", "i9 1") == NO_PASS
    assert begin(session, "worker 0", "i10 1") > own


def test_workers_of_an_iteration_that_is_gone_get_nothing(session: Session) -> None:
    iterations = Numbered()
    session.watch(iterations)
    iterations.over = frozenset({"i7"})
    assert begin(session, "worker 0", "i7 1") == NO_PASS


def test_reports_outside_a_pass_prove_nothing(session: Session) -> None:
    assert session.report_batch(None) == 0
    draw(session, OWN_STREAM, begin(session, OWN_STREAM))
    session.abandon_pass()
    assert session.report_batch(None) == 0
    assert session.book.records == 0


def test_the_trainers_own_stream_always_begins_a_pass(session: Session) -> None:
    numbers = [begin(session, OWN_STREAM), begin(session, "worker 0", "7 1"), begin(session, OWN_STREAM)]
    assert numbers == sorted(set(numbers))


def test_processes_that_are_no_loader_workers_share_a_pass_until_one_begins_again(session: Session) -> None:
    first = begin(session, "process 1")
    assert begin(session, "process 2") == first
    second = begin(session, "process 2")
    assert second > first
    assert begin(session, "process 1") == second


def test_a_lost_session_takes_part_anew_once_however_many_calls_find_out(
    session: Session, fake: FakeMaster
) -> None:
    number = session.elastic.open()
    session.begin_stream(OWN_STREAM, Mode.ELASTIC)
    draw(session, OWN_STREAM, number)
    lost = session._joining.membership
    fake.break_stream(session.id)
    fake.clock.advance(1.5)
    assert fake.expire()
    fresh = draw(session, OWN_STREAM, number) if session.elastic.more_to_read() else None
    assert fresh is not None
    session._rejoin(lost)  # a second call comes back with the same news
    assert fresh.task in session.book
    session.elastic.close(number)
    assert fake.dataset_status("training").leased == 0


def test_a_plain_pass_of_a_lost_session_ends(session: Session, fake: FakeMaster) -> None:
    number = begin(session, OWN_STREAM)
    draw(session, OWN_STREAM, number)
    fake.break_stream(session.id)
    fake.clock.advance(1.5)
    fake.expire()
    assert session.report_batch(None) == 0
    assert session.next_grant(OWN_STREAM, number) is None
    assert fake.dataset_status("training").acknowledged == 0
    assert begin(session, OWN_STREAM) > number
