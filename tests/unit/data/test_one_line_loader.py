"""A loader that is made in one line: of what, with which shuffle, and what it takes over from its service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from loader_kit import NumberReader

from edl_torch import DataShardService, ElasticDataLoader, ImageDataset, Mixture, ShardedDataset
from edl_torch.errors import (
    DatasetConflict,
    InvalidArgument,
    MasterUnavailable,
    ReaderError,
    ServiceClosed,
    TokenError,
)
from edl_torch.readers import MapDatasetReader
from edl_torch.testing import FakeMaster

SQUARES = [(float(n), n * n) for n in range(40)]
RECORDS = MapDatasetReader(SQUARES)


def seen(loader: ElasticDataLoader) -> list[list[Any]]:
    """Records of every epoch, as they came."""
    return [[x for batch in loader for x in batch[0].tolist()] for _ in loader.epochs()]


def test_a_map_style_dataset_trains_in_one_line() -> None:
    fake = FakeMaster()
    with ElasticDataLoader(SQUARES, batch_size=8, num_epochs=3, shuffle=True, master_client=fake) as loader:
        epochs = seen(loader)
        assert [sorted(epoch) for epoch in epochs] == [[float(n) for n in range(40)]] * 3
        assert len({tuple(epoch) for epoch in epochs}) == 3
        assert loader.service.finished
        assert loader.progress().acknowledged == 120
    fake.outcomes["training"].check_complete(3)


def test_an_error_after_the_service_was_made_closes_it() -> None:
    fake = FakeMaster()
    with pytest.raises((InvalidArgument, ValueError)):
        ElasticDataLoader(SQUARES, 8, master_client=fake, num_workers=-1)
    with pytest.raises(InvalidArgument, match="quarantine"):
        ElasticDataLoader(SQUARES, 8, master_client=fake, on_bad_record="quarantine")
    assert not fake.status().trainers


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(12):
        folder = tmp_path / "photos" / f"class{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(folder / f"{number}.png"), np.full((4 + number, 6, 3), number, np.uint8))
    return tmp_path / "photos"


def shrink(image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return cv2.resize(image, (5, 3))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_images_of_a_path_are_transformed_and_their_labels_are_not(photos: Path, num_workers: int) -> None:
    with ElasticDataLoader(
        photos, 4, shuffle=True, transform=shrink, num_workers=num_workers, master_client=FakeMaster()
    ) as loader:
        labels = []
        for images, targets in loader:
            assert images.shape == (4, 3, 5, 3)
            labels += targets.tolist()
    assert sorted(labels) == sorted([0, 1, 2] * 4)


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ({"transform": lambda x: -x, "target_transform": lambda y: y + 1}, ([0.0, -1.0], [1, 2])),
        ({"target_transform": lambda y: y + 1}, ([0.0, 1.0], [1, 2])),
        ({"target_transform": None, "transform": lambda pair: pair[1] + 5}, [5, 6]),
    ],
)
def test_target_transform_makes_any_data_image_and_target_and_each_may_be_left_out(
    transforms: Any, expected: Any
) -> None:
    with ElasticDataLoader(SQUARES, 2, master_client=FakeMaster(), **transforms) as loader:
        batch = next(iter(loader))
    assert (batch.tolist() if torch.is_tensor(batch) else tuple(part.tolist() for part in batch)) == expected


def test_an_image_alone_has_no_target_to_transform() -> None:
    with DataShardService(2, FakeMaster(), reader=MapDatasetReader([3, 4])) as service:
        for transform, expected in ((None, [3, 4]), (lambda image: -image, [-3, -4])):
            dataset = ImageDataset(
                service, MapDatasetReader([3, 4]), transform=transform, target_transform=lambda target: 1 / 0
            )
            made = dataset._record_transform
            assert made is not None
            assert [made(record) for record in (3, 4)] == expected


class Blocks(NumberReader):
    reads_blocks = True


@pytest.mark.parametrize("registered", [4, 1])
def test_a_window_that_nobody_chose_is_that_of_the_master(registered: int) -> None:
    fake = FakeMaster()
    reader = NumberReader({"a": 8})
    with ElasticDataLoader(reader, 4, shuffle=True, shuffle_window=registered, master_client=fake) as first:
        chosen = first.service.session.plan().spec
        with ElasticDataLoader(reader, 4, shuffle=True, master_client=fake.connect()) as second:
            assert second.service.session.plan().spec == chosen
            assert second.service.order == first.service.order
        with (
            ElasticDataLoader(
                reader, 4, shuffle=True, shuffle_window=5, master_client=fake.connect()
            ) as third,
            pytest.raises(DatasetConflict, match="shuffle_window"),
        ):
            third.service.session.plan()
        with (
            ElasticDataLoader(reader, 4, seed=1, shuffle=True, master_client=fake.connect()) as fourth,
            pytest.raises(DatasetConflict, match="seed"),
        ):
            fourth.service.session.plan()


GLOBAL, WINDOWS, SHARDS, STORED = (
    (True, False, False),
    (False, True, True),
    (False, True, False),
    (False,) * 3,
)


@pytest.mark.parametrize(
    ("reader", "options", "shuffled", "window", "order"),
    [
        (NumberReader({"a": 8}), {"shuffle": True}, WINDOWS, 16, "windows of 16 shards"),
        (Blocks({"a": 8}), {"shuffle": True}, WINDOWS, 16, "windows of 16 shards"),
        (NumberReader({"a": 8}), {"shuffle": True, "shuffle_window": 5}, WINDOWS, 5, "windows of 5 shards"),
        (RECORDS, {"shuffle": True, "shuffle_window": 5}, WINDOWS, 5, "windows of 5 shards"),
        (RECORDS, {"shuffle": "in_shard", "shuffle_window": 5}, WINDOWS, 5, "windows of 5 shards"),
        (RECORDS, {"shuffle": "in_shard"}, WINDOWS, 1, "in_shard"),
        (RECORDS, {"shuffle": "shards"}, SHARDS, 1, "shards"),
        (RECORDS, {"shuffle": True}, GLOBAL, 1, "all records"),
        (RECORDS, {}, STORED, 1, ""),
    ],
)
def test_shuffle_is_as_good_as_the_reader_can_and_the_loader_says_what_it_mixes(
    reader: Any,
    options: dict[str, Any],
    shuffled: tuple[bool, ...],
    window: int,
    order: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level("INFO", logger="edl_torch.client"),
        ElasticDataLoader(reader, 4, master_client=FakeMaster(), **options) as loader,
    ):
        said = loader.service.order, repr(loader)
        spec = loader.service.session.plan().spec
        assert (spec.shuffle, spec.shuffle_shards, spec.shuffle_in_shard) == shuffled
        assert spec.shuffle_window == window
        assert (loader.service.order, repr(loader)) == said
    assert said[0] == order
    assert (f"shuffle={order!r}" in said[1]) == bool(order)
    told = [line for line in caplog.messages if "shuffle=True mixes" in line]
    assert len(told) == (options.get("shuffle") is True)
    assert all(order in line for line in told)


def test_a_window_without_a_shuffle_is_refused() -> None:
    for shuffle in (False, "shards"):
        with pytest.raises(InvalidArgument, match="shuffle_window=4 mixes records"):
            ElasticDataLoader(SQUARES, 8, shuffle=shuffle, shuffle_window=4, master_client=FakeMaster())
    with pytest.raises(InvalidArgument, match="shuffle_window must be 1 or more"):
        ElasticDataLoader(SQUARES, 8, shuffle=True, shuffle_window=0, master_client=FakeMaster())
    with pytest.raises(InvalidArgument, match="not both: shuffle=True mixes all records"):
        DataShardService(8, FakeMaster(), dataset_size=8, shuffle=True, shuffle_window=4)


def test_a_window_that_was_not_asked_for_follows_the_token() -> None:
    reader = Blocks({"a": 64})
    with ElasticDataLoader(reader, 4, shuffle="in_shard", master_client=FakeMaster()) as loader:
        state = loader.state_dict()
    with ElasticDataLoader(reader, 4, shuffle=True, master_client=FakeMaster()) as loader:
        loader.load_state_dict(state)
        assert loader.service.order == "in_shard"
    with (
        ElasticDataLoader(reader, 4, shuffle=True, shuffle_window=4, master_client=FakeMaster()) as loader,
        pytest.raises(TokenError, match="shuffle_window: registered 4, asked 1"),
    ):
        loader.load_state_dict(state)


# Wrong arguments --------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("data", "error", "match"),
    [
        (iter(SQUARES), InvalidArgument, "can only be iterated"),
        (Numbers(), InvalidArgument, "not Numbers"),
        (torch.utils.data.DataLoader(SQUARES), InvalidArgument, r"give it the dataset, as loader\.dataset"),
        ({"a": 1}, InvalidArgument, r"a dict is no dataset.* data\['a'\]"),
        ({"test": [1], "train": [2]}, InvalidArgument, r"give the loader one of them, as data\['train'\]"),
        ({}, InvalidArgument, "a dict is no dataset"),
        (None, InvalidArgument, "not None: give it the data"),
        ("/no/such/data", ReaderError, "does not exist"),
    ],
)
def test_data_that_cannot_be_leased_are_refused(data: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ElasticDataLoader(data, 8, master_client=FakeMaster())


@pytest.mark.parametrize("batch_size", [None, "missing"])
def test_one_line_needs_a_batch_size(batch_size: Any) -> None:
    arguments = {} if batch_size == "missing" else {"batch_size": batch_size}
    with pytest.raises(InvalidArgument, match="needs a batch_size"):
        ElasticDataLoader(SQUARES, **arguments)


def test_around_a_sharded_dataset_the_services_arguments_are_its_own() -> None:
    reader = MapDatasetReader(SQUARES)
    with DataShardService(8, FakeMaster(), reader) as service:
        dataset = ShardedDataset(service, reader)
        with pytest.raises(InvalidArgument, match="num_epochs, shuffle: around a ShardedDataset"):
            ElasticDataLoader(dataset, num_epochs=3, shuffle=True)


def test_a_shuffle_that_is_not_known_names_those_that_are() -> None:
    with pytest.raises(InvalidArgument, match=r"'global'.*'in_shard'.*'shards'"):
        ElasticDataLoader(SQUARES, 8, shuffle="global", master_client=FakeMaster())  # type: ignore[arg-type]


def test_a_loader_whose_master_is_away_closes_its_service_all_the_same() -> None:
    fake = FakeMaster()
    loader = ElasticDataLoader(SQUARES, 8, master_client=fake)
    batches = iter(loader)
    next(batches)
    fake.faults.master_away()
    with pytest.raises(MasterUnavailable):
        loader.close()
    with pytest.raises(ServiceClosed):
        _ = loader.service.finished


def test_rays_wrapper_that_reads_ahead_without_a_word_is_refused() -> None:
    with ElasticDataLoader(SQUARES, batch_size=8, master_client=FakeMaster()) as loader:
        as_ray_does = {"__name__": "ray.train.torch.train_loop_utils", "loader": loader}
        with pytest.raises(InvalidArgument, match=r"reads one batch ahead.*give move_to_device=False"):
            eval("next(iter(loader), None)", as_ray_does)
        assert seen(loader) == [[float(n) for n in range(40)]]


@pytest.mark.parametrize("given", [None, False, True])
@pytest.mark.parametrize("images", [False, True])
def test_transforms_of_images_are_seeded_unless_one_says_otherwise(images: bool, given: bool | None) -> None:
    arguments: dict[str, Any] = {"target_transform": float} if images else {}
    with ElasticDataLoader(
        SQUARES, 8, seed_transforms=given, master_client=FakeMaster(), **arguments
    ) as loader:
        assert loader.dataset._seed_transforms is (images if given is None else given)


def test_a_list_of_names_of_files_is_refused_where_nothing_opens_them(tmp_path: Path) -> None:
    files = [tmp_path / f"{n}.csv" for n in range(3)]
    for file in files:
        file.write_text("a,b\n1,2\n")
    for names in ([*map(str, files)], tuple(files), ["s3://bucket/a.csv"]):
        with pytest.raises(InvalidArgument, match=rf"a list of {len(names)} names of files, as .*CsvReader"):
            ElasticDataLoader(names, batch_size=1)
        with pytest.raises(InvalidArgument, match="names of files"):
            ElasticDataLoader(Mixture({"a": names}), batch_size=1)
    with ElasticDataLoader(
        [*map(str, files)], batch_size=3, transform=lambda file: Path(file).stat().st_size
    ) as loader:
        assert [batch.tolist() for batch in loader] == [[8, 8, 8]]
    with ElasticDataLoader([str(files[0]), "a text"], batch_size=2) as loader:
        assert list(loader) == [[str(files[0]), "a text"]]
