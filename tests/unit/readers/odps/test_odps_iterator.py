"""Reading a MaxCompute table in order, and by forked processes."""

from __future__ import annotations

import multiprocessing
import threading
from collections import Counter

import numpy as np
import pytest
from maxcompute import Fail

from edl_torch.errors import BadRecord, InvalidArgument, ReaderError, SourceChanged
from edl_torch.readers.odps import reader as odps_reader
from edl_torch.readers.odps.reader import ODPSDataReader, ODPSReader
from edl_torch.shard import Shard, Task
from edl_torch.testing import wait_until

HERE = (None, None, None, None)  # project, keys and endpoint of the environment


@pytest.fixture
def small_slices(monkeypatch):
    """Of 100 rows instead of 8192, so that a small table has many."""
    monkeypatch.setattr(odps_reader, "SLICE_ROWS", 100)


@pytest.fixture
def place(server):
    """As HERE, with the keys: a forkserver, the default from Python 3.14 on, may have begun without them."""
    return (None, server.access_id, server.access_key, None)


@pytest.fixture
def reader(place, small_slices):
    return ODPSReader(*place, "numbers", options={"odps.options.retry_times": 1})


def first(batches):
    return [row[0] for batch in batches for row in batch]


@pytest.mark.parametrize("num_processes", [0, 1, 3])
def test_batches_are_lists_of_rows_in_order(reader, num_processes):
    batches = list(reader.to_iterator(1, 0, 64, num_processes=num_processes))
    assert [len(batch) for batch in batches] == [64] * 15 + [40]
    assert first(batches) == list(range(1000))
    assert batches[0][1] == (1, "row 1", 0.5)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_processes", [0, 2])
def test_workers_share_the_rows_of_each_epoch(reader, shuffle, num_processes):
    shares = [
        first(reader.to_iterator(3, worker, 30, epochs=2, shuffle=shuffle, num_processes=num_processes))
        for worker in range(3)
    ]
    assert Counter(row for share in shares for row in share) == Counter(dict.fromkeys(range(1000), 2))
    assert all(Counter(Counter(share).values()).keys() == {2} for share in shares)
    assert min(map(len, shares)) > 400


def test_shuffled_rows_stand_elsewhere_in_every_epoch(reader):
    rows = first(reader.to_iterator(1, 0, 100, epochs=2, shuffle=True, num_processes=0))
    assert rows[:1000] != rows[1000:] != sorted(rows[1000:])


def test_columns_and_limit(reader):
    batches = list(reader.to_iterator(1, 0, 50, columns=["f", "i"], table_size_limit=120, num_processes=0))
    assert [len(batch) for batch in batches] == [50, 50, 20]
    assert batches[0][1] == (0.5, 1)
    shares = [first(reader.to_iterator(2, worker, 50, table_size_limit=120)) for worker in range(2)]
    assert sorted(shares[0] + shares[1]) == list(range(120))
    assert list(reader.to_iterator(1, 0, 50, table_size_limit=0)) == []


def test_partitions_follow_each_other(server, place, small_slices):
    parts = {f"ds={day}": {"i": list(range(10 * day, 10 * day + 5))} for day in range(3)}
    server.add_table("days", {"i": "bigint"}, partition_keys={"ds": "string"}, partitions=parts)
    batches = list(ODPSReader(*place, "days", "ds=[12]").to_iterator(1, 0, 3, num_processes=2))
    assert batches == [[(10,), (11,), (12,)], [(13,), (14,)], [(20,), (21,), (22,)], [(23,), (24,)]]


def test_rows_one_by_one(reader):
    assert [reader.record() for _ in range(2)] == [
        (0, "row 0", pytest.approx(float("nan"), nan_ok=True)),
        (1, "row 1", 0.5),
    ]
    assert sum(1 for _ in iter(reader.record, None)) == 998
    assert reader.record() is None
    assert len(reader) == 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers=0"),
        ({"worker_index": 2}, "worker_index=2"),
        ({"worker_index": -1}, "worker_index=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.0}, r"batch_size=2\.0"),
        ({"epochs": 0}, "epochs=0"),
        ({"num_processes": -1}, "num_processes=-1"),
        ({"columns": []}, "at least one"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_batch(reader, arguments, message):
    with pytest.raises(InvalidArgument, match=message):
        reader.to_iterator(**{"num_workers": 2, "worker_index": 0, "batch_size": 2, **arguments})


def test_unknown_options_are_named(server):
    with pytest.raises(InvalidArgument, match="options has colour"):
        ODPSReader(*HERE, "numbers", options={"colour": "red"})
    known = {"odps.options.read_timeout": 5, "odps.options.connect_timeout": 5}
    known |= {"odps.options.tunnel.endpoint": server.tunnel_endpoint, "columns": ["s"]}
    assert ODPSReader(*HERE, "numbers", options=known).record() == ("row 0",)
    assert server.requests["tunnel"] == 0


def threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("edl-odps")]


def test_leaving_early_ends_the_threads(reader, server):
    batches = reader.to_iterator(1, 0, 10, num_processes=3)
    next(batches)
    assert threads()
    batches.close()
    wait_until(lambda: not threads(), timeout_s=10, what="threads of an iterator that was left")


def test_an_error_on_the_way_is_raised_as_it_is(server, reader):
    batches = reader.to_iterator(1, 0, 50, num_processes=2)
    next(batches)
    server.tables["numbers"].touch()
    with pytest.raises(SourceChanged, match=r"demo\.numbers was written to"):
        list(batches)


def test_an_outage_names_the_rows(server, reader):
    server.faults.always("data", Fail(503))
    with pytest.raises(ReaderError, match=r"rows 0 to 100 of demo\.numbers failed after 1 retries"):
        list(reader.to_iterator(1, 0, 50, num_processes=2))


def test_a_null_without_a_value_is_raised_where_rows_are_made(server, place):
    server.add_table("gaps", {"i": "bigint"}, {"i": [1, None]})
    with pytest.raises(BadRecord, match="fill_nulls"):
        list(ODPSReader(*place, "gaps").to_iterator(1, 0, 50, num_processes=1))
    filled = ODPSReader(*place, "gaps", options={"fill_nulls": {"i": 0}})
    assert first(filled.to_iterator(1, 0, 50, num_processes=1)) == [1, 0]


# Forked processes beside each other and beside their parent: each row once, always --------------------------


ROUNDS, CHILDREN, ROWS, RUN = 4, 4, 800, 100
NAME = "demo.big"


def read_share(reader, child, pipe):
    """Every fourth run, half of it in each way; the text of each row must be its number's."""
    found = []
    for start in range(RUN * child, ROWS, RUN * CHILDREN):
        batch = reader.read_batch(NAME, np.arange(start, start + RUN // 2))
        found += list(zip(batch["i"].tolist(), batch["s"].tolist(), strict=True))
        task = Task(shard=Shard(name=NAME, start=start + RUN // 2, end=start + RUN))
        found += [(row["i"], row["s"]) for row in reader.read_records(task)]
    pipe.send(found)
    pipe.close()


def test_four_forked_processes_read_each_row_once_in_every_round(server):
    rows = {"i": list(range(ROWS)), "s": [f"row {row}" for row in range(ROWS)]}
    server.add_table("big", {"i": "bigint", "s": "string"}, rows)
    expected = list(zip(rows["i"], rows["s"], strict=True))
    reader = ODPSDataReader("big", block_rows=2 * RUN)
    context = multiprocessing.get_context("fork")
    for round_ in range(ROUNDS):
        reader.read_batch(NAME, np.array([round_, ROWS - 1]))  # the parent's connections are open and warm
        pipes, children = [], []
        for child in range(CHILDREN):
            ours, theirs = context.Pipe(duplex=False)
            children.append(context.Process(target=read_share, args=(reader, child, theirs), daemon=True))
            children[-1].start()
            theirs.close()
            pipes.append(ours)
        mine = reader.table.fetch("", 200 * (round_ % 4), 200)  # and used while the children read
        found = [row for pipe in pipes if pipe.poll(60) for row in pipe.recv()]
        for child in children:
            child.join(30)
        assert [child.exitcode for child in children] == [0] * CHILDREN, round_
        assert sorted(found) == expected, round_
        assert mine["i"].to_pylist() == list(range(200 * (round_ % 4), 200 * (round_ % 4) + 200))
    assert server.requests["session"] == 1
    assert reader.retries == 0
