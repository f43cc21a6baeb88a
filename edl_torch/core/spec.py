"""What a dataset may be: the checks that every description of a dataset passes before it is used."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from edl_torch.core.permutation import MAX_SIZE
from edl_torch.errors import InvalidArgument
from edl_torch.fingerprint import check as check_fingerprint
from edl_torch.shard import DatasetSpec, Source, TaskType

_LEAST = {"records_per_shard": 1, "num_epochs": 0, "max_bad_records": 0, "shuffle_window": 1}
_REMEDY = {
    "records_per_shard": "give the number of records in a shard, 1 or more",
    "num_epochs": "give the number of epochs, or 0 for endless",
    "max_bad_records": "give the number of records that may be bad, 0 or more",
    "shuffle_window": "give the number of shards whose records are mixed, 1 or more",
}
_SWITCHES = ("shuffle", "shuffle_shards", "epoch_barrier")


def validate_spec(spec: DatasetSpec) -> None:
    """Raise `InvalidArgument`, naming field, value and remedy, unless `spec` describes a usable dataset."""
    if not isinstance(spec.name, str) or not spec.name:
        raise InvalidArgument(f"name is {spec.name!r}: give the dataset a name, such as 'training'")
    who = f"dataset {spec.name!r}"
    for field in (*_LEAST, "seed", *_SWITCHES):
        check_option(who, field, getattr(spec, field))
    if spec.records_per_shard > MAX_SIZE:
        raise InvalidArgument(f"{who}: records_per_shard is {spec.records_per_shard}: 2**62 is the most")
    if spec.shuffle_window > MAX_SIZE:
        raise InvalidArgument(f"{who}: shuffle_window is {spec.shuffle_window}: 2**62 is the most")
    if not isinstance(spec.shuffle_in_shard, bool | None):  # None: the first trainer says
        raise InvalidArgument(
            f"{who}: shuffle_in_shard is {spec.shuffle_in_shard!r}: give True, False or None"
        )
    if not isinstance(spec.task_type, TaskType):
        raise InvalidArgument(f"{who}: task_type is {spec.task_type!r}: give a TaskType")
    check_fingerprint(spec.fingerprint)
    _check_sources(who, spec)
    if spec.shuffle_window > 1:
        _check_whole_shards(who, spec)


def check_option(who: str, field: str, value: Any) -> None:
    """Raise `InvalidArgument` unless `value` is one for the number or switch called `field`."""
    if field in _SWITCHES:
        if not isinstance(value, bool):
            raise InvalidArgument(f"{who}: {field} is {value!r}: give True or False")
        return
    _check_integer(who, field, value)
    if field in _LEAST and value < _LEAST[field]:
        raise InvalidArgument(f"{who}: {field} is {value}: {_REMEDY[field]}")


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
            f"{who}: with a shuffle_window, {shards} shards of {per} records must be 2**62 records at most: "
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
