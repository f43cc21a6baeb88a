"""What the answer to leases that were presented does not cover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edl_torch import DataShardService
from edl_torch.client.handle import DirectLink
from edl_torch.client.leases import Mode
from edl_torch.client.session import Session
from edl_torch.core.calls import ConfirmAnswer, ConfirmCall, Grant, LeaseAnswer, LeaseCall
from edl_torch.testing import FakeMaster

RECORDS, SHARD = 64, 8
STALL_S = 30.0
TIMEOUT_S = 600.0


class Slow:
    """A connection to the fake master on which things happen before and after calls."""

    def __init__(self, fake: FakeMaster) -> None:
        self._connection = fake.connect()
        self.confirms: list[ConfirmCall] = []
        self.before_confirm: Callable[[], object] = lambda: None
        self.after_confirm: Callable[[], object] = lambda: None
        self.after_lease: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def lease(self, call: LeaseCall, wait_s: float = 0.0) -> LeaseAnswer:
        answer = self._connection.lease(call, wait_s)
        meddle, self.after_lease = self.after_lease, lambda: None
        meddle()
        return answer

    def confirm(self, call: ConfirmCall) -> ConfirmAnswer:
        self.confirms.append(call)
        meddle, self.before_confirm = self.before_confirm, lambda: None
        meddle()
        answer = self._connection.confirm(call)
        meddle, self.after_confirm = self.after_confirm, lambda: None
        meddle()
        return answer


@pytest.fixture
def fake() -> FakeMaster:
    return FakeMaster(lease_timeout_s=TIMEOUT_S, grace_s=TIMEOUT_S, progress_timeout_s=STALL_S)


def stall(fake: FakeMaster) -> None:
    """The master takes all leases for want of progress; the sessions stay."""
    fake.clock.advance(STALL_S)
    assert any(released.slices for released in fake.expire())


def draw(session: Session) -> Grant:
    link = DirectLink(session)
    link.begin(Mode.ELASTIC)
    grant = link.next()
    assert grant is not None
    return grant


def hand(session: Session, grant: Grant) -> bool:
    return session.elastic.hand(((grant.task, grant.slice.skip, grant.slice.stop),))


def test_a_lease_that_came_while_others_waited_to_be_presented_is_presented_too(fake: FakeMaster) -> None:
    slow: Any = Slow(fake)
    with DataShardService(4, slow, dataset_size=RECORDS, records_per_shard=SHARD) as service:
        session = service.session
        session.elastic.open()
        grants = [draw(session)]

        def while_the_stream_is_away() -> None:
            grants.append(draw(session))
            stall(fake)

        slow.before_confirm = while_the_stream_is_away
        fake.break_stream(session.id)
        assert not hand(session, grants[0])
        assert [[task for task, _ in call.leases] for call in slow.confirms] == [[1], [2]]
        assert not session.book, "another trainer may have them"
        session.elastic.close(1)


def test_a_lease_whose_answer_was_on_its_way_when_others_were_presented_is_presented_too(
    fake: FakeMaster,
) -> None:
    slow: Any = Slow(fake)
    with DataShardService(4, slow, dataset_size=RECORDS, records_per_shard=SHARD) as service:
        session = service.session
        session.elastic.open()
        first = draw(session)

        def meanwhile() -> None:
            stall(fake)
            assert not hand(session, first)
            assert slow.confirms

        slow.after_lease = meanwhile
        late = draw(session)
        assert not hand(session, late), "another trainer may have it"
        session.elastic.close(1)


def test_an_answer_that_the_trainer_slept_over_is_not_believed(fake: FakeMaster) -> None:
    slow: Any = Slow(fake)
    with DataShardService(4, slow, dataset_size=RECORDS, records_per_shard=SHARD) as service:
        session = service.session
        session.elastic.open()
        grant = draw(session)

        def sleep() -> None:
            fake.clock.advance(TIMEOUT_S)
            fake.expire()

        slow.after_confirm = sleep
        fake.break_stream(session.id)
        assert not hand(session, grant), "another trainer may have it"
        session.elastic.close(1)
