"""What a loader may be given to read, and the service and dataset that are made of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edl_torch.client.master_api import MasterApi
from edl_torch.client.service import DataShardService
from edl_torch.data.dataset import ImageDataset, OnBadRecord, ShardedDataset
from edl_torch.errors import InvalidArgument
from edl_torch.readers.base import AbstractDataReader, has_random_access
from edl_torch.readers.map_dataset import MapDatasetReader
from edl_torch.readers.registry import open_reader
from edl_torch.shard import TaskType

ShuffleKind = bool | Literal["shards", "in_shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOptions:
    """The arguments of an `ElasticDataLoader` that its service and its dataset take, with their defaults."""

    num_epochs: int | None = 1
    shuffle: ShuffleKind = False
    seed: int = 0
    transform: Callable[[Any], Any] | None = None
    target_transform: Callable[[Any], Any] | None = None
    on_bad_record: OnBadRecord = "raise"
    seed_transforms: bool | None = None
    master_client: MasterApi | None = None
    dataset_name: str = "training"
    task_type: TaskType = TaskType.TRAINING
    records_per_shard: int | None = None
    num_minibatches_per_shard: int | None = None
    epoch_barrier: bool = True
    max_bad_records: int = 0
    lookahead: int | Literal["told"] = 0
    master_timeout_s: float | None = None
    audit_dir: str | Path | None = None

    @property
    def given(self) -> list[str]:
        """Names of those that differ from their defaults."""
        fields = type(self).__dataclass_fields__
        return [name for name, field in fields.items() if getattr(self, name) != field.default]


def open_dataset(data: Any, batch_size: int, options: ReadingOptions) -> ShardedDataset:
    """Make a service and a dataset for a reader, a map-style dataset, or a path or address.

    Raises InvalidArgument for anything else, and what the reader and the service raise.
    """
    reader = reader_of(data, options.task_type)
    shuffle, shuffle_shards, in_shard = _orders(reader, options.shuffle)
    service = DataShardService(
        batch_size,
        options.master_client,
        reader,
        dataset_name=options.dataset_name,
        task_type=options.task_type,
        num_epochs=options.num_epochs,
        records_per_shard=options.records_per_shard,
        num_minibatches_per_shard=options.num_minibatches_per_shard,
        shuffle=shuffle,
        shuffle_shards=shuffle_shards,
        seed=options.seed,
        epoch_barrier=options.epoch_barrier,
        max_bad_records=options.max_bad_records,
        lookahead=options.lookahead,
        master_timeout_s=options.master_timeout_s,
        audit_dir=options.audit_dir,
    )
    try:
        return _dataset(service, reader, in_shard, options)
    except BaseException:
        service.close()
        raise


def reader_of(data: Any, task_type: TaskType = TaskType.TRAINING) -> AbstractDataReader:
    """Return the reader for what a loader was given. Raises InvalidArgument."""
    if isinstance(data, str | os.PathLike):
        return open_reader(data, task_type)
    if callable(getattr(data, "create_shards", None)):
        reader: AbstractDataReader = data
        return reader
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping):
        return MapDatasetReader(data)
    raise InvalidArgument(
        f"ElasticDataLoader reads a reader, a map-style dataset, a path or address that a reader knows, or a "
        f"ShardedDataset, not {type(data).__name__}: data that can only be iterated have no records to lease"
    )


def _dataset(
    service: DataShardService, reader: AbstractDataReader, in_shard: bool, options: ReadingOptions
) -> ShardedDataset:
    is_image = options.target_transform is not None or getattr(reader, "yields_images", False)
    seeds = is_image if options.seed_transforms is None else options.seed_transforms
    if is_image:
        return ImageDataset(
            *(service, reader, in_shard, options.transform, options.target_transform),
            on_bad_record=options.on_bad_record,
            seed_transforms=seeds,
        )
    return ShardedDataset(
        service,
        reader,
        in_shard,
        options.transform,
        on_bad_record=options.on_bad_record,
        seed_transforms=seeds,
    )


def _orders(reader: AbstractDataReader, shuffle: ShuffleKind) -> tuple[bool, bool, bool]:
    """Return whether records are shuffled over the whole dataset, shards, and records inside each shard."""
    match shuffle:
        case False:
            return False, False, False
        case True if has_random_access(reader) and not getattr(reader, "reads_blocks", False):
            return True, False, False
        case True | "in_shard":
            return False, True, True
        case "shards":
            return False, True, False
    raise InvalidArgument(
        f"shuffle is {shuffle!r}: it must be True (as well as the reader can), False, 'in_shard' (shards, "
        f"and records inside each) or 'shards' (shards only)"
    )
