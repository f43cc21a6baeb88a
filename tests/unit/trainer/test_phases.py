"""The table of phases: what may follow on what, and nothing else does."""

from __future__ import annotations

from enum import Enum
from itertools import product
from typing import Any

import pytest

from edl_torch.errors import AccountingError
from edl_torch.trainer.outbox import Outbox
from edl_torch.trainer.phases import TABLE, Asking, Loop, Member, Telling, moved
from edl_torch.trainer.supply import Supply

PARTS: list[tuple[type[Enum], Enum]] = [
    (Member, Member.NEW),
    (Loop, Loop.IDLE),
    (Asking, Asking.IDLE),
    (Telling, Telling.IDLE),
]
PAIRS = [(phase, to) for part, _ in PARTS for phase, to in product(part, part)]


@pytest.mark.parametrize(("phase", "to"), PAIRS, ids=str)
def test_what_the_table_has_is_done_and_all_else_is_refused(phase: Any, to: Any) -> None:
    if to in TABLE[phase]:
        assert moved(phase, to) is to
    else:
        with pytest.raises(
            AccountingError, match=f"{type(phase).__name__} is {phase.name}: it cannot become"
        ):
            moved(phase, to)


def test_no_part_becomes_a_phase_of_another() -> None:
    assert all(type(phase) is type(to) for phase, follows in TABLE.items() for to in follows)


def test_every_phase_has_its_row() -> None:
    assert set(TABLE) == {phase for part, _ in PARTS for phase in part}


@pytest.mark.parametrize(("part", "first"), PARTS)
def test_every_phase_is_reached_from_the_first_one_and_has_a_way_on(part: type[Enum], first: Any) -> None:
    reached, found = set(), {first}
    while found:
        reached |= found
        found = {to for phase in found for to in TABLE[phase]} - reached
    assert reached == set(part)
    assert all(TABLE[phase] for phase in reached)


def test_a_refused_change_leaves_the_phase_of_the_calls_for_leases() -> None:
    supply = Supply(ahead=False)
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
