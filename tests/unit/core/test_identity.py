"""Two descriptions are the same dataset exactly when their identities agree."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edl_torch.core.registration import differences, identity
from edl_torch.fingerprint import Fingerprint
from edl_torch.shard import DatasetSpec, Source, TaskType

SPEC = DatasetSpec(
    name="training",
    sources=(Source(name="a", count=10), Source(name="b", start=3, count=7)),
    records_per_shard=4,
)


def test_an_identity_never_changes() -> None:
    assert identity(SPEC) == {
        "sources": "8d31903952193a39f4dcd662cbebc776",
        "names": "418f58ef4681182af435695060fa85e1",
        "below": "418f58ef4681182af435695060fa85e1",  # they have no folder in common
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
    ("sources", "said"),
    [
        ((Source(name="b", start=3, count=7), Source(name="a", count=10)), ["sources", "names"]),
        ((Source(name="c", count=10), Source(name="b", start=3, count=7)), ["names"]),
        ((Source(name="a", start=1, count=10), Source(name="b", start=3, count=7)), ["sources"]),
        ((Source(name="a", count=9), Source(name="b", start=3, count=8)), ["sources"]),
    ],
    ids=["order", "name", "start", "count"],
)
def test_order_names_and_ranges_of_sources_are_part_of_the_identity(
    sources: tuple[Source, ...], said: list[str]
) -> None:
    lines = differences(identity(SPEC), identity(replace(SPEC, sources=sources)))
    assert [line.split()[0] for line in lines] == said


@pytest.mark.parametrize(("one", "other"), [("v1", "v1"), ("v1", ""), ("", "v1"), ("", "")])
def test_names_of_sources_may_be_others_where_both_fingerprints_are_known(one: str, other: str) -> None:
    sources = tuple(replace(source, name="/mnt/" + source.name) for source in SPEC.sources)
    here, there = (Fingerprint.given(version).encode() if version else "" for version in (one, other))
    differing = differences(
        identity(replace(SPEC, fingerprint=here)), identity(replace(SPEC, sources=sources, fingerprint=there))
    )
    assert [line.split()[0] for line in differing] == ([] if one and other else ["names"])


def test_names_cannot_imitate_the_bounds_between_sources() -> None:
    one = replace(SPEC, sources=(Source(name="a0+1;1:b", count=1),))
    two = replace(SPEC, sources=(Source(name="a", count=1), Source(name="b", count=1)))
    assert identity(one)["names"] != identity(two)["names"]


def test_a_file_name_that_is_not_unicode_has_an_identity() -> None:
    odd = replace(SPEC, sources=(Source(name="caf\udce9.jpg", count=1),))
    even = replace(SPEC, sources=(Source(name="café.jpg", count=1),))
    assert identity(odd)["names"] != identity(even)["names"]


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
    lines = differences(identity(SPEC), identity(other))
    assert [line.split(" (")[0].split(":")[0] for line in lines] == [
        "names of sources",
        "num_sources",
        "size",
        "seed",
        "shuffle",
    ]


def test_a_field_that_one_side_lacks_is_a_difference() -> None:
    assert differences({"seed": 0}, {"seed": 0, "version": 2}) == ["version: registered nothing, asked 2"]
    assert differences({"seed": 0}, {}) == ["seed: registered 0, asked nothing"]
