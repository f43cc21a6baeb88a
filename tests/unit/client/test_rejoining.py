"""A session that was given up takes part anew while calls of before are still on their way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from edl_torch import DataShardService
from edl_torch.client.confirming import Confirmer
from edl_torch.client.description import Description
from edl_torch.client.handle import DirectLink
from edl_torch.client.leases import LeaseSource, Mode
from edl_torch.client.session import Session
from edl_torch.client.threads import Condition, SystemThreads, Thread
from edl_torch.core.calls import (
    DatasetStatus,
    Fence,
    FencedCall,
    LeaseAnswer,
    LeaseCall,
    RegisterAnswer,
    RegisterCall,
    ReportAnswer,
    ReportCall,
)
from edl_torch.errors import SessionLost
from edl_torch.testing import FakeMaster

RECORDS, SHARD = 64, 8
TIMEOUT_S = 30.0


class Meddler:
    """A connection to the fake master: `after_lease` and `after_register` happen before an answer arrives."""

    def __init__(self, fake: FakeMaster, *, in_process: bool = True) -> None:
        self._connection = fake.connect(in_process=in_process)
        self.lease_calls: list[LeaseCall] = []
        self.lease_answers: list[LeaseAnswer] = []
        self.reports: list[ReportCall] = []
        self.questions: list[FencedCall] = []
        self.after_lease: Callable[[], object] = lambda: None
        self.after_register: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def register(self, call: RegisterCall) -> RegisterAnswer:
        answer = self._connection.register(call)
        self.after_register()
        return answer

    def lease(self, call: LeaseCall, wait_s: float = 0.0) -> LeaseAnswer:
        self.lease_calls.append(call)
        answer = self._connection.lease(call, wait_s)
        self.lease_answers.append(answer)
        meddle, self.after_lease = self.after_lease, lambda: None
        meddle()
        return answer

    def report(self, call: ReportCall) -> ReportAnswer:
        self.reports.append(call)
        return self._connection.report(call)

    def progress(self, call: FencedCall) -> DatasetStatus:
        self.questions.append(call)
        return self._connection.progress(call)


@pytest.fixture
def fake() -> FakeMaster:
    return FakeMaster(lease_timeout_s=TIMEOUT_S)


@pytest.fixture
def meddler(fake: FakeMaster) -> Any:
    return Meddler(fake)


def give_up_all(fake: FakeMaster) -> None:
    fake.clock.advance(TIMEOUT_S)
    fake.expire()


def read(session: Session) -> int:
    """What one inner pass reads, trained on; returns how many records."""
    link = DirectLink(session)
    link.begin(Mode.ELASTIC)
    trained = 0
    while (grant := link.next()) is not None:
        ticket = ((grant.task, grant.slice.skip, grant.slice.stop),)
        if session.elastic.hand(ticket):
            session.elastic.batch_requested()
            trained += grant.slice.limit
    return trained


def train_through(session: Session) -> None:
    number = session.elastic.open()
    while session.elastic.more_to_read():
        read(session)
    session.elastic.close(number)


def begin(session: Session) -> None:
    """A first batch is with the loop."""
    session.elastic.open()
    assert session.elastic.more_to_read()
    link = DirectLink(session)
    link.begin(Mode.ELASTIC)
    grant = link.next()
    assert grant is not None
    assert session.elastic.hand(((grant.task, grant.slice.skip, grant.slice.stop),))


def test_the_member_that_was_given_up_says_all_that_it_was_answered_before_it_is_forgotten(
    fake: FakeMaster, meddler: Any
) -> None:
    """The call that found it out may be a repeat of one from before the last answer. If the master's journal
    went back meanwhile, nothing else proves it: the new member was answered nothing yet."""
    with DataShardService(4, meddler, dataset_size=RECORDS, records_per_shard=SHARD) as service:
        begin(service.session)
        service.session.elastic.batch_requested()
        earlier = service.session._joining.membership
        give_up_all(fake)
        service.session.flush()
        service.session.elastic.close(1)
        train_through(service.session)
        told = meddler.questions[0]
        assert service.session._joining.membership != earlier
    assert (told.fence.member, told.reported) == (earlier.member, meddler.reports[0].request)
    assert told.asked == meddler.lease_calls[0].request


def test_a_lease_call_between_a_registration_and_its_answer_is_lent_nothing(
    fake: FakeMaster, meddler: Any
) -> None:
    """The session throws away what it held when the answer comes: it would never give that lease back."""
    with DataShardService(4, meddler, dataset_size=RECORDS, records_per_shard=SHARD) as service:
        begin(service.session)
        give_up_all(fake)

        def lease_as_before() -> None:
            late = meddler.lease_calls[-1]
            with pytest.raises(SessionLost, match="registered again"):
                meddler.lease(replace(late, request=late.request + 1))

        meddler.after_register = lease_as_before
        service.session.elastic.batch_requested()  # the report finds out
        meddler.after_register = lambda: None
        assert fake.dataset_status("training").leases == 0
        assert service.session.book.records == 0
        service.session.elastic.close(1)
        train_through(service.session)
        assert service.finished
    fake.outcomes["training"].check_complete(1)


def test_leases_that_arrive_after_their_session_took_part_anew_are_void(
    fake: FakeMaster, meddler: Any
) -> None:
    with DataShardService(4, meddler, dataset_size=RECORDS, records_per_shard=SHARD) as service:
        begin(service.session)

        def be_given_up() -> None:
            give_up_all(fake)
            service.session.elastic.batch_requested()  # the report finds out

        meddler.after_lease = be_given_up
        link = DirectLink(service.session)
        link.begin(Mode.ELASTIC)
        grant = link.next()
        assert grant is not None
        _, void, good = meddler.lease_answers
        assert grant in good.grants
        assert void.grants
        assert service.session.book.held() == ((grant.task, grant.attempt),)
        service.session.elastic.close(1)
        assert {back.task for call in meddler.reports for back in call.give_backs} == {grant.task}
        train_through(service.session)
        assert service.finished
    fake.outcomes["training"].check_complete(1)


def test_calls_name_the_member_that_the_session_is(fake: FakeMaster, meddler: Any) -> None:
    with DataShardService(4, meddler, dataset_size=RECORDS, records_per_shard=SHARD) as service:
        begin(service.session)
        give_up_all(fake)
        service.session.elastic.batch_requested()
        read(service.session)
        assert {call.fence.member for call in meddler.lease_calls} == {1, 2}
        assert [call.fence.member for call in meddler.reports] == [1] + [2] * (len(meddler.reports) - 1)
        assert fake.presence_of(service.session.id).member == 2
        service.session.elastic.close(1)


def test_what_is_forgotten_and_what_comes_next_are_not_mixed(fake: FakeMaster) -> None:
    """Nobody asks as the new member before all that the old one held is forgotten."""
    source = LeaseSource(
        fake,
        "s",
        "training",
        confirmer=Confirmer(
            fake, "s", "training", held=lambda: (), on_void=lambda _: None, on_lost=lambda _: None
        ),
        on_grant=lambda _: None,
        on_unwanted=lambda _: None,
        on_lost=lambda _: None,
        holds=lambda: False,
    )
    came_in = threading.Event()

    def come_in() -> None:
        source.open(Mode.ELASTIC)
        came_in.set()

    other = threading.Thread(target=come_in)

    def forget() -> None:
        other.start()
        assert not came_in.wait(0.05)

    source.follow(Fence(ledger="fake", lineage=1, member=2), forget)
    other.join(10.0)
    assert came_in.is_set()


class TellingCondition(threading.Condition):
    """Calls `on_exit`, once, when its lock was let go."""

    on_exit: Callable[[], object] | None = None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        told, self.on_exit = self.on_exit, None
        if told is not None:
            told()


class NoThread:
    """A thread whose turn never comes."""

    def start(self) -> None:
        pass

    def join(self, timeout_s: float) -> None:
        pass

    def is_alive(self) -> bool:
        return False


class ToldThreads(SystemThreads):
    """No threads: a test does in their place what it wants to be done, and when."""

    def condition(self) -> Condition:
        return TellingCondition()

    def thread(self, target: Callable[[], None], name: str) -> Thread:
        return NoThread()


def test_what_becomes_of_the_new_members_first_lease_is_told(fake: FakeMaster) -> None:
    """The reporter throws away what the old member had to say before anybody may ask as the new one: a lease
    that is given back in between, and of which the master never hears, is on loan for ever."""
    meddler: Any = Meddler(fake, in_process=False)
    description = Description(name="training", batch_size=4, dataset_size=RECORDS, records_per_shard=SHARD)
    session = Session(meddler, description, 0, threads=ToldThreads())
    begin(session)
    give_up_all(fake)

    def lease_and_give_back() -> None:
        """As the fetching thread does that gets its turn at once, while another trainer waits."""
        assert session._leases.look_for_more()
        session._leases.yield_to_others()

    def arm() -> None:
        session._leases._changed.on_exit = lease_and_give_back  # type: ignore[attr-defined]

    meddler.after_register = arm
    session.elastic.batch_requested()
    session.flush()  # the report finds out
    meddler.after_register = lambda: None
    assert [call.fence.member for call in meddler.lease_calls][-1] == 2
    session.flush()
    assert fake.dataset_status("training").leases == 0
    session.close()
