"""Which descriptions make a dataset, and which fit one that is registered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edl_torch.core.calls import Registration
from edl_torch.core.registration import new_spec, reconcile
from edl_torch.errors import DatasetConflict, InvalidArgument, UnknownDataset
from edl_torch.fingerprint import Fingerprint
from edl_torch.shard import DatasetSpec, Source, TaskType

SOURCES = (Source(name="a", count=20), Source(name="b", start=3, count=5))
SPEC = DatasetSpec(name="training", sources=SOURCES, records_per_shard=8)
SAME = Registration(name="training", sources=SOURCES, records_per_shard=8, seed=0, shuffle=False)


def test_what_is_not_given_takes_its_default() -> None:
    spec = new_spec(Registration(name="training", sources=SOURCES), batch_size=4)
    assert spec == replace(SPEC, records_per_shard=32, shuffle_in_shard=None)


def test_what_is_given_is_taken() -> None:
    given = Registration(
        name="evaluation",
        sources=SOURCES,
        records_per_shard=5,
        seed=3,
        shuffle=True,
        shuffle_shards=True,
        shuffle_in_shard=True,
        task_type=TaskType.EVALUATION,
        num_epochs=0,
        epoch_barrier=False,
        max_bad_records=2,
        shuffle_window=3,
        fingerprint=Fingerprint.given("v1").encode(),
    )
    spec = new_spec(given, batch_size=4)
    assert all(getattr(spec, name) == getattr(given, name) for name in given.given)


def test_a_name_alone_makes_no_dataset() -> None:
    with pytest.raises(UnknownDataset, match="reader"):
        new_spec(Registration(name="training"), batch_size=4)


@pytest.mark.parametrize(
    ("sources", "named"), [((), r"0 source\(s\) \(none\)"), ((Source(name="list", count=0),), r"\('list'\)")]
)
def test_a_dataset_without_records_is_refused(sources: tuple[Source, ...], named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"size is 0 records in .*{named}, so there is nothing to read"):
        new_spec(Registration(name="training", sources=sources), batch_size=4)


def test_a_name_alone_follows_what_is_registered() -> None:
    assert reconcile(SPEC, Registration(name="training"), alone=False) == SPEC


def test_the_same_description_fits() -> None:
    assert reconcile(SPEC, SAME, alone=False) == SPEC


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"records_per_shard": 4}, "records_per_shard: registered 8, asked 4"),
        ({"seed": 7}, "seed: registered 0, asked 7"),
        ({"shuffle": True}, "shuffle: registered False, asked True"),
        ({"shuffle_shards": True}, "shuffle_shards: registered False, asked True"),
        ({"shuffle_in_shard": True}, "shuffle_in_shard: registered False, asked True"),
        ({"shuffle_window": 4}, "shuffle_window: registered 1, asked 4"),
        ({"sources": SOURCES[:1]}, r"num_sources: registered 2, asked 1; size: registered 25, asked 20"),
        ({"sources": SOURCES[::-1]}, r"sources \(digest"),
    ],
)
def test_another_identity_is_a_conflict_that_names_the_field(
    change: dict[str, Any], named: str, alone: bool
) -> None:
    with pytest.raises(DatasetConflict, match=named):
        reconcile(SPEC, replace(SAME, **change), alone=alone)


def test_a_conflict_lists_every_field() -> None:
    with pytest.raises(DatasetConflict, match=r"records_per_shard.*; seed.*; num_epochs"):
        reconcile(SPEC, replace(SAME, records_per_shard=4, seed=1, num_epochs=2), alone=False)


@pytest.mark.parametrize(
    "change",
    [{"task_type": TaskType.PREDICTION}, {"num_epochs": 5}, {"epoch_barrier": False}, {"max_bad_records": 3}],
)
def test_options_change_only_while_nobody_else_takes_part(change: dict[str, Any]) -> None:
    (field,) = change
    assert reconcile(SPEC, replace(SAME, **change), alone=True) == replace(SPEC, **change)
    with pytest.raises(DatasetConflict, match=f"{field}: registered"):
        reconcile(SPEC, replace(SAME, **change), alone=False)


@pytest.mark.parametrize("said", [True, False, None])
def test_the_first_trainer_says_whether_shards_are_shuffled_inside(said: bool | None) -> None:
    left_open = replace(SPEC, shuffle_in_shard=None)
    spec = reconcile(left_open, replace(SAME, shuffle_in_shard=said), alone=True)
    assert spec.shuffle_in_shard is bool(said)


def test_the_first_trainer_says_the_window_that_was_left_open() -> None:
    left_open = replace(SPEC, shuffle_in_shard=None)
    spec = reconcile(left_open, replace(SAME, shuffle_in_shard=True, shuffle_window=4), alone=True)
    assert (spec.shuffle_in_shard, spec.shuffle_window) == (True, 4)
    with pytest.raises(DatasetConflict, match="shuffle_window: registered 4, asked 5"):
        reconcile(spec, replace(SAME, shuffle_window=5), alone=True)


def test_a_window_that_is_named_without_a_trainer_mixes_records() -> None:
    spec = new_spec(replace(SAME, shuffle_window=4), batch_size=4)
    assert (spec.shuffle_in_shard, spec.shuffle_window) == (True, 4)


def test_an_option_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="num_epochs is -1"):
        reconcile(SPEC, replace(SAME, num_epochs=-1), alone=True)


def test_who_comes_with_other_data_is_told_how_the_job_goes_on_with_them() -> None:
    fewer = replace(SAME, sources=SOURCES[:1])
    with pytest.raises(
        DatasetConflict, match=r'another --state.*load the checkpoint with data_changed="new_epoch"'
    ):
        reconcile(SPEC, fewer, alone=True)
    with pytest.raises(DatasetConflict) as raised:
        reconcile(SPEC, replace(SAME, seed=7), alone=True)
    assert "data_changed" not in str(raised.value)
