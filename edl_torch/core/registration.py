"""Registration of datasets: the first description makes one, later ones must fit it; and what one may be."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, get_type_hints

from edl_torch.core.identity import data_differences, differences, identity
from edl_torch.core.permutation import MAX_SIZE
from edl_torch.errors import DatasetConflict, InvalidArgument, UnknownDataset
from edl_torch.fingerprint import UNKNOWN
from edl_torch.fingerprint import check as check_fingerprint
from edl_torch.shard import OPTIONS, DatasetSpec, Registration, Source, TaskType

BATCHES_PER_SHARD = 8
_GO_ON = (
    ". To go on with other data, start a master that has none of this dataset (with another --state), and "
    'load the checkpoint with data_changed="new_epoch"'
)

_HINTS = get_type_hints(DatasetSpec)
_CHOICES = {bool: "True or False", bool | None: "True, False or None", TaskType: "a TaskType"}


def check_batch_size(batch_size: int) -> None:
    """Raise InvalidArgument for one that no dataset could fill."""
    if not 1 <= batch_size <= MAX_SIZE:
        raise InvalidArgument(f"batch_size must be 1 or more, and {MAX_SIZE} at most, not {batch_size}")


def new_spec(registration: Registration, batch_size: int) -> DatasetSpec:
    """The dataset that a first registration describes. Raises UnknownDataset when it is a name alone."""
    if registration.sources is None:
        raise UnknownDataset(
            f"the master has no dataset {registration.name!r}, and the service gives no reader and no "
            f"dataset_size: pass one of them, or start the master with --training_data"
        )
    given = registration.given
    given.setdefault("records_per_shard", BATCHES_PER_SHARD * batch_size)
    given.setdefault("shuffle_in_shard", True if "shuffle_window" in given else None)
    spec = DatasetSpec(**given)
    validate_spec(spec)
    return spec


def reconcile(registered: DatasetSpec, asked: Registration, *, alone: bool) -> DatasetSpec:
    """Return the registered dataset, with what `asked` may still change of it.

    The identity must agree in every field that `asked` names; a dataset made without a trainer leaves the
    in-shard shuffle and its window open for the first one, and who says nothing of it does not shuffle.
    The first known fingerprint binds it; where it agrees, sources have the names that `asked` gives them.
    Options differ freely while `alone` uses the dataset.
    Raises DatasetConflict with the differing fields.
    """
    given = asked.given
    check_fingerprint(given.get("fingerprint", UNKNOWN))
    if registered.shuffle_in_shard is None:
        registered = replace(
            registered,
            shuffle_in_shard=given.get("shuffle_in_shard", False),
            shuffle_window=given.get("shuffle_window", 1),
        )
    wanted = replace(registered, **given)
    old, new = identity(registered), identity(wanted)
    differing = differences(old, new)
    if not alone:
        differing += option_differences(registered, asked)
    if differing:
        has_other_data = bool(data_differences(old, new))
        what = "data or settings" if has_other_data else "settings"
        raise DatasetConflict(
            f"dataset {registered.name!r} is registered with other {what}: {'; '.join(differing)}. "
            f"Use the registered ones, or another dataset_name" + _GO_ON * has_other_data
        )
    validate_spec(wanted)
    return wanted


def check_data(registered: DatasetSpec, here: DatasetSpec) -> None:
    """Raise DatasetConflict unless the data `here` are those registered."""
    differing = data_differences(identity(registered), identity(here))
    if differing:
        raise DatasetConflict(
            f"dataset {registered.name!r} is registered with other data: {'; '.join(differing)}. "
            f"Give every rank the same data"
        )


def option_differences(registered: DatasetSpec, asked: Registration) -> list[str]:
    """Return a line for each option that `asked` names and that is another one in the registered dataset."""
    return [
        f"{name}: registered {getattr(registered, name)}, asked {wanted}"
        for name, wanted in asked.given.items()
        if name in OPTIONS and not OPTIONS[name].metadata["orders"] and wanted != getattr(registered, name)
    ]


# What a dataset may be ----------------------------------------------------------------------------------


def validate_spec(spec: DatasetSpec) -> None:
    """Raise `InvalidArgument`, naming field, value and remedy, unless `spec` describes a usable dataset."""
    if not isinstance(spec.name, str) or not spec.name:
        raise InvalidArgument(f"name is {spec.name!r}: give the dataset a name, such as 'training'")
    who = f"dataset {spec.name!r}"
    for name in OPTIONS:
        check_option(who, name, getattr(spec, name))
    _check_sources(who, spec)
    if spec.window > 1:
        _check_whole_shards(who, spec)


def check_option(who: str, name: str, value: Any) -> None:
    """Raise `InvalidArgument` unless `value` is one for the option of that name."""
    hint, limits = _HINTS[name], OPTIONS[name].metadata
    if hint is str:
        check_fingerprint(value)
    elif hint is not int:
        if not isinstance(value, hint):
            raise InvalidArgument(f"{who}: {name} is {value!r}: give {_CHOICES[hint]}")
    else:
        _check_integer(who, name, value)
        if limits["least"] is not None and value < limits["least"]:
            raise InvalidArgument(f"{who}: {name} is {value}: {limits['remedy']}")
        if limits["orders"] and limits["least"] is not None and value > MAX_SIZE:
            raise InvalidArgument(f"{who}: {name} is {value}: 2**62 is the most")


def _check_integer(who: str, field: str, value: object) -> None:
    if type(value) is not int:
        kind = type(value).__name__
        raise InvalidArgument(
            f"{who}: {field} is {value!r} of type {kind}: give a Python int, as int(...) makes"
        )


def _check_sources(who: str, spec: DatasetSpec) -> None:
    for source in spec.sources:
        # One comparison chain for the usual case: there may be 10**5 sources.
        if not (
            type(source.name) is str
            and type(source.start) is int
            and type(source.count) is int
            and 0 <= source.start <= source.start + source.count <= MAX_SIZE
        ):
            _reject_source(who, source)
    size = spec.size
    if size <= 0:
        names = ", ".join(repr(source.name) for source in spec.sources[:3]) or "none"
        raise InvalidArgument(
            f"{who}: size is {size} records in {len(spec.sources)} source(s) ({names}), so there is nothing "
            f"to read: check that the data are there, and what create_shards() of your own reader returns"
        )
    if size > MAX_SIZE:
        raise InvalidArgument(f"{who}: size is {size} records: 2**62 is the most, split the dataset")
    _check_overlap(who, spec.sources)


def _check_whole_shards(who: str, spec: DatasetSpec) -> None:
    per = spec.records_per_shard
    shards = sum(-(-source.count // per) for source in spec.sources)
    if shards * per > MAX_SIZE:
        raise InvalidArgument(
            f"{who}: with windows of shards, {shards} shards of {per} records must be 2**62 records at most: "
            f"make smaller shards"
        )


def _reject_source(who: str, source: Source) -> None:
    where = f"{who}, source {source.name!r}"
    if type(source.name) is not str:
        raise InvalidArgument(f"{where}: name is not a string: give the storage's name as a str")
    _check_integer(where, "start", source.start)
    _check_integer(where, "count", source.count)
    if source.start < 0:
        raise InvalidArgument(f"{where}: start is {source.start}: give the first record's number, 0 or more")
    if source.count < 0:
        raise InvalidArgument(f"{where}: count is {source.count}: give the number of records, 0 or more")
    raise InvalidArgument(f"{where}: start + count is {source.start + source.count}: 2**62 is the most")


def _check_overlap(who: str, sources: tuple[Source, ...]) -> None:
    """A record is known by its name and number, so no two runs of one storage may share one."""
    if len({source.name for source in sources}) == len(sources):
        return
    runs = sorted((source.name, source.start, source.count) for source in sources if source.count)
    for (name, start, count), (next_name, next_start, next_count) in pairwise(runs):
        if name == next_name and next_start < start + count:
            raise InvalidArgument(
                f"{who}: records {start}..{start + count} and {next_start}..{next_start + next_count} of "
                f"{name!r} overlap: make the ranges disjoint, each record belongs to an epoch once"
            )
