"""What a loader may be given to read, and the service and dataset that are made of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edl_torch.client.service import DataShardService
from edl_torch.core.master_api import MasterApi
from edl_torch.data.dataset import ImageDataset, OnBadRecord, ShardedDataset
from edl_torch.errors import InvalidArgument
from edl_torch.readers.base import AbstractDataReader, has_random_access
from edl_torch.readers.map_dataset import MapDatasetReader
from edl_torch.readers.registry import open_reader
from edl_torch.shard import TaskType

USUAL_WINDOW = 16  # shards, for readers of whole blocks: docs/shuffling.md has what it mixes

log = logging.getLogger("edl_torch.client")

ShuffleKind = bool | Literal["shards", "in_shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOptions:
    """The arguments of an `ElasticDataLoader` that its service and its dataset take, with their defaults."""

    num_epochs: int | None = 1
    shuffle: ShuffleKind = False
    shuffle_window: int | None = None
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
    fingerprint: str | None = None
    data_changed: Literal["new_epoch"] | None = None
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
    order = _order_of(reader, options)
    service = DataShardService(
        batch_size,
        options.master_client,
        reader,
        dataset_name=options.dataset_name,
        task_type=options.task_type,
        num_epochs=options.num_epochs,
        records_per_shard=options.records_per_shard,
        num_minibatches_per_shard=options.num_minibatches_per_shard,
        shuffle=order.all_records,
        shuffle_shards=order.shards,
        shuffle_window=order.window,
        seed=options.seed,
        epoch_barrier=options.epoch_barrier,
        max_bad_records=options.max_bad_records,
        fingerprint=options.fingerprint,
        data_changed=options.data_changed,
        lookahead=options.lookahead,
        master_timeout_s=options.master_timeout_s,
        audit_dir=options.audit_dir,
    )
    try:
        if order.usual_window is not None:
            service._suggest_window(order.usual_window)
        dataset = _dataset(service, reader, order.in_shard, options)
        if options.shuffle is True:
            kind = type(reader).__name__
            log.info("dataset %s: shuffle=True mixes %s (%s)", service.dataset_name, service.order, kind)
        return dataset
    except BaseException:
        service.close()
        raise


def reader_of(data: Any, task_type: TaskType) -> AbstractDataReader:
    """Return the reader for what a loader was given. Raises InvalidArgument."""
    if isinstance(data, str | os.PathLike):
        return open_reader(data, task_type)
    if callable(getattr(data, "create_shards", None)):
        reader: AbstractDataReader = data
        return reader
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping):
        return MapDatasetReader(data)
    if isinstance(data, Mapping):
        keys = ["train"] if "train" in data else list(data)[:1]
        raise InvalidArgument(
            f"a {type(data).__name__} is no dataset, but may hold some by name: give the loader one of them"
            + "".join(f", as data[{key!r}]" for key in keys)
        )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What is shuffled: all records, or the order of shards, and records inside windows of them."""

    all_records: bool = False
    shards: bool = False
    window: int | None = None
    usual_window: int | None = None

    @property
    def in_shard(self) -> bool:
        """Whether records are mixed inside windows."""
        return (self.window or self.usual_window) is not None


def _order_of(reader: AbstractDataReader, options: ReadingOptions) -> _Order:
    window = options.shuffle_window
    if window is not None and options.shuffle not in (True, "in_shard"):
        raise InvalidArgument(
            f"shuffle_window={window} mixes records, and shuffle={options.shuffle!r} does not: give "
            f"shuffle=True"
        )
    match options.shuffle:
        case False:
            return _Order()
        case "shards":
            return _Order(shards=True)
        case True if window is None and reads_records_alone(reader):
            return _Order(all_records=True)
        case True:
            usual = USUAL_WINDOW if window is None else None
            return _Order(shards=True, window=window, usual_window=usual)
        case "in_shard":
            return _Order(shards=True, window=window or 1)
    raise InvalidArgument(
        f"shuffle is {options.shuffle!r}: it must be True (as well as the reader can), False, 'in_shard' "
        f"(shards, and records inside each) or 'shards' (shards only)"
    )


def reads_records_alone(reader: AbstractDataReader) -> bool:
    """Return whether a record costs no more than itself, wherever it is."""
    return has_random_access(reader) and not getattr(reader, "reads_blocks", False)
