"""ElasticDL's calls as values: ids of tasks, what a task or a result says, and what its shards can hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edl_torch.elasticdl.wire import MAX_INT32, ForeignTask, TaskNames, TaskResult, check_expressible
from edl_torch.errors import InvalidArgument
from edl_torch.shard import DatasetSpec, Source, TaskType

SPEC = DatasetSpec(name="d", sources=(Source(name="a", count=100),), records_per_shard=10)
TWO = (Source(name="a", count=100), Source(name="empty", count=0), Source(name="b", count=100))
KINDS = [TaskType.NONE, TaskType.TRAINING, TaskType.EVALUATION, TaskType.PREDICTION]
IN_WINDOWS = {"shuffle_shards": True, "shuffle_in_shard": True, "shuffle_window": 2}


def test_each_task_and_type_has_an_id_of_its_own_and_back() -> None:
    names = TaskNames("L")
    tasks = [(task, kind) for task in range(1, 200) for kind in KINDS]
    ids = [names.name(task, kind) for task, kind in tasks]
    assert len(set(ids)) == len(tasks)
    assert [names.resolve(task_id) for task_id in ids] == tasks


def test_ids_never_change() -> None:
    assert TaskNames("L").name(1, TaskType.TRAINING) == 379_056_163


def test_ids_reach_from_one_to_the_largest_of_32_bits() -> None:
    names = TaskNames("L")
    last, kind = divmod(MAX_INT32 - 1, 4)
    assert names.resolve(names.name(last, TaskType(kind))) == (last, TaskType(kind))
    with pytest.raises(InvalidArgument, match="has no id"):
        names.name(last, TaskType(kind + 1))
    for outside in (0, MAX_INT32 + 1):
        assert names.resolve(outside) == (0, TaskType.NONE)
    for inside in (1, MAX_INT32):
        task, kind_inside = names.resolve(inside)
        assert names.name(task, kind_inside) == inside


def test_a_task_without_a_record_and_type_is_the_end() -> None:
    assert ForeignTask().is_end
    assert not ForeignTask(type=TaskType.WAIT).is_end
    assert not ForeignTask(start=3, end=4).is_end


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        ({}, ""),
        ({"error": "torn"}, "torn"),
        ({"error": "torn", "failed_records": 2}, "torn"),
        ({"failed_records": 2}, "the trainer counted 2 failed record(s) and gave no reason"),
    ],
)
def test_a_result_fails_by_its_error_or_by_its_count(result: dict[str, Any], failure: str) -> None:
    assert TaskResult(task_id=1, **result).failure == failure


@pytest.mark.parametrize(
    "fits",
    [
        {},
        {"sources": TWO},
        {"sources": TWO, "shuffle_shards": True},
        {"sources": TWO, "shuffle_in_shard": True},
        {"shuffle": True},
        IN_WINDOWS,
        {"records_per_shard": 10**9, "sources": (Source(name="a", count=10**9),)},  # a name, two numbers
    ],
)
def test_shards_of_one_storage_are_expressible(fits: dict[str, Any]) -> None:
    check_expressible(replace(SPEC, **fits))


@pytest.mark.parametrize(("mixed", "remedy"), [({"shuffle": True}, "--shuffle,"), (IN_WINDOWS, "_window,")])
def test_records_of_two_storages_have_no_name_together(mixed: dict[str, Any], remedy: str) -> None:
    with pytest.raises(InvalidArgument, match=f"of 2 storages together.* instead of .*{remedy}"):
        check_expressible(replace(SPEC, sources=TWO, **mixed))


@pytest.mark.parametrize(
    ("start", "count", "most"),
    [
        (0, 2**27, (2**26 - 2**16) // 4),
        (0, 2**28, (2**26 - 2**16) // 5),
        (2**27, 2**27, (2**26 - 2**16) // 5),
    ],
)
def test_the_indices_of_a_shard_fit_into_a_message(start: int, count: int, most: int) -> None:
    """Seven bits of an index are a byte."""
    sources = (Source(name="a", start=start, count=count),)
    spec = replace(SPEC, sources=sources, shuffle_in_shard=True, records_per_shard=most)
    check_expressible(spec)
    with pytest.raises(InvalidArgument, match=f"must fit into 64 MiB, so {most} is the most"):
        check_expressible(replace(spec, records_per_shard=most + 1))
