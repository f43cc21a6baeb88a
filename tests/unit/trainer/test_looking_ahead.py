"""Which calls for leases say that they are made ahead of need: those that the master may refuse."""

from __future__ import annotations

import pytest
from trainer_kit import Master, Shell


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def shell(master: Master) -> Shell:
    return Shell(master)


def test_workers_of_an_elastic_loader_ask_ahead_and_its_loop_asks_for_what_it_needs(
    master: Master, shell: Shell
) -> None:
    number = shell.begin_elastic()
    while shell.next("worker 0", number) is not None:
        pass
    told = [(call.drained, call.ahead) for call in master.of("lease")]
    assert told == [(True, False), *[(False, True)] * (len(told) - 1)]
    assert len(told) > 2


def test_plain_loops_ask_for_what_they_need(master: Master, shell: Shell) -> None:
    """Refused, a plain loop would take its pass for over."""
    while shell.fetch() is not None:
        pass
    assert len(master.of("lease")) > 2
    assert not any(call.ahead for call in master.of("lease"))
