"""A call for leases that ends without its answer, as by Ctrl-C, costs no record its outcome."""

from __future__ import annotations

from typing import Any

import pytest

from edl_torch import DataShardService
from edl_torch.client.handle import DirectLink
from edl_torch.client.leases import Mode
from edl_torch.client.session import Session
from edl_torch.core.calls import LeaseAnswer, LeaseCall
from edl_torch.errors import MasterUnavailable
from edl_torch.testing import FakeMaster

RECORDS, SHARD = 64, 8


class Cut:
    """A connection to the fake master whose call number `cut` is answered, and the answer lost on the way."""

    def __init__(self, fake: FakeMaster, cut: int, error: BaseException, *, in_process: bool) -> None:
        self._connection = fake.connect(in_process=in_process)
        self._cut = cut
        self._error = error
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def lease(self, call: LeaseCall, wait_s: float = 0.0) -> LeaseAnswer:
        answer = self._connection.lease(call, wait_s)
        self._calls += 1
        if self._calls == self._cut:
            assert answer.grants
            raise self._error
        return answer


def train_through(session: Session) -> int:
    """One pass, as a loader makes it; returns how many records it trained on."""
    number = session.elastic.open()
    trained = 0
    try:
        while session.elastic.more_to_read():
            link = DirectLink(session)
            link.begin(Mode.ELASTIC)
            while (grant := link.next()) is not None:
                ticket = ((grant.task, grant.slice.skip, grant.slice.stop),)
                assert session.elastic.hand(ticket)
                session.elastic.batch_requested()
                trained += grant.slice.limit
    finally:
        session.elastic.close(number)
    return trained


@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize(
    ("in_process", "error"),
    [
        (True, KeyboardInterrupt()),
        (True, RuntimeError("DataLoader worker (pid 7) is killed by signal")),
        (True, MasterUnavailable("no answer")),
        (False, MasterUnavailable("no answer")),
    ],
    ids=["ctrl-c", "dead worker", "silence", "silence from afar"],
)
def test_leases_whose_answer_was_lost_are_given_back(
    in_process: bool, error: BaseException, cut: int
) -> None:
    fake = FakeMaster()
    connection: Any = Cut(fake, cut, error, in_process=in_process)
    with DataShardService(4, connection, dataset_size=RECORDS, records_per_shard=SHARD) as service:
        with pytest.raises(type(error)):
            train_through(service.session)
        assert not service.finished
        assert train_through(service.session) > 0
        assert service.finished
    fake.outcomes["training"].check_complete(1)


def test_a_pass_that_goes_on_after_a_lost_answer_reads_what_it_brought() -> None:
    fake = FakeMaster()
    connection: Any = Cut(fake, 2, MasterUnavailable("no answer"), in_process=True)
    with DataShardService(4, connection, dataset_size=RECORDS, records_per_shard=SHARD) as service:
        shards = [service.fetch_shard()]
        with pytest.raises(MasterUnavailable):
            service.fetch_shard()
        shards.append(service.fetch_shard())
        assert [shard and shard.start for shard in shards] == [0, SHARD]
