"""A dataset that is sorted by label and mixed only inside its shards is told of, and no other."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.core.plan import Plan
from edl_torch.data.loop.opening import _classes_mixed
from edl_torch.readers import ImageFolderReader
from edl_torch.shard import DatasetSpec, Source
from edl_torch.testing import FakeMaster

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


@pytest.mark.parametrize("targets", [SORTED, np.array(SORTED)], ids=["list", "array"])
def test_a_sorted_dataset_mixed_inside_its_shards_is_told_of_once(targets: Any) -> None:
    (text,) = warned(Labelled(targets))
    # 7 shards; of the 7 places where the label changes none is an edge of a shard.
    assert "shards of 128 records: a batch has some 2.0 of the 8 classes" in text
    assert "shuffle=True" in text
    assert "shuffle_window=16" in text


def test_windows_that_mix_few_classes_are_told_of() -> None:
    targets = [number // 20 for number in range(800)]
    options = {"shuffle": True, "records_per_shard": 20}
    (text,) = warned(Labelled(targets), **options, shuffle_window=8)
    assert "windows of 8 shards of 20 records: a batch has some 7.3 of the 40 classes" in text
    assert "shuffle_window=128" in text
    assert warned(Labelled(targets), **options, shuffle_window=40) == []


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (SORTED, {"shuffle": True}),
        (SORTED, {"shuffle": False}),
        (SORTED, {"shuffle": "shards"}),
        (SORTED, {"records_per_shard": 800}),
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


def test_the_three_part_form_is_told_of_it_too() -> None:
    from edl_torch.readers import MapDatasetReader

    reader = MapDatasetReader(Labelled(SORTED))
    with DataShardService(32, FakeMaster(), reader, records_per_shard=128, shuffle_shards=True) as service:
        loader = ElasticDataLoader(ShardedDataset(service, reader, shuffle=True))
        with pytest.warns(UserWarning, match="sorted by label"):
            next(iter(loader))


@pytest.mark.parametrize(
    ("classes", "options", "mixed"),
    [
        (8, {"records_per_shard": 100}, "inside shards of 100 records: a batch has some 1.0 of the 8"),
        (4, {"records_per_shard": 400}, "inside shards of 400 records: a batch has some 2.0 of the 4"),
        (
            16,
            {"records_per_shard": 50, "shuffle": True, "shuffle_window": 2},
            "inside windows of 2 shards of 50 records: a batch has some 1.9 of the 16",
        ),
    ],
)
def test_at_most_half_of_the_classes_are_few(classes: int, options: Any, mixed: str) -> None:
    (text,) = warned(Labelled([number * classes // 800 for number in range(800)]), **options)
    assert f"{mixed} classes" in text


@pytest.mark.parametrize(
    ("window", "mixed"),
    [(1, 1 + 7 / 7), (2, 1 + 7 / 4)],
)
def test_shards_in_their_stored_order_mix_the_classes_that_lie_together(window: int, mixed: float) -> None:
    plan = Plan(
        DatasetSpec(
            name="d",
            sources=(Source(name="a", count=800),),
            records_per_shard=128,
            shuffle_in_shard=True,
            shuffle_window=window,
        )
    )
    assert _classes_mixed(np.arange(100, 800, 100), 8, plan) == mixed
