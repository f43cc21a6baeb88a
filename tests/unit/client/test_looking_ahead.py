"""Which calls for leases say that they are made ahead of need: those that the master may refuse."""

from __future__ import annotations

from typing import Any

import pytest

from edl_torch import DataShardService
from edl_torch.client.leases import Mode
from edl_torch.core.calls import LeaseAnswer, LeaseCall
from edl_torch.testing import FakeMaster


class Listener:
    """A connection to the fake master that keeps the calls for leases."""

    def __init__(self, fake: FakeMaster) -> None:
        self._connection = fake.connect()
        self.calls: list[LeaseCall] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def lease(self, call: LeaseCall, wait_s: float = 0.0) -> LeaseAnswer:
        self.calls.append(call)
        return self._connection.lease(call, wait_s)


@pytest.fixture
def listener() -> Any:
    return Listener(FakeMaster())


def test_workers_of_an_elastic_loader_ask_ahead_and_its_loop_asks_for_what_it_needs(listener: Any) -> None:
    with DataShardService(4, listener, dataset_size=64) as service:
        session = service.session
        number = session.elastic.open()
        assert session.elastic.more_to_read()
        session.begin_stream("worker 0", Mode.ELASTIC)
        while session.next_grant("worker 0", number) is not None:
            pass
        told = [(call.drained, call.ahead) for call in listener.calls]
        assert told == [(True, False), *[(False, True)] * (len(told) - 1)]
        assert len(told) > 2
        session.elastic.close(number)


def test_plain_loops_ask_for_what_they_need(listener: Any) -> None:
    """Refused, a plain loop would take its pass for over."""
    with DataShardService(4, listener, dataset_size=64) as service:
        while service.fetch_shard() is not None:
            pass
        assert len(listener.calls) > 2
        assert not any(call.ahead for call in listener.calls)
