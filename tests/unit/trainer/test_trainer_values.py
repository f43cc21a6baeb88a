"""The values of the trainer's side: phases, tickets, measures."""

from __future__ import annotations

import math
from enum import Enum
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edl_torch.core.calls import Fence
from edl_torch.core.status import BOUNDS_S
from edl_torch.errors import AccountingError
from edl_torch.trainer import (
    state,
)
from edl_torch.trainer.inflight import LeaseQueue
from edl_torch.trainer.measuring import Durations, Measuring
from edl_torch.trainer.outbox import Outbox
from edl_torch.trainer.vocabulary import (
    ASKING,
    LOOP,
    MEMBERSHIP,
    TELLING,
    Asking,
    Evidence,
    Loop,
    Membership,
    Table,
    Tally,
    Telling,
    ticket_size,
)


def test_ways_are_in_the_order_of_what_they_prove() -> None:
    assert [(way.value, way.label) for way in Evidence] == [
        (1, "step"),
        (2, "skipped"),
        (3, "unseen"),
        (4, "next"),
        (5, "token"),
        (6, "report"),
        (7, "count"),
        (8, "unstepped"),
    ]
    assert [way.exact for way in Evidence] == [True] * 6 + [False] * 2


def test_to_a_member_that_is_not_remembered_nothing_was_answered() -> None:
    registered = state.Registered()
    registered.answered(Fence(ledger="another"), asked=3, reported=4)
    assert registered.known(Fence(ledger="another")) == (0, 0)
    registered.answered(registered.fence, asked=3)
    registered.answered(registered.fence, reported=4)
    assert registered.known(registered.fence) == (3, 4)


def test_before_the_shell_tells_the_time_it_is_zero() -> None:
    assert state.State(state.TrainerConfig(session="s", dataset="d", batch_size=1)).now == 0.0


# The table of phases: what may follow on what, and nothing else does ----------------------------------------


PARTS: list[tuple[type[Enum], Table[Any], Enum]] = [
    (Membership, MEMBERSHIP, Membership.NEW),
    (Loop, LOOP, Loop.IDLE),
    (Asking, ASKING, Asking.IDLE),
    (Telling, TELLING, Telling.IDLE),
]
PAIRS = [
    pytest.param(table, phase, to, id=f"{phase}-{to}")
    for part, table, _ in PARTS
    for phase, to in product(part, part)
]


@pytest.mark.parametrize(("table", "phase", "to"), PAIRS)
def test_what_the_table_has_is_done_and_all_else_is_refused(table: Table[Any], phase: Any, to: Any) -> None:
    if (phase, to) in set(table):
        assert table[phase, to] is to
    else:
        with pytest.raises(
            AccountingError, match=f"{type(phase).__name__} is {phase.name}: it cannot become {to.name}"
        ):
            table[phase, to]


def test_no_part_becomes_a_phase_of_another() -> None:
    assert all(type(phase) is type(to) is part for part, table, _ in PARTS for phase, to in table)


@pytest.mark.parametrize(("part", "table", "first"), PARTS)
def test_every_phase_is_reached_from_the_first_one_and_has_a_way_on(
    part: type[Enum], table: Table[Any], first: Any
) -> None:
    reached, found = set(), {first}
    while found:
        reached |= found
        found = {to for phase, to in table if phase in found} - reached
    assert reached == set(part) == {phase for phase, _ in table}


def test_a_refused_change_leaves_the_phase_of_the_calls_for_leases() -> None:
    supply = LeaseQueue(ahead=False)
    with pytest.raises(AccountingError):
        supply.end_asking()
    assert (supply.phase, supply.answers) == (Asking.IDLE, 0)
    supply.begin_asking()
    with pytest.raises(AccountingError):
        supply.begin_asking()
    assert supply.phase is Asking.ASKING


def test_a_refused_change_leaves_the_phase_of_the_reports() -> None:
    outbox = Outbox()
    with pytest.raises(AccountingError):
        outbox.unanswered_by(outbox._unsent.fence, None)
    assert outbox.phase is Telling.IDLE


# Positions drawn, cut into the tickets of batches -----------------------------------------------------------


def test_tally_cuts_a_ticket_out_of_several_leases() -> None:
    tally = Tally()
    tally.start(1, 8)[2] = 10
    run = tally.start(2, 0)
    run[2] = 2
    ticket, size = tally.take()
    assert ticket == ((1, 8, 10), (2, 0, 2))
    assert ticket_size(ticket) == size == 4
    run[2] = 5
    assert tally.take() == (((2, 2, 5),), 3)
    assert tally.take() == ((), 0)
    run[2] = 6
    tally.clear()
    assert tally.take() == ((), 0)


# Counters that the training loop adds to, and what is seen of them ------------------------------------------


def bucket_of(seconds: float) -> int:
    durations = Durations()
    durations.add(seconds)
    durations.histogram().check("a duration")
    return durations.histogram().counts.index(1)


@given(seconds=st.floats(0, 1e9))
def test_a_duration_is_counted_between_its_bounds(seconds: float) -> None:
    bucket = bucket_of(seconds)
    assert (0.0, *BOUNDS_S)[bucket] <= seconds
    assert seconds < (*BOUNDS_S, math.inf)[bucket]


def test_what_is_too_short_or_too_long_is_in_the_first_and_the_last_bucket() -> None:
    assert [bucket_of(seconds) for seconds in (0.0, 1e-9, 0.01, 1000.0)] == [0, 0, 10, 26]


def test_measures_are_those_of_the_moment() -> None:
    measuring = Measuring()
    measuring.reported(4)
    measuring.waited.add(0.5)
    measuring.stepped.add(1.5)
    before = measuring.measures()
    measuring.reported(0)
    measuring.waited.add(0.5)
    measuring.reported(3)
    measuring.waited_for_ranks_s += 0.25
    measuring.made(0.5, 0.125)
    measuring.made(1.5, 0.25)
    after = measuring.measures()
    assert (before.batches, before.records, before.waited.sum_s, before.waiting_share) == (1, 4, 0.5, 0.25)
    assert (before.timed, after.timed, after.read_s, after.transform_s) == (0, 2, 2.0, 0.375)
    assert (after.batches, after.records, after.waited.sum_s, after.waited_for_ranks_s) == (3, 7, 1.0, 0.25)
