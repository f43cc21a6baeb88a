"""What is handed from part to part has its fields alone, and what was decided stays as it is."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from edl_torch.client.service import DataShardService
from edl_torch.data.batches.collate import Collated, Envelope
from edl_torch.data.dataset import ImageDataset, IterationSetup, ShardedDataset
from edl_torch.data.loader import ElasticDataLoader
from edl_torch.data.loop.opening import ReadingOptions, _Order
from edl_torch.data.ranks import parts_group
from edl_torch.data.reading import columns
from edl_torch.data.reading.threaded_reading import Threading

THREADING = {"threads": 1, "ahead": 2, "batch_size": 3, "collate": None}


@pytest.mark.parametrize("kind", [Collated, Envelope, ReadingOptions, Threading, _Order])
def test_there_is_no_room_for_other_attributes(kind: Any) -> None:
    assert set(kind.__slots__) == {field.name for field in fields(kind)}


@pytest.mark.parametrize("value", [ReadingOptions(), Threading(**THREADING), _Order()])
def test_a_decision_is_made_by_name_and_stays(value: Any) -> None:
    first = fields(value)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(value, first, getattr(value, first))
    with pytest.raises(TypeError, match="positional"):
        type(value)(*(getattr(value, field.name) for field in fields(value)))


@pytest.mark.parametrize(("kind", "seeds"), [(ShardedDataset, False), (ImageDataset, True)])
def test_datasets_keep_the_stored_order_and_images_are_augmented_by_record(kind: Any, seeds: bool) -> None:
    defaults = {name: each.default for name, each in inspect.signature(kind).parameters.items()}
    assert defaults["shuffle"] is False
    assert defaults["seed_transforms"] is seeds
    assert defaults["on_bad_record"] == "raise"
    assert not IterationSetup(columnar=False, list_size=4).collates


def test_a_loader_and_what_it_makes_agree_on_what_is_meant_where_nothing_is_said() -> None:
    options = ReadingOptions()
    of_loader = inspect.signature(ElasticDataLoader).parameters
    own = [field.name for field in fields(options) if field.name != "service"]
    assert {name: of_loader[name].default for name in own} == {name: getattr(options, name) for name in own}
    assert (options.service, options.shuffle) == ({}, False)
    of_service = inspect.signature(DataShardService).parameters
    for name, parameter in of_loader.items():
        if name in of_service and name not in ("batch_size", "shuffle"):
            assert (parameter.default, parameter.annotation) == (
                of_service[name].default, of_service[name].annotation
            )  # fmt: skip
    said = {name: of_loader[name].default for name in of_loader}
    assert (said["num_epochs"], said["seed"], said["lookahead"]) == (1, 0, 0)
    assert (said["epoch_barrier"], said["max_bad_records"]) == (True, 0)
    assert _Order() == _Order(all_records=False, shards=False)


def test_ranks_of_one_job_agree_on_the_first_message_and_memory_has_the_bounds_that_were_measured() -> None:
    """All ranks must have the first: a rank reads as much as another one sends."""
    assert parts_group.FRAME_BYTES == 8192
    assert (columns._MOST_BATCHES, columns._MOST_BYTES) == (16, 16 * 1024 * 1024)
    assert parts_group.IN_STRUCTURE_BYTES == 2048
