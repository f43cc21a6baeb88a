"""Bad records: how often each was met, the bytes of a token that they take, where passes meet them again."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from edl_torch.core.calls import NEW_PASS
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.plan import Plan
from edl_torch.core.quarantine import Quarantine, QuarantinedRecord, places_of, quarantine_row, quarantined
from edl_torch.core.registration import new_spec
from edl_torch.core.token import Token
from edl_torch.errors import TokenError
from edl_torch.shard import (
    Component,
    DatasetSpec,
    Indices,
    MixtureWeights,
    Registration,
    Slice,
    Source,
)


def bad(index: int, *passes: int, name: str = "c:a") -> QuarantinedRecord:
    return QuarantinedRecord(
        epoch=0, shard=0, position=index, name=name, index=index, reason="torn", passes=passes
    )


def size_of(records: Quarantine) -> int:
    return len(json.dumps([quarantine_row(each) for each in records], separators=(",", ":"))) - 1


def test_a_record_was_met_in_the_passes_of_its_runs_and_those_of_another_join_them() -> None:
    one, other = bad(0, 2, 5, 9, 10), bad(0, 5, 6, 8, 9)
    assert [number for number in range(12) if one.was_met_in(number)] == [2, 3, 4, 9]
    assert (one.times, one.with_passes_of(other).passes, bad(0).times) == (4, (2, 6, 8, 10), 1)
    assert quarantined(quarantine_row(one)) == one


def test_what_more_passes_add_to_a_token_is_within_what_was_said_before() -> None:
    """Also of a record that fails in every other pass, which grows by a run each time."""
    records = Quarantine()
    for turn in range(1 << 61, (1 << 61) + 400, 2):
        new = [bad(1, turn, turn + 1), bad(2, turn, turn + 1)]
        count, size = records.with_more(new)
        for each in new:
            records.add(each)
        assert (count, len(list(records))) == (2, 2)
        assert records.bytes == size_of(records) <= size <= records.bytes + 80


def test_places_of_bad_records_are_found_as_one_after_the_other_finds_them() -> None:
    noise = np.random.default_rng(5)
    names = ("c:a", "c:b", "d:a")
    numbers, sources, passes = (noise.integers(0, most, 500) for most in (9, 3, 7))
    of_one, of_all = Indices(names, numbers, None, passes), Indices(names, numbers, sources, passes)
    records = [bad(index, 1, 3, 5, 6, name=name) for name, index in product(("c:a", "d:a", "e:a"), (0, 4, 8))]
    known = {(each.name, each.index): each for each in records}
    for found in (of_one, of_all):
        expected = [
            place
            for place, record in enumerate(found)
            if record in known and known[record].was_met_in(int(passes[place]))
        ]
        assert expected
        assert places_of(records, found) == expected


# Tokens -------------------------------------------------------------------------------------------------

SIZE = 300_000


def mixture(turn: int = 1) -> DatasetSpec:
    components = tuple(
        Component(name=name, sources=(Source(name=name, count=count),), records_per_shard=8)
        for name, count in (("c", 70_001), ("d", 5000))
    )
    return new_spec(
        Registration(
            name="mixed",
            sources=(Source(name="", count=SIZE),),
            components=components,
            weights=(MixtureWeights(start=0, parts=(1, 1)),),
            records_per_shard=SIZE,
            turn=turn,
            max_bad_records=1,
        ),
        batch_size=4,
    )


def token_with(ledger: ShardLedger, **changed: Any) -> Token:
    """The token of a mixture of which a record was met first, and all that follows is open."""
    ledger.join("s", 4)
    (grant,) = ledger.lease("s", epoch=NEW_PASS, count=1)[2]
    ledger.fail("s", grant.task, grant.attempt, 0, "torn")
    return replace(ledger.snapshot(), **changed)


def test_a_token_of_a_mixture_is_damaged_where_a_bad_record_is_open_however_far_behind() -> None:
    """Here in the next pass over its component, 140,002 records later."""
    ledger = ShardLedger(mixture())
    token = token_with(ledger)
    ledger.restore(token)
    (record,) = token.quarantine
    again = replace(record, passes=(0, 1, 1_000_000, 1_000_001))
    plan = Plan(ledger.spec)
    replace(token, quarantine=(again,)).check_passes(plan)
    with pytest.raises(TokenError, match="has a record that is in quarantine"):
        replace(token, quarantine=(replace(record, passes=(0, 2)),)).check_passes(plan)
    (rest,) = token.open
    short = replace(rest, limit=140_001)
    replace(token, open=(short,), quarantine=(replace(record, passes=(0, 2)),)).check_passes(plan)


@pytest.mark.parametrize(
    ("passes", "times", "said"),
    [((), 1, "have passes"), ((0, 1), 2, "there twice")],
)
def test_a_bad_record_of_a_mixture_has_its_passes_and_is_there_once(
    passes: tuple[int, ...], times: int, said: str
) -> None:
    ledger = ShardLedger(mixture())
    (record,) = (token := token_with(ledger)).quarantine
    (rest,) = token.open
    broken = replace(
        token,
        quarantine=tuple(replace(record, passes=passes, position=place) for place in range(times)),
        open=(replace(rest, skip=times, limit=rest.limit - times + 1),),
    )
    with pytest.raises(TokenError, match=said):
        ledger.restore(broken)


def test_a_bad_record_of_other_datasets_has_no_passes() -> None:
    ledger = ShardLedger(
        DatasetSpec(name="d", sources=(Source(name="a", count=8),), records_per_shard=8, max_bad_records=1)
    )
    token = token_with(ledger)
    (record,) = token.quarantine
    ledger.restore(token)
    more = replace(record, passes=(0, 5))
    (rest,) = token.open
    with pytest.raises(TokenError, match="of other datasets none"):
        ledger.restore(
            replace(token, quarantine=(more,), open=(replace(rest, skip=5, limit=rest.limit - 4),))
        )


def test_a_cursor_in_the_middle_of_a_turn_is_damaged() -> None:
    ledger = ShardLedger(mixture(turn=4))
    token = replace(ledger.snapshot(), position=0, offset=6, open=(Slice(epoch=0, shard=0, skip=0, limit=6),))
    with pytest.raises(TokenError, match="in the middle of a turn of 4 records"):
        ledger.restore(token)
    ledger.restore(replace(token, offset=8, open=(Slice(epoch=0, shard=0, skip=0, limit=8),)))
