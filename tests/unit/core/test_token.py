"""The token's format, fixed for ever, and what it is refused for."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from edl_torch.core.calls import NEW_PASS
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.registration import identity
from edl_torch.core.token import Token
from edl_torch.errors import TokenError
from edl_torch.shard import DatasetSpec, Slice, Source

SPEC = DatasetSpec(
    name="training",
    sources=(Source(name="a.csv", count=20), Source(name="b.csv", count=5)),
    records_per_shard=8,
    max_bad_records=1,
)

GOLDEN = (
    '{"version":1,"identity":{"sources":"RANGES","names":"NAMES","below":"NAMES","num_sources":2,"size":25,'
    '"records_per_shard":8,"seed":0,"shuffle":false,"shuffle_shards":false,"shuffle_in_shard":false},"cursor":[0,2,0],'
    '"open":[[0,0,3,3],[0,0,7,1],[0,1,4,4]],"crumbs":[[0,1,2,2]],'
    '"quarantine":[[0,0,6,"a.csv",6,"truncated"]],"acknowledged":5,"dropped":0}'
)
for _field, _text in (("sources", "RANGES"), ("names", "NAMES")):
    GOLDEN = GOLDEN.replace(_text, str(identity(SPEC)[_field]))


def position() -> ShardLedger:
    """A ledger with something of everything."""
    ledger = ShardLedger(SPEC)
    ledger.join("s", 8)
    first, second = ledger.lease("s", epoch=NEW_PASS, count=2)[2]
    ledger.acknowledge("s", first.task, first.attempt, 3)
    ledger.fail("s", first.task, first.attempt, 6, "truncated")
    ledger.give_back("s", second.task, second.attempt, 4)
    ledger.acknowledge("s", second.task, second.attempt, 2)
    ledger.give_back("s", second.task, second.attempt, 2, remainder=True)
    return ledger


def test_the_token_of_a_known_position_never_changes() -> None:
    assert position().snapshot().encode() == GOLDEN


def windowed(window: int) -> DatasetSpec:
    return replace(SPEC, shuffle_shards=True, shuffle_in_shard=True, shuffle_window=window)


def test_a_token_names_the_window_and_is_of_no_other_dataset() -> None:
    ledger = ShardLedger(windowed(2))
    ledger.join("s", 8)
    (first,) = ledger.lease("s", epoch=NEW_PASS, count=1)[2]
    ledger.acknowledge("s", first.task, first.attempt, 3)
    token = Token.decode(ledger.snapshot().encode())
    assert token.option("shuffle_window") == 2
    assert Token.decode(GOLDEN).option("shuffle_window") == 1
    again = ShardLedger(windowed(2))
    again.restore(token)
    assert again.snapshot() == token
    with pytest.raises(TokenError, match="shuffle_window: registered 1, asked 2"):
        ShardLedger(windowed(1)).restore(token)
    with pytest.raises(TokenError, match="shuffle_window: registered 2, asked 1"):
        ShardLedger(windowed(2)).restore(ShardLedger(windowed(1)).snapshot())


def test_a_slice_of_a_shard_inside_of_a_window_is_damaged() -> None:
    ledger = ShardLedger(windowed(2))
    inside = ledger.plan.shard_at(0, 1)
    token = replace(ledger.snapshot(), position=1, open=(Slice(epoch=0, shard=inside, skip=0, limit=1),))
    with pytest.raises(TokenError, match="no window"):
        ledger.restore(token)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"records_per_shard": 4}, "records_per_shard: registered 4, asked 8"),
        ({"sources": (Source(name="a.csv", count=25),)}, "sources .*num_sources: registered 1, asked 2"),
    ],
)
def test_a_token_of_another_dataset_is_refused_field_by_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(TokenError, match=named):
        ShardLedger(replace(SPEC, **change)).restore(Token.decode(GOLDEN))


def test_a_token_of_a_newer_version_is_refused() -> None:
    with pytest.raises(TokenError, match="token version 2 is not known here"):
        Token.decode(GOLDEN.replace('"version":1', '"version":2'))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "7",
        '"token"',
        "{}",
        '{"version":1}',
        GOLDEN[:-1],
        GOLDEN[: len(GOLDEN) // 2],
        GOLDEN.replace("[0,2,0]", "[0,2]"),
        GOLDEN.replace("[0,2,0]", "[0,-2,0]"),
        GOLDEN.replace("[0,2,0]", "[0,2.5,0]"),
        GOLDEN.replace("[0,2,0]", "[0,true,0]"),
        GOLDEN.replace("[0,0,3,3]", "[0,0,3]"),
        GOLDEN.replace("[0,0,3,3]", '[0,0,3,"3"]'),
        GOLDEN.replace('"acknowledged":5', '"acknowledged":null'),
        GOLDEN.replace('"open":[', '"closed":['),
        GOLDEN.replace('"records_per_shard":8,', ""),
    ],
)
def test_a_damaged_token_is_refused(text: str) -> None:
    with pytest.raises(TokenError):
        ShardLedger(SPEC).restore(Token.decode(text))


@pytest.mark.parametrize(
    "text", ["{}", "x", GOLDEN.replace('"identity":{', '"identity":[{').replace("},", "}],")]
)
def test_a_damaged_token_is_told_from_a_foreign_one(text: str) -> None:
    with pytest.raises(TokenError, match=r"service\.state_dict\(\)"):
        Token.decode(text)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("[0,2,0]", "[0,9,0]", "position 9"),
        ("[0,2,0]", "[0,2,8]", "cursor is at record 8"),
        ("[0,0,3,3]", "[0,0,3,9]", "not a part of its shard"),
        ("[0,0,3,3]", "[0,0,3,0]", "not a part of its shard"),
        ("[0,0,3,3]", "[0,11,3,3]", "shard 11"),
        ("[0,0,3,3]", "[0,0,3,5]", "overlaps"),
        ("[0,1,2,2]", "[0,1,2,3]", "overlaps"),
        ("[0,0,3,3]", "[0,2,0,1]", "beyond the cursor"),
        ("[0,0,3,3]", "[1,0,3,3]", "beyond the cursor"),
        ('[0,0,6,"a.csv"', '[0,0,9,"a.csv"', "not a part of its shard"),
        ('[0,0,6,"a.csv"', '[0,0,5,"a.csv"', "overlaps"),
        ('[0,0,6,"a.csv"', '[0,2,0,"a.csv"', "beyond the cursor"),
        (
            '"acknowledged":5',
            '"acknowledged":4',
            "16 records lie before the cursor, but 15 are",
        ),
        ('"acknowledged":5', '"acknowledged":6', "17 are accounted for: 6 acknowledged, 0 dropped, 1 in"),
        ('"acknowledged":5', f'"acknowledged":{2**62}', "16 records lie before the cursor"),
        ('"dropped":0', f'"dropped":{2**62}', "16 records lie before the cursor"),
        ('"dropped":0', '"dropped":1', "17 are accounted for"),
        ("[0,0,3,3],", "", "13 are accounted for"),
        ("[[0,1,2,2]]", "[]", "14 are accounted for"),
        ('[[0,0,6,"a.csv",6,"truncated"]]', "[]", "15 are accounted for"),
        ("[0,2,0]", "[1,2,0]", "41 records lie before the cursor"),
        ("[0,2,0]", f"[{2**62},2,0]", "no job comes further"),
    ],
)
def test_a_token_that_is_no_position_of_the_dataset_is_refused(old: str, new: str, why: str) -> None:
    assert old in GOLDEN
    with pytest.raises(TokenError, match=why):
        ShardLedger(SPEC).restore(Token.decode(GOLDEN.replace(old, new)))


def test_a_token_tells_how_records_were_shuffled() -> None:
    token = Token.decode(GOLDEN)
    assert (token.option("shuffle_in_shard"), token.option("shuffle_window")) == (False, 1)
    windowed = replace(token, identity={**token.identity, "shuffle_in_shard": True, "shuffle_window": 4})
    assert (windowed.option("shuffle_in_shard"), windowed.option("shuffle_window")) == (True, 4)
    assert replace(token, identity={"records_per_shard": 8}).option("shuffle_in_shard") is None


def test_the_token_of_a_billion_records_and_64_trainers_is_small(capsys: pytest.CaptureFixture[str]) -> None:
    spec = replace(
        SPEC, sources=(Source(name="a", count=10**9),), records_per_shard=256, shuffle_shards=True,
        shuffle_in_shard=True,
    )  # fmt: skip
    ledger = ShardLedger(spec)
    for trainer in range(64):
        ledger.join(f"session-{trainer}", 32)
        for grant in ledger.lease(f"session-{trainer}", epoch=NEW_PASS, count=10)[2]:
            ledger.acknowledge(f"session-{trainer}", grant.task, grant.attempt, grant.slice.skip + 32)
    text = ledger.snapshot().encode()
    fresh = ShardLedger(spec)
    started = time.process_time()
    fresh.restore(Token.decode(text))
    elapsed = time.process_time() - started
    with capsys.disabled():
        print(f" [{len(text)} bytes, restored in {elapsed * 1000:.1f} ms] ", end="")
    assert len(json.loads(text)["open"]) == 640
    assert len(text) < 64 * 1024
    assert elapsed < 1.0
    assert fresh.backlog.records == 10**9 - 640 * 32


@pytest.mark.parametrize("barrier", [True, False])
def test_every_token_of_a_job_without_end_is_taken(barrier: bool) -> None:
    spec = replace(SPEC, num_epochs=0, epoch_barrier=barrier, shuffle_shards=True, max_bad_records=99)
    ledger = ShardLedger(spec)
    ledger.join("s", 3)
    for number in range(40):
        for grant in ledger.lease("s", epoch=NEW_PASS, count=2, drained=True)[2]:
            name = "s", grant.task, grant.attempt
            if number % 5 == 0:
                ledger.fail(*name, grant.slice.skip, "bad")
            elif number % 3 == 0:
                ledger.give_back(*name, grant.slice.stop - 1, remainder=bool(number % 2))
            ShardLedger(spec).restore(Token.decode(ledger.snapshot().encode()))
            ledger.acknowledge(*name, grant.slice.stop - (number % 3 == 0 and number % 5 != 0))
    token = ledger.snapshot()
    assert token.epoch >= 2
    assert token.dropped or not barrier
    assert token.quarantine
    ShardLedger(spec).restore(token)


@pytest.mark.parametrize(
    ("size", "num_epochs", "epochs"), [(2**62, 0, 1), (2**61, 0, 2), (2**60, 2**63, 4), (2**61 + 1, 3, 1)]
)
def test_no_count_ever_exceeds_what_a_token_and_the_wire_can_say(
    size: int, num_epochs: int, epochs: int
) -> None:
    """A caller may acknowledge a whole epoch in one call, however large he says that it is."""
    spec = replace(
        SPEC, sources=(Source(name="a", count=size),), records_per_shard=size, num_epochs=num_epochs
    )
    ledger = ShardLedger(spec)
    ledger.join("s", size)
    ended = 0
    while grants := ledger.lease("s", epoch=NEW_PASS, count=1)[2]:
        ledger.acknowledge("s", grants[0].task, grants[0].attempt, grants[0].slice.stop)
        ended += 1
        assert ended <= epochs
        ShardLedger(spec).restore(Token.decode(ledger.snapshot().encode()))
    assert (ended, ledger.finished, ledger.acknowledged) == (epochs, True, epochs * size)
