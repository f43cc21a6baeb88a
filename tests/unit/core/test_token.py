"""The token's format, fixed for ever, and what it is refused for."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from edl_torch.core.calls import NEW_PASS
from edl_torch.core.identity import identity
from edl_torch.core.ledger import ShardLedger
from edl_torch.core.plan import Plan
from edl_torch.core.token import Token
from edl_torch.errors import TokenError
from edl_torch.shard import DatasetSpec, Source

SPEC = DatasetSpec(
    name="training",
    sources=(Source(name="a.csv", count=20), Source(name="b.csv", count=5)),
    records_per_shard=8,
    max_bad_records=1,
)

GOLDEN = (
    '{"version":1,"identity":{"sources":"DIGEST","num_sources":2,"size":25,"records_per_shard":8,"seed":0,'
    '"shuffle":false,"shuffle_shards":false,"shuffle_in_shard":false},"cursor":[0,2,0],'
    '"open":[[0,0,3,3],[0,0,7,1],[0,1,4,4]],"crumbs":[[0,1,2,2]],'
    '"quarantine":[[0,0,6,"a.csv",6,"truncated"]],"acknowledged":5,"dropped":0}'
).replace("DIGEST", str(identity(SPEC)["sources"]))


def position() -> ShardLedger:
    """A ledger with something of everything."""
    ledger = ShardLedger(SPEC)
    ledger.join("s", 8)
    first, second = ledger.lease("s", epoch=NEW_PASS, count=2)[2]
    ledger.acknowledge("s", first.task, first.attempt, 3)
    ledger.fail("s", first.task, first.attempt, 6, "truncated")
    ledger.give_back("s", second.task, second.attempt, 4)
    ledger.acknowledge("s", second.task, second.attempt, 2)
    ledger.give_back("s", second.task, second.attempt, 2, crumb=True)
    return ledger


def test_the_token_of_a_known_position_never_changes() -> None:
    assert position().snapshot().encode() == GOLDEN


def test_the_golden_token_restores_exactly_its_records() -> None:
    ledger = ShardLedger(SPEC)
    ledger.restore(Token.decode(GOLDEN))
    assert (ledger.todo, ledger.acknowledged, len(ledger.quarantine)) == (19, 5, 1)
    assert ledger.snapshot().encode() == GOLDEN


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"records_per_shard": 4}, "records_per_shard: registered 4, asked 8"),
        ({"seed": 7}, "seed: registered 7, asked 0"),
        ({"shuffle": True}, "shuffle: registered True, asked False"),
        ({"shuffle_shards": True}, "shuffle_shards: registered True, asked False"),
        ({"shuffle_in_shard": True}, "shuffle_in_shard: registered True, asked False"),
        ({"sources": (Source(name="a.csv", count=25),)}, "sources .*num_sources: registered 1, asked 2"),
        ({"sources": (Source(name="a.csv", count=20), Source(name="c.csv", count=5))}, "sources "),
        ({"sources": (Source(name="b.csv", count=5), Source(name="a.csv", count=20))}, "sources "),
    ],
)
def test_a_token_of_another_dataset_is_refused_field_by_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(TokenError, match=named):
        ShardLedger(replace(SPEC, **change)).restore(Token.decode(GOLDEN))


@pytest.mark.parametrize("change", [{"name": "other"}, {"num_epochs": 9}, {"epoch_barrier": False}])
def test_options_of_the_job_are_no_part_of_the_identity(change: dict[str, Any]) -> None:
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
    ],
)
def test_a_token_that_is_no_position_of_the_dataset_is_refused(old: str, new: str, why: str) -> None:
    assert old in GOLDEN
    with pytest.raises(TokenError, match=why):
        ShardLedger(SPEC).restore(Token.decode(GOLDEN.replace(old, new)))


def test_names_and_reasons_of_any_kind_come_back() -> None:
    spec = replace(SPEC, sources=(Source(name='fi"le\n☃\udcff', count=25),))
    ledger = ShardLedger(spec)
    ledger.join("s", 8)
    grant = ledger.lease("s", epoch=NEW_PASS, count=1)[2][0]
    ledger.fail("s", grant.task, grant.attempt, 0, 'not "UTF-8": \udc80')
    text = ledger.snapshot().encode()
    assert text.isascii()
    assert Token.decode(text) == ledger.snapshot()


def test_a_token_tells_the_shard_size() -> None:
    assert Token.decode(GOLDEN).records_per_shard == 8


def test_a_token_with_identity_alone_is_the_beginning() -> None:
    ledger = ShardLedger(SPEC)
    assert Token(identity=identity(SPEC)) == ledger.snapshot()


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
    started = time.perf_counter()
    fresh.restore(Token.decode(text))
    elapsed = time.perf_counter() - started
    with capsys.disabled():
        print(f" [{len(text)} bytes, restored in {elapsed * 1000:.1f} ms] ", end="")
    assert len(json.loads(text)["open"]) == 640
    assert len(text) < 64 * 1024
    assert elapsed < 1.0
    assert fresh.todo == 10**9 - 640 * 32


def test_the_cursor_at_the_end_of_an_epoch_fits() -> None:
    plan = Plan(SPEC)
    Token(identity=identity(SPEC), epoch=0, position=plan.num_shards).check_within(plan)
