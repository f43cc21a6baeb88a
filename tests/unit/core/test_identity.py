"""Two descriptions are the same dataset exactly when their identities agree."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edl_torch.core.identity import differences, identity
from edl_torch.shard import DatasetSpec, Source, TaskType

SPEC = DatasetSpec(
    name="training",
    sources=(Source(name="a", count=10), Source(name="b", start=3, count=7)),
    records_per_shard=4,
)


def test_an_identity_never_changes() -> None:
    assert identity(SPEC) == {
        "sources": "8423e7de06d968e821d3ef23423bde32",
        "num_sources": 2,
        "size": 17,
        "records_per_shard": 4,
        "seed": 0,
        "shuffle": False,
        "shuffle_shards": False,
        "shuffle_in_shard": False,
    }


def test_an_identity_survives_json() -> None:
    spec = replace(SPEC, seed=-(2**90))
    assert json.loads(json.dumps(identity(spec))) == identity(spec)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("records_per_shard", 5),
        ("seed", 7),
        ("shuffle", True),
        ("shuffle_shards", True),
        ("shuffle_in_shard", True),
        ("shuffle_window", 16),
    ],
)
def test_a_field_of_the_order_is_part_of_the_identity(field: str, value: Any) -> None:
    old = getattr(SPEC, field)
    lines = differences(identity(SPEC), identity(replace(SPEC, **{field: value})))
    assert lines == [f"{field}: registered {old}, asked {value}"]


@pytest.mark.parametrize(
    "sources",
    [
        (Source(name="b", start=3, count=7), Source(name="a", count=10)),
        (Source(name="c", count=10), Source(name="b", start=3, count=7)),
        (Source(name="a", start=1, count=10), Source(name="b", start=3, count=7)),
        (Source(name="a", count=9), Source(name="b", start=3, count=8)),
    ],
    ids=["order", "name", "start", "count"],
)
def test_order_names_and_ranges_of_sources_are_part_of_the_identity(sources: tuple[Source, ...]) -> None:
    (line,) = differences(identity(SPEC), identity(replace(SPEC, sources=sources)))
    assert line.startswith("sources (digest of names, ranges and their order): registered 8423e7de")


def test_names_cannot_imitate_the_bounds_between_sources() -> None:
    one = replace(SPEC, sources=(Source(name="a0+1;1:b", count=1),))
    two = replace(SPEC, sources=(Source(name="a", count=1), Source(name="b", count=1)))
    assert identity(one)["sources"] != identity(two)["sources"]


def test_a_file_name_that_is_not_unicode_has_an_identity() -> None:
    odd = replace(SPEC, sources=(Source(name="caf\udce9.jpg", count=1),))
    even = replace(SPEC, sources=(Source(name="café.jpg", count=1),))
    assert identity(odd)["sources"] != identity(even)["sources"]


def test_options_of_the_job_are_no_part_of_the_identity() -> None:
    other = replace(
        SPEC,
        name="other",
        num_epochs=9,
        epoch_barrier=False,
        max_bad_records=3,
        task_type=TaskType.EVALUATION,
    )
    assert differences(identity(SPEC), identity(other)) == []


def test_all_differences_are_listed_in_the_order_of_the_fields() -> None:
    other = replace(SPEC, sources=(Source(name="a", count=10),), seed=7, shuffle=True)
    assert [line.split(":")[0] for line in differences(identity(SPEC), identity(other))] == [
        "sources (digest of names, ranges and their order)",
        "num_sources",
        "size",
        "seed",
        "shuffle",
    ]


def test_a_field_that_one_side_lacks_is_a_difference() -> None:
    assert differences({"seed": 0}, {"seed": 0, "version": 2}) == ["version: registered nothing, asked 2"]
    assert differences({"seed": 0}, {}) == ["seed: registered 0, asked nothing"]
