"""Who joins a dataset, with which description, and what may still be changed of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from dispatcher_kit import TRAINING, Trainer, photo, whole

from edl_torch.core.calls import (
    PassState,
    Registration,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import (
    DatasetConflict,
    InvalidArgument,
    StaleLease,
    UnknownDataset,
)
from edl_torch.shard import Source, TaskType


def test_the_first_description_makes_the_dataset_and_a_name_alone_joins_it(dispatcher: Dispatcher) -> None:
    made = Trainer(dispatcher, "a").register()
    joined = Trainer(dispatcher, "b", batch_size=9).register(Registration(name="training"))
    assert joined == replace(made, fence=replace(made.fence, member=2))
    assert (made.fence.ledger, made.fence.lineage, made.epoch, made.spec.size) == ("L1", 1, 0, 16)
    assert dispatcher.dataset_status("training").trainers == 2


def test_a_name_that_nobody_described_is_unknown(dispatcher: Dispatcher) -> None:
    with pytest.raises(UnknownDataset):
        Trainer(dispatcher, "a").register(Registration(name="training"))
    assert dispatcher.status(0.0).datasets == ()
    with pytest.raises(UnknownDataset):
        dispatcher.token("training")


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_has_records(dispatcher: Dispatcher, batch_size: int) -> None:
    with pytest.raises(InvalidArgument, match="batch_size"):
        Trainer(dispatcher, "a", batch_size=batch_size).register()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sources": (Source(name="a", count=17),)}, "size: registered 16, asked 17"),
        ({"records_per_shard": 4}, "records_per_shard: registered 8, asked 4"),
        ({"seed": 3}, "seed: registered 0, asked 3"),
        ({"shuffle": True}, "shuffle: registered False"),
        ({"shuffle_shards": True}, "shuffle_shards: registered False"),
        ({"shuffle_in_shard": True}, "shuffle_in_shard: registered False"),
        ({"num_epochs": 2}, "num_epochs: registered 1, asked 2"),
        ({"epoch_barrier": False}, "epoch_barrier: registered True"),
        ({"max_bad_records": 1}, "max_bad_records: registered 0, asked 1"),
        ({"task_type": TaskType.EVALUATION}, "task_type: registered"),
    ],
)
def test_another_description_is_a_conflict_and_does_not_join(
    dispatcher: Dispatcher, a: Trainer, change: dict[str, Any], named: str
) -> None:
    b = Trainer(dispatcher, "b")
    with pytest.raises(DatasetConflict, match=named):
        b.register(replace(TRAINING, **change))
    assert dispatcher.dataset_status("training").trainers == 1
    with pytest.raises(StaleLease):
        b.lease()


def test_who_uses_a_dataset_alone_may_change_its_options(dispatcher: Dispatcher, a: Trainer) -> None:
    assert a.register(replace(TRAINING, num_epochs=3)).spec.num_epochs == 3


def test_more_epochs_may_follow_when_the_job_is_finished(dispatcher: Dispatcher, a: Trainer) -> None:
    a.report(*map(whole, a.lease(count=9).grants))
    assert a.lease().state is PassState.FINISHED
    a.register(replace(TRAINING, num_epochs=2))
    assert a.lease().grants[0].slice.epoch == 1


def test_in_shard_shuffling_is_settled_by_the_first_trainer(dispatcher: Dispatcher) -> None:
    dispatcher.define(TRAINING, batch_size=4)
    assert Trainer(dispatcher, "a").register(Registration(name="training")).spec.shuffle_in_shard is False
    with pytest.raises(DatasetConflict, match="shuffle_in_shard: registered False, asked True"):
        Trainer(dispatcher, "b").register(Registration(name="training", shuffle_in_shard=True))


def test_a_dataset_may_be_defined_twice_alike(dispatcher: Dispatcher) -> None:
    dispatcher.define(TRAINING)
    dispatcher.define(TRAINING)
    with pytest.raises(DatasetConflict):
        dispatcher.define(replace(TRAINING, seed=5))


def test_a_huge_dataset_registers_at_once(dispatcher: Dispatcher) -> None:
    huge = replace(TRAINING, sources=(Source(name="a", count=10**12),), shuffle=True, shuffle_shards=True)
    b = Trainer(dispatcher, "b")
    b.register(replace(huge, name="huge"))
    assert b.lease("huge").grants[0].slice.limit == 8


# Fewer epochs


def with_epochs(count: int) -> Registration:
    return replace(TRAINING, num_epochs=count)


def test_fewer_epochs_than_have_begun_are_refused(dispatcher: Dispatcher) -> None:
    a = Trainer(dispatcher, "a")
    a.register(with_epochs(3))
    while (answer := a.lease(count=1)).epoch == 0:
        a.report(*map(whole, answer.grants))
    before = photo(dispatcher)
    with pytest.raises(
        DatasetConflict, match=r"in the middle of epoch 1: num_epochs=1 would.*num_epochs=2 or"
    ):
        a.register(with_epochs(1))
    assert photo(dispatcher) == before
    a.register(with_epochs(2))
    assert dispatcher.dataset_status("training").num_epochs == 2


def test_epochs_that_have_not_begun_may_be_left_out(dispatcher: Dispatcher) -> None:
    a = Trainer(dispatcher, "a")
    a.register(with_epochs(3))
    while dispatcher.dataset_status("training").epoch == 0:
        a.report(*map(whole, a.lease(count=9).grants))
    a.register(with_epochs(1))
    assert dispatcher.dataset_status("training").finished


def test_a_dataset_of_the_command_line_has_shards_of_eight_records(dispatcher: Dispatcher) -> None:
    """Nobody has said yet how large batches are."""
    dispatcher.define(replace(TRAINING, records_per_shard=None))
    assert dispatcher.dataset_status("training").shards == 2


def test_what_the_command_line_says_otherwise_is_told_and_does_not_count(dispatcher: Dispatcher) -> None:
    assert dispatcher.define(with_epochs(3)) == []
    assert dispatcher.define(with_epochs(3)) == []
    assert dispatcher.define(with_epochs(5)) == ["num_epochs: registered 3, asked 5"]
    assert dispatcher.dataset_status("training").num_epochs == 3
    with pytest.raises(DatasetConflict, match="seed"):
        dispatcher.define(replace(TRAINING, seed=9))
