"""What a loader may be given to read, and the service and dataset that are made of it."""

from __future__ import annotations

import inspect
import logging
import os
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

from edl_torch.client.description import check_count
from edl_torch.client.service import DataShardService, ServiceKeywords
from edl_torch.core.plan import Plan
from edl_torch.core.registration import NO_EPOCHS
from edl_torch.data.dataset import ImageDataset, OnBadRecord, ShardedDataset
from edl_torch.data.mixture import Mixture, MixtureComponent, MixtureDataset
from edl_torch.errors import EdlError, InvalidArgument
from edl_torch.readers.base import AbstractDataReader, has_random_access
from edl_torch.readers.map_dataset import MapDatasetReader
from edl_torch.readers.mixture import ComponentReader, MixtureReader
from edl_torch.readers.registry import open_reader
from edl_torch.readers.storage.names import is_url
from edl_torch.shard import TaskType
from edl_torch.system.user_warnings import warn_user

USUAL_WINDOW = 16  # shards, for readers of whole blocks: docs/shuffling.md has what it mixes

SERVICE_PARAMETERS = {
    name: parameter
    for name, parameter in inspect.signature(DataShardService).parameters.items()
    if name in ServiceKeywords.__optional_keys__
}

_FEW = 0.5  # of all classes: what a shard that mixes has more of

log = logging.getLogger("edl_torch.client")

ShuffleKind = bool | Literal["shards", "in_shard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOptions:
    """The arguments of an `ElasticDataLoader` that its dataset takes, with their defaults, and those given
    that its service takes."""

    shuffle: ShuffleKind = False
    transform: Callable[[Any], Any] | None = None
    target_transform: Callable[[Any], Any] | None = None
    on_bad_record: OnBadRecord = "raise"
    seed_transforms: bool | None = None
    service: ServiceKeywords = field(default_factory=ServiceKeywords)
    storage_options: Mapping[str, Any] | None = None

    @property
    def given(self) -> list[str]:
        """Names of those that differ from their defaults."""
        given = [n for n, value in self.service.items() if value != SERVICE_PARAMETERS[n].default]
        own = (f for f in fields(self) if f.name != "service")
        return given + [f.name for f in own if getattr(self, f.name) != f.default]


def open_dataset(data: Any, batch_size: int, options: ReadingOptions) -> ShardedDataset:
    """Make a service and a dataset for a reader, a map-style dataset, or a path or address.

    Raises InvalidArgument for anything else, and what the reader and the service raise.
    """
    task_type = options.service.get("task_type", TaskType.TRAINING)
    mixture = data if isinstance(data, Mixture) else None
    if mixture is not None:
        reader: AbstractDataReader = _mixture_reader(mixture, batch_size, task_type, options)
        order = _Order()  # each component has its own
    else:
        has_step = options.transform is not None
        reader = reader_of(data, task_type, options.storage_options, is_transformed=has_step)
        order = _order_of(reader, options)
    keywords: ServiceKeywords = {**options.service, "shuffle_window": order.window}
    service = DataShardService(
        batch_size, reader=reader, shuffle=order.all_records, shuffle_shards=order.shards, **keywords
    )
    try:
        if order.usual_window is not None:
            service.session.description.usual_window = order.usual_window
        dataset = _dataset(service, reader, order.in_shard, options, mixture)
        if options.shuffle is True and mixture is None:
            kind = type(reader).__name__
            log.info("dataset %s: shuffle=True mixes %s (%s)", service.dataset_name, service.order, kind)
        return dataset
    except BaseException:
        service.close()
        raise


def _mixture_reader(
    mixture: Mixture, batch_size: int, task_type: TaskType, options: ReadingOptions
) -> MixtureReader:
    """Return the reader of a mixture. Raises InvalidArgument for options that a mixture has not."""
    if options.service.get("num_epochs") is not None:
        raise InvalidArgument(f"a mixture {NO_EPOCHS}")
    if options.service.get("shuffle_window") is not None or options.target_transform is not None:
        raise InvalidArgument(
            "shuffle_window= and target_transform= are a component's: give them to its MixtureComponent"
        )
    if options.service.get("fingerprint") is not None:
        raise InvalidArgument(
            "fingerprint= is a component's: give it to the reader of each, as "
            'MapDatasetReader(dataset, fingerprint="v1")'
        )
    sources = [part.data for part in mixture.components.values()]
    if options.storage_options is not None and not any(isinstance(s, str | os.PathLike) for s in sources):
        raise InvalidArgument("storage_options are for paths and URLs, and no component is one")
    parts = []
    for name, part in mixture.components.items():
        try:
            parts.append(_component(name, part, task_type, options))
        except EdlError as exc:
            exc.add_note(f"That is component {name!r} of the mixture")
            raise
    has_steps = any(part.transform or part.target_transform for part in mixture.components.values())
    return mixture.open(parts, batch_size, task_type, tagged=has_steps or mixture.with_component)


def _component(
    name: str, part: MixtureComponent, task_type: TaskType, options: ReadingOptions
) -> ComponentReader:
    if part.data is None:
        return ComponentReader(name=name, reader=MapDatasetReader(()), left=True)
    is_path = isinstance(part.data, str | os.PathLike)  # others were made with options of their own
    own_options, has_step = options.storage_options if is_path else None, part.transform is not None
    reader = reader_of(part.data, task_type, own_options, is_transformed=has_step)
    for option, value in (("max_passes", part.max_passes), ("shuffle_window", part.shuffle_window)):
        if value is not None:
            check_count(f"{option} of component {name!r}", value)
    own = replace(
        options,
        shuffle=options.shuffle if part.shuffle is None else part.shuffle,
        service={"shuffle_window": part.shuffle_window},
    )
    order = _order_of(reader, own)
    return ComponentReader(
        name=name,
        reader=reader,
        order={
            "records_per_shard": part.records_per_shard or 0,
            "max_passes": part.max_passes or 0,
            "shuffle": order.all_records,
            "shuffle_shards": order.shards,
            "shuffle_in_shard": order.in_shard,
            "shuffle_window": order.window or order.usual_window or 1,
        },
    )


def reader_of(
    data: Any,
    task_type: TaskType,
    storage_options: Mapping[str, Any] | None = None,
    *,
    is_transformed: bool = False,
) -> AbstractDataReader:
    """Return the reader for what a loader was given. Raises InvalidArgument; for a list of names of files
    too, unless a transform may open them."""
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise InvalidArgument(
            f"storage_options must be a dict of options by name, not {storage_options!r:.40}"
        )
    if isinstance(data, str | os.PathLike):
        options = {} if storage_options is None else {"storage_options": storage_options}
        return open_reader(data, task_type, **options)
    if storage_options is not None:
        raise InvalidArgument("storage_options are for a path or URL: give them to the reader that you made")
    if isinstance(data, type):
        raise InvalidArgument(
            f"the class {data.__name__} is no data: give an instance, as {data.__name__}(…)"
        )
    if callable(getattr(data, "create_shards", None)):
        reader: AbstractDataReader = data
        return reader
    if isinstance(data, bytes):
        raise InvalidArgument(f"{data[:40]!r} is no data: a path is a str, as {os.fsdecode(data[:40])!r}")
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        raise InvalidArgument(
            f"a {type(data).__name__} has its columns by name and no record by number: give the loader "
            f'data.to_dict("records"), or torch.tensor(data.to_numpy())'
        )
    if isinstance(data, tuple) and data and all(getattr(each, "shape", None) for each in data):
        raise InvalidArgument(
            "a tuple of tensors or arrays is no dataset: give the loader "
            "torch.utils.data.TensorDataset(*data), or a list where each is a record"
        )
    if not is_transformed and _are_names(data):
        raise InvalidArgument(
            f"a list of {len(data)} names of files, as {data[0]!r}, is a dataset of {len(data)} texts: give "
            f"the loader a reader for what is in them, as CsvReader([…]) or TextReader([…]); for the names "
            f"themselves MapDatasetReader([…]), or transform= that opens them"
        )
    if isinstance(data, list | tuple) and data and all(isinstance(each, Dataset) for each in data):
        if any(isinstance(each, IterableDataset) for each in data):
            raise InvalidArgument(
                f"{reprlib.repr(data)} has datasets that can only be iterated: give their records numbers "
                f"(__len__ and __getitem__)"
            )
        data = ConcatDataset(data)
    if isinstance(data, list | tuple) and any(
        callable(getattr(each, "create_shards", None)) for each in data
    ):
        raise InvalidArgument(
            "a list of readers is no dataset: give one reader all of the files, or the loader a Mixture of "
            "the readers by name, each with its share"
        )
    if isinstance(data, Mixture):
        raise InvalidArgument(
            f"{data!r} is in another mixture: put its components there, each with its part of the weight"
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping):
        found = MapDatasetReader(data)
        if not found.count:
            raise InvalidArgument(f"the {type(data).__name__} has no records: there is nothing to read")
        return found
    if isinstance(data, Mapping):
        keys = ["train"] if "train" in data else list(data)[:1]
        raise InvalidArgument(
            f"a {type(data).__name__} is no dataset, but may hold some by name: give the loader one of them"
            + "".join(f", as data[{key!r}]" for key in keys)
        )
    if isinstance(data, DataLoader):
        raise InvalidArgument(
            "ElasticDataLoader takes the place of a DataLoader: give it the dataset, as loader.dataset"
        )
    known = "a path or address, a map-style dataset, a reader, or a ShardedDataset"
    if not hasattr(data, "__iter__"):
        if hasattr(data, "__getitem__"):
            raise InvalidArgument(
                f"{type(data).__name__} has no __len__, the number of its records: write one"
            )
        raise InvalidArgument(f"ElasticDataLoader reads {known}, not {reprlib.repr(data)}: give it the data")
    raise InvalidArgument(
        f"ElasticDataLoader reads {known}, not {type(data).__name__}, which can only be iterated: give its "
        f"records numbers (__len__ and __getitem__), or a list of them"
    )


_MOST_NAMES = 1000  # that are looked for


def _are_names(data: Any) -> bool:
    """Whether it is a list of names of files that are there, or of URLs."""
    return (
        isinstance(data, list | tuple)
        and bool(data)
        and all(isinstance(each, str | os.PathLike) for each in data)
        and all(is_url(os.fspath(each)) or os.path.isfile(each) for each in data[:_MOST_NAMES])
    )


def _dataset(
    service: DataShardService,
    reader: AbstractDataReader,
    in_shard: bool,
    options: ReadingOptions,
    mixture: Mixture | None,
) -> ShardedDataset:
    parts = [part.reader for part in reader.parts] if isinstance(reader, MixtureReader) else [reader]
    is_image = options.target_transform is not None or any(
        getattr(part, "yields_images", False) for part in parts
    )
    common: dict[str, Any] = {
        "on_bad_record": options.on_bad_record,
        "seed_transforms": is_image if options.seed_transforms is None else options.seed_transforms,
    }
    if mixture is not None and isinstance(reader, MixtureReader):
        return MixtureDataset(service, reader, mixture, options.transform, **common)
    if is_image:
        steps = (options.transform, options.target_transform)
        return ImageDataset(service, reader, in_shard, *steps, **common)
    return ShardedDataset(service, reader, in_shard, options.transform, **common)


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
    window = options.service.get("shuffle_window")
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


def warn_of_sorted_labels(reader: AbstractDataReader, plan: Plan) -> None:
    """Warn where the records of a window, which alone are mixed, have few of the dataset's classes.

    Known of readers that have `targets`, the class of each record, as torchvision's datasets have.
    """
    spec = plan.spec
    targets = getattr(reader, "targets", None)
    if targets is None or spec.shuffle or not spec.shuffle_in_shard or len(spec.sources) != 1:
        return
    labels = _one_dimensional(targets)
    if labels is None or len(labels) != plan.size or np.any(labels[1:] < labels[:-1]):
        return
    changes = np.flatnonzero(labels[1:] != labels[:-1]) + 1
    classes = len(changes) + 1
    mixed = _classes_mixed(changes, classes, plan)
    if mixed <= _FEW * classes:
        per = spec.records_per_shard
        where = "shards" if plan.window == 1 else f"windows of {plan.window} shards"
        warn_user(
            f"the records of {spec.name!r} are sorted by label and mixed only inside {where} of "
            f"{per} records: a batch has some {mixed:.1f} of the {classes} classes, "
            f"and models learn badly from that. Give ElasticDataLoader(reader, shuffle=True), or "
            f"DataShardService(shuffle=True), which mix all records; where records are read in blocks, "
            f"shuffle_window={16 * plan.window}, which mixes those of so many shards; or shuffle the data "
            f"where they lie"
        )


def _classes_mixed(changes: Any, classes: int, plan: Plan) -> float:
    """Return how many classes are in a window, on average; `changes` are the first records of classes."""
    per = plan.spec.records_per_shard
    if not plan.spec.shuffle_shards:
        return float(1 + np.count_nonzero(changes % (per * plan.window)) / plan.num_windows)
    in_a_shard = 1 + np.count_nonzero(changes % per) / plan.num_shards
    return float(
        in_a_shard if plan.window == 1 else classes * (1 - (1 - in_a_shard / classes) ** plan.window)
    )


def _one_dimensional(targets: Any) -> Any:
    """Return the labels as an array of numbers, None where they are something else."""
    try:
        labels = np.asarray(targets)
    except ValueError:  # lists of unequal length, as of boxes
        return None
    return labels if labels.ndim == 1 and labels.dtype.kind in "iub" else None
