"""The table of phases: what may follow on what, and nothing else does."""

from __future__ import annotations

from enum import Enum
from itertools import product
from typing import Any

import pytest

from edl_torch.errors import AccountingError
from edl_torch.trainer.inflight import LeaseQueue
from edl_torch.trainer.outbox import Outbox
from edl_torch.trainer.vocabulary import (
    ASKING,
    LOOP,
    MEMBERSHIP,
    TELLING,
    Asking,
    Loop,
    Membership,
    Table,
    Telling,
)

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
