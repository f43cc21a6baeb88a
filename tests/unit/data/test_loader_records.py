"""`loader.records` says which records the batch in hand has; `loader.through` ends with its epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loader_kit import (
    SOURCE_STEP,
    UNEVEN,
    LookingColumnReader,
    NumberReader,
    PickingReader,
    acknowledged,
    all_records,
    elastic,
    flat,
    numbers,
    once,
    trainer,
)
from lockstep_kit import Rank, run_ranks

from edl_torch import DataShardService, ElasticDataLoader, ShardedDataset
from edl_torch.errors import InvalidArgument
from edl_torch.readers import ParquetReader
from edl_torch.shard import Indices
from edl_torch.testing import FakeMaster


class Torn(LookingColumnReader):
    """Some records cannot be read."""

    bad = (2, 3, 9, 1001)

    def number(self, name: str, index: int) -> int:
        number = super().number(name, index)
        if number in self.bad:
            raise OSError(f"no byte of {number}")
        return number


def told(loader: ElasticDataLoader) -> list[int]:
    """The records of the batch in hand, as numbers."""
    return [list(UNEVEN).index(name) * SOURCE_STEP + index for name, index in loader.records]


ORDERS = [{}, {"shuffle_shards": True}, {"shuffle": True}]


# Records of a batch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=["in order", "shards shuffled", "records shuffled"])
@pytest.mark.parametrize("in_shard", [False, True], ids=["plain", "shuffled inside"])
@pytest.mark.parametrize("workers", [0, 2])
def test_records_are_those_of_the_batch_in_its_order(
    order: dict[str, Any], in_shard: bool, workers: int
) -> None:
    fake, seen = FakeMaster(), []
    with trainer(fake, PickingReader(UNEVEN), dataset={"shuffle": in_shard}, seed=3, **order) as (_, dataset):
        loader = elastic(dataset, num_workers=workers)
        for batch in loader:
            assert told(loader) == numbers(batch)
            seen.append(numbers(batch))
    assert sorted(flat(seen)) == all_records()


@pytest.mark.parametrize("columnar", [False, True], ids=["samples", "columns"])
def test_records_leave_out_what_went_to_quarantine(columnar: bool) -> None:
    fake, seen = FakeMaster(), []
    quarantining = {"on_bad_record": "quarantine"}
    with trainer(fake, Torn(UNEVEN), dataset=quarantining, max_bad_records=4) as (_, dataset):
        loader = elastic(dataset, **({"batch_size": None} if columnar else {}))
        for batch in loader:
            assert told(loader) == numbers(batch)
            seen.append(numbers(batch))
    assert sorted(flat(seen)) == [n for n in all_records() if n not in Torn.bad]


def test_a_batch_that_stands_in_has_no_records() -> None:
    counted: list[int] = []

    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for batch in rank.one_pass():
            assert len(rank.loader.records) == rank.loader.weight
            if rank.loader.weight:
                assert told(rank.loader) == batch
            counted.append(len(rank.loader.records))

    ranks = run_ranks(FakeMaster(), 2, work, {"a": 12}, records_per_shard=12)
    assert sum(rank.seen.stand_ins for rank in ranks)
    assert sum(counted) == 12


def test_indices_are_joined_by_name() -> None:
    a = Indices(("a",), np.array([3, 4]))
    b = Indices(("b", "a"), np.array([1, 2]), np.array([0, 1]))
    assert list(Indices.joined([a, b, a[:0]])) == [("a", 3), ("a", 4), ("b", 1), ("a", 2)]
    assert list(Indices.joined([])) == []
    assert Indices.joined([b]) is b


# One epoch and no other -----------------------------------------------------------------------------------


def test_through_reads_the_epochs_up_to_the_one_named() -> None:
    fake = FakeMaster()
    with trainer(fake, num_epochs=3) as (service, dataset):
        loader = elastic(dataset)
        assert sorted(flat(map(numbers, loader.through(0)))) == all_records()
        assert list(loader.through(0)) == []
        epochs = [(loader.epoch, n) for batch in loader.through(2) for n in numbers(batch)]
        assert sorted(epochs) == [(epoch, n) for epoch in (1, 2) for n in all_records()]
        assert list(loader.through(5)) == []
        assert service.finished


def test_a_trainer_that_comes_late_gets_no_batch_of_the_next_epoch() -> None:
    fake = FakeMaster()
    with trainer(fake, num_epochs=2) as (_, first), trainer(fake, num_epochs=2) as (late, second):
        late.session.plan()  # takes part, and has not begun
        assert sorted(flat(map(numbers, elastic(first).through(0)))) == all_records()
        assert list(elastic(second).through(0)) == []
        assert late.epoch == 1
        assert acknowledged(fake, late) == once(all_records())


def test_an_epoch_that_ends_just_before_the_pass_begins_is_not_followed_by_the_next() -> None:
    """Between the question which epoch runs and the pass over it another trainer may finish it."""
    fake = FakeMaster()
    with trainer(fake, num_epochs=2) as (_, first), trainer(fake, num_epochs=2) as (late, second):
        loader = elastic(second)
        running = loader._running_epoch

        def then_the_other_finishes() -> int:
            epoch = running()
            for _ in elastic(first).through(0):
                pass
            return epoch

        loader._running_epoch = then_the_other_finishes  # type: ignore[method-assign]
        assert list(loader.through(0)) == []
        assert late.epoch == 1


def test_through_needs_epochs_that_end() -> None:
    with trainer(FakeMaster(), epoch_barrier=False, num_epochs=2) as (_, dataset):
        loader = elastic(dataset)
        with pytest.raises(InvalidArgument, match="epoch_barrier"):
            next(loader.through(0))


def test_synchronous_ranks_go_through_the_same_epochs() -> None:
    def work(rank: Rank) -> None:
        rank.service.load_state_dict(None)
        for epoch in (0, 0, 1):
            rank.seen.passes.append([])
            for batch in rank.loader.through(epoch):
                rank.seen.passes[-1].append((numbers(batch), rank.loader.weight))

    ranks = run_ranks(FakeMaster(), 2, work, NumberReader(UNEVEN), num_epochs=2)
    assert [rank.seen.steps for rank in ranks] == [ranks[0].seen.steps] * 2
    assert ranks[0].seen.steps[1] == 0
    trained = sorted(n for rank in ranks for n in rank.seen.trained)
    assert trained == sorted(all_records() * 2)


# Records mixed inside windows of shards: each block is read once while it is needed -------------------------


@pytest.mark.parametrize("columnar", [True, False], ids=["columns", "rows"])
def test_row_groups_of_a_window_are_decoded_once_whatever_the_cache(tmp_path: Path, columnar: bool) -> None:
    for number in range(3):
        ids = np.arange(40) + 1000 * number
        pq.write_table(
            pa.table({"id": ids, "half": ids / 2}), tmp_path / f"{number}.parquet", row_group_size=8
        )
    reader = ParquetReader(tmp_path, cache_bytes=1)
    with DataShardService(
        4, FakeMaster(), reader, records_per_shard=8, shuffle_shards=True, shuffle_window=5
    ) as service:
        size = {"batch_size": None} if columnar else {}
        loader = ElasticDataLoader(ShardedDataset(service, reader), **size)
        batches = list(loader)
    assert sorted(i for batch in batches for i in batch["id"].tolist()) == sorted(
        1000 * number + i for number in range(3) for i in range(40)
    )
    assert all((batch["half"] * 2 == batch["id"]).all() for batch in batches)
    assert reader.groups_decoded == 15
