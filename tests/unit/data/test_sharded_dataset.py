"""A `ShardedDataset` by itself, its values, and a dataset that is sorted by label."""

from __future__ import annotations

import inspect
import os
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from loader_kit import UNEVEN, all_records, trainer
from plan_kit import COUNTS, PLANS

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.data import dataset as module
from edl_torch.data.batches.transport import IterationSetup
from edl_torch.data.dataset import ImageDataset
from edl_torch.data.loop.opening import ReadingOptions, reads_records_alone
from edl_torch.data.reading.iterations import iterations
from edl_torch.data.reading.record_jobs import can_pick
from edl_torch.errors import ServiceClosed
from edl_torch.readers import ImageFolderReader, MapDatasetReader
from edl_torch.testing import FakeMaster


def test_only_the_trainers_process_has_the_service() -> None:
    with trainer(FakeMaster()) as (service, dataset):
        assert dataset.service is service
        copy = pickle.loads(pickle.dumps(dataset))
        for elsewhere in (copy, dataset):
            dataset._pid -= 1  # as a forked child finds it
            with pytest.raises(ServiceClosed, match="has no DataShardService"):
                elsewhere.service  # noqa: B018
            dataset._pid += 1


def test_a_copy_serves_the_iteration_that_it_was_pickled_for() -> None:
    with trainer(FakeMaster()) as (_, dataset):
        state = dataset.__getstate__()
        assert state["_run"] == ""
        assert iterations.served == ""
        copy = ShardedDataset.__new__(ShardedDataset)
        copy.__setstate__(state)
        assert iterations.served == ""
        assert not hasattr(copy, "_run")
        assert (copy.reader.counts, copy._link, copy._reading) == (UNEVEN, None, None)


def test_an_iteration_in_a_child_asks_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    with trainer(FakeMaster()) as (_, dataset):
        elsewhere = pickle.loads(pickle.dumps(dataset))
        link = elsewhere._connect()
        assert elsewhere._connect() is link, "one for all its iterations"
        assert sorted(iter(elsewhere)) == all_records()
        monkeypatch.setattr(os, "getpid", lambda: 7)
        assert elsewhere._connect() is not link, "its child has one of its own"


def test_what_reading_imports_is_imported_before_workers_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[Any] = []
    monkeypatch.setattr(module, "import_for_reading", imported.append)
    with trainer(FakeMaster()) as (_, dataset):
        assert imported == [dataset.reader]


def test_what_is_wrong_is_raised_at_once_where_the_loop_is_and_as_it_reads_in_a_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch brings the trainer what a worker raises as it reads."""

    def fails() -> Any:
        raise ServiceClosed("gone")

    with trainer(FakeMaster()) as (_, dataset):
        monkeypatch.setattr(dataset, "_begin", fails)
        with pytest.raises(ServiceClosed, match="gone"):
            iter(dataset)
        monkeypatch.setattr(module, "get_worker_info", lambda: SimpleNamespace(id=2))
        records = iter(dataset)
        with pytest.raises(ServiceClosed, match="gone"):
            next(records)


@pytest.mark.parametrize("list_size", [0, 4])
def test_an_iteration_begins_with_nothing_counted_and_nothing_timed(list_size: int) -> None:
    with trainer(FakeMaster()) as (_, dataset):
        setup = IterationSetup(columnar=False, list_size=list_size)
        setup.tally.start(7, 0)[2] = 3
        setup.times.begin()
        dataset.bind(setup)
        iter(dataset)
        assert setup.tally.take() == IterationSetup(columnar=False, list_size=0).tally.take()
        assert not setup.times.timing


def test_an_iteration_ends_the_threads_of_the_one_before() -> None:
    """A persistent loader worker begins anew, and nobody tells it that the pass before is over."""
    with trainer(FakeMaster()) as (_, dataset):
        dataset.bind(IterationSetup(columnar=False, list_size=4, threads=1, ahead=1))
        first_batches = iter(dataset)
        first = dataset._reading()
        assert "alive=1" in repr(first)
        second_batches = iter(dataset)
        assert "alive=0" in repr(first)
        second = dataset._reading()
        assert "alive=1" in repr(second)
        assert first_batches is not second_batches
        dataset.end_reading()
        assert "alive=0" in repr(second)


# What is known of a reader that has the methods of one, and is no `AbstractDataReader` ----------------------


class Own:
    """Record `i` of each source is `i`."""

    def create_shards(self) -> dict[str, int]:
        return COUNTS

    def read_records(self, task: Any) -> Iterator[int]:
        return iter(range(task.start, task.end))

    def read_record(self, name: str, index: int) -> int:
        return index


class Safe(Own):
    thread_safe = True


class Blocks(Safe):
    reads_blocks = True


def test_threads_read_records_of_a_reader_that_says_that_they_may() -> None:
    """Where it reads blocks, a stream of records in their order is faster."""
    picked = {
        (kind, order): can_pick(kind(), PLANS[order])  # type: ignore[arg-type]
        for kind in (Own, Safe, Blocks)
        for order in ("stored", "global")
    }
    assert [key for key, picks in picked.items() if picks] == [
        (Safe, "stored"),
        (Safe, "global"),
        (Blocks, "global"),
    ]


def test_records_are_mixed_over_all_where_each_costs_no_more_than_itself() -> None:
    assert [reads_records_alone(kind()) for kind in (Own, Safe, Blocks)] == [True, True, False]  # type: ignore[arg-type]
    with ElasticDataLoader(Own(), 4, shuffle=True) as loader:
        assert type(loader.dataset) is ShardedDataset, "records are images of readers that say so"
        assert sorted(n for batch in loader for n in batch.tolist()) == sorted([*range(23), *range(9)])


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
    of_images = inspect.signature(ImageDataset).parameters
    assert (of_images["shuffle"].default, of_images["seed_transforms"].default) == (False, True)


# A dataset that is sorted by label and mixed only inside its shards is told of, and no other ----------------


SORTED = [number // 100 for number in range(800)]


class Labelled:
    """A map-style dataset, as torchvision's: `targets` are the classes."""

    def __init__(self, targets: Any) -> None:
        self.targets = targets

    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> int:
        return index


def warned(data: Any, **options: Any) -> list[str]:
    """What a loop over two passes hears."""
    options = {"shuffle": "in_shard", "records_per_shard": 128, "num_epochs": 2} | options
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ElasticDataLoader(data, 32, master_client=FakeMaster(), **options) as loader:
            for _ in loader.epochs():
                assert len(list(loader)) == 25
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


WINDOWS_OF_8 = {"shuffle": True, "shuffle_window": 8, "records_per_shard": 20}


@pytest.mark.parametrize(
    ("classes", "options", "mixed", "remedy"),
    [
        # 7 shards; of the 7 places where the label changes none is an edge of a shard.
        (8, {}, "shards of 128 records: a batch has some 2.0 of the 8", 16),
        (8, {"records_per_shard": 100}, "shards of 100 records: a batch has some 1.0 of the 8", 16),
        (4, {"records_per_shard": 400}, "shards of 400 records: a batch has some 2.0 of the 4", 16),
        (40, WINDOWS_OF_8, "windows of 8 shards of 20 records: a batch has some 7.3 of the 40", 128),
    ],
)
@pytest.mark.parametrize("kind", [list, np.array])
def test_a_sorted_dataset_of_which_few_classes_are_mixed_is_told_of_once(
    kind: Any, classes: int, options: dict[str, Any], mixed: str, remedy: int
) -> None:
    (text,) = warned(Labelled(kind([number * classes // 800 for number in range(800)])), **options)
    assert f"inside {mixed} classes" in text
    assert "shuffle=True" in text
    assert f"shuffle_window={remedy}" in text


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (SORTED, {"shuffle": True}),
        (SORTED, {"shuffle": False}),
        (SORTED, {"shuffle": "shards"}),
        (SORTED, {"records_per_shard": 800}),
        ([number // 20 for number in range(800)], WINDOWS_OF_8 | {"shuffle_window": 40}),
        ([*SORTED[1:], 0], {}),
        ([0] * 800, {}),
        ([0] * 400 + [1] * 400, {"records_per_shard": 500}),
        (SORTED[:-1], {}),
        ([[label] for label in SORTED], {}),
        ([[label] * (label + 1) for label in SORTED], {}),
        ([str(label) for label in SORTED], {}),
        (None, {}),
    ],
)
def test_no_other_dataset_is(targets: Any, options: dict[str, Any]) -> None:
    assert warned(Labelled(targets), **options) == []


def test_image_folders_and_lists_of_images_say_their_labels(tmp_path: Path) -> None:
    import cv2

    for name, count in (("cat", 2), ("dog", 3)):
        (tmp_path / name).mkdir()
        for number in range(count):
            cv2.imwrite(str(tmp_path / name / f"{number}.png"), np.zeros((4, 4, 3), np.uint8))
    reader = ImageFolderReader(tmp_path)
    targets = reader.targets
    assert targets is not None
    assert targets.tolist() == [0, 0, 1, 1, 1] == [reader.load(index)[1] for index in range(5)]  # type: ignore[misc]
    assert ImageFolderReader(tmp_path / "dog").targets is None


@pytest.mark.parametrize(
    ("order", "mixed"),
    [
        ({"shuffle_shards": True}, "2.0"),
        ({}, "2.0"),
        ({"shuffle_window": 2}, "2.8"),  # the classes that lie together are mixed: 1 + 7 / 4
        ({"shuffle_shards": True, "shuffle_window": 2}, "3.5"),
    ],
)
def test_the_three_part_form_is_told_of_it_too(order: dict[str, Any], mixed: str) -> None:
    reader = MapDatasetReader(Labelled(SORTED))
    with DataShardService(32, FakeMaster(), reader, records_per_shard=128, **order) as service:
        loader = ElasticDataLoader(ShardedDataset(service, reader, shuffle=True))
        with pytest.warns(UserWarning, match=f"sorted by label.* a batch has some {mixed} of the 8 classes"):
            next(iter(loader))
