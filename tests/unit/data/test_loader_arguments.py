"""`ElasticDataLoader`: a DataLoader's arguments, what to do about wrong ones, and calls that it hands on."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_kit import ColumnReader, NumberReader, elastic, trainer
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler, WeightedRandomSampler

from edl_torch import DataShardService, ElasticDataLoader, ImageDataset, Mixture, ShardedDataset
from edl_torch.data import loader as module
from edl_torch.errors import InvalidArgument
from edl_torch.integrations.records import ShardedRecords
from edl_torch.testing import FakeMaster, ThreadPeers


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        ({}, 10),
        ({"drop_last": True}, 9),
        ({"batch_size": 4}, 10),
        ({"batch_size": None}, 39),
        ({"num_workers": 2}, 10),
    ],
)
def test_the_length_is_the_epochs_and_torch_does_not_warn(arguments: dict[str, Any], length: int) -> None:
    with trainer(FakeMaster(), num_epochs=2) as (service, dataset):
        loader = elastic(dataset, **arguments)
        assert len(loader) == length
        assert type(len(loader)) is int
        assert len(dataset) == 39
        for _ in loader:  # partial batches at the ends of sources and workers: more than the estimate
            pass
        assert service.epoch == 1


def test_the_length_of_columnar_loaders_is_in_batches() -> None:
    with trainer(FakeMaster(), ColumnReader({"a": 21})) as (_, dataset):
        assert len(elastic(dataset, batch_size=None)) == 6


@pytest.mark.parametrize(
    ("arguments", "asks"),
    [
        ({}, True),
        ({"synchronous": False}, False),
        ({"synchronous": "peers"}, False),
        ({"mesh": "a mesh"}, False),
    ],
)
def test_a_loader_that_is_told_which_ranks_step_together_does_not_ask(
    arguments: dict[str, Any], asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    (peers,) = ThreadPeers.group(1)
    monkeypatch.setattr(module, "check_no_ranks", lambda: asked.append(True))
    monkeypatch.setattr(module, "peers_over", lambda mesh, dp, pin_memory: peers)
    if arguments.get("synchronous") == "peers":
        arguments = {"synchronous": peers}
    with ElasticDataLoader(range(8), 4, **arguments) as loader:
        loader.load_state_dict(None)
        assert sum(map(len, loader)) == 8
    assert asked == [True] * asks


class Doubled(ShardedDataset):
    """Does something to each sample."""

    def __iter__(self) -> Iterator[Any]:
        return (2 * sample for sample in super().__iter__())


def test_a_dataset_that_iterates_in_its_own_way_is_asked_sample_by_sample() -> None:
    reader = NumberReader({"a": 6})
    with DataShardService(4, FakeMaster(), reader=reader) as service:
        batches = [batch.tolist() for batch in ElasticDataLoader(Doubled(service, reader))]
    assert batches == [[0, 2, 4, 6], [8, 10]]


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
@pytest.mark.parametrize("value", [None, False])
def test_an_order_that_is_left_open_is_none(name: str, value: object) -> None:
    """As those pass it on that take a DataLoader's arguments."""
    with ElasticDataLoader(range(8), 4, **{name: value}) as loader:
        assert sum(map(len, loader)) == 8


def test_set_epoch_is_no_attribute_and_the_error_says_why() -> None:
    with ElasticDataLoader(range(4), 2) as loader:
        assert not hasattr(loader, "set_epoch"), "frameworks call one that they find"
        with pytest.raises(AttributeError, match="needs none: seed="):
            loader.set_epoch(1)
        with pytest.raises(AttributeError, match="'ElasticDataLoader' object has no attribute 'set_epochs'"):
            loader.set_epochs(1)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"shuffle": True}, "shuffle= at the dataset"),
        ({"sampler": [1]}, "the master decides"),
        ({"sampler": []}, r"the master decides.* of this list read torch.utils.data.Subset\(dataset"),
        ({"sampler": SequentialSampler([1])}, "this SequentialSampler give nothing"),
        ({"sampler": RandomSampler([1])}, "RandomSampler give shuffle=True and seed=…"),
        ({"sampler": DistributedSampler([1], 1, 0)}, r"shuffle=True and seed=…, and leave set_epoch\(\) out"),
        ({"sampler": WeightedRandomSampler([1.0], 1)}, r"Subset\(dataset, list\(sampler\)\)"),
        (
            {"batch_sampler": [[1]]},
            "the master decides.*batch_size=…, shuffle=True and seed=…, and drop_last",
        ),
        ({"generator": torch.Generator()}, "seed=… decides the order"),
        ({"batch_size": 5}, "batch_size is 4 at the service"),
        ({"batch_size": None, "drop_last": True}, "leave out batch_size=None"),
    ],
)
def test_wrong_loader_arguments_name_the_remedy(arguments: dict[str, Any], remedy: str) -> None:
    with trainer(FakeMaster()) as (_, dataset), pytest.raises(InvalidArgument, match=remedy):
        ElasticDataLoader(dataset, **arguments)


@pytest.mark.parametrize("travels", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loader_that_is_copied_or_pickled_says_what_to_do_instead(travels: Callable[[Any], Any]) -> None:
    with trainer(FakeMaster()) as (_, dataset):
        loader = elastic(dataset)
        with pytest.raises(
            InvalidArgument, match=r"'training'.*cannot be copied or pickled.*EDL_MASTER_ADDR"
        ):
            travels(loader)
        assert len(list(loader)) == 10


def test_torchs_own_checks_stand() -> None:
    with trainer(FakeMaster()) as (_, dataset):
        with pytest.raises(ValueError, match="prefetch_factor"):
            ElasticDataLoader(dataset, prefetch_factor=2)
        ElasticDataLoader(dataset, shuffle=False, sampler=None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"batchsize": 2}, r"no argument 'batchsize': did you mean batch_size\?"),
        ({"batch_size": 2, "nthreads": 2}, r"no argument 'nthreads': did you mean num_threads\?"),
        ({"batch_size": 2, "num_worker": 2}, r"no argument 'num_worker': did you mean num_workers\?"),
        ({"batch_size": 2, "index_dir": "x"}, r"no argument 'index_dir': give it to the reader"),
        ({"batch_size": 2, "qqq": 2}, r"no argument 'qqq'$"),
    ],
)
def test_a_misspelt_argument_is_named_with_the_one_that_was_meant(
    arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        ElasticDataLoader([1, 2, 3], **arguments)


def test_a_loader_takes_a_sharded_dataset_and_that_takes_a_service() -> None:
    with pytest.raises(InvalidArgument, match="service must be a DataShardService"):
        ShardedDataset(None, NumberReader({"a": 1}))  # type: ignore[arg-type]
    with (
        trainer(FakeMaster()) as (service, _),
        pytest.raises(InvalidArgument, match="'raise' or 'quarantine'"),
    ):
        ShardedDataset(service, NumberReader({"a": 1}), on_bad_record="skip")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"batch_size": True}, "must be an int"),
        ({"dataset_size": -1}, "dataset_size must be 1 or more"),
        ({"records_per_shard": 8, "num_minibatches_per_shard": 2}, "not both"),
        ({"reader": NumberReader({"a": 1})}, "reader or dataset_size, not both"),
        ({"lookahead": -1}, "lookahead must be 0 or more"),
        ({"lookahead": None}, "lookahead must be an int, not None"),
        ({"batch_size": None}, "batch_size must be an int, not None"),
        ({"lookahead": "told"}, "lookahead must be a number of batches or 'manual', not 'told'"),
        ({"lookahead": 1.5}, "lookahead must be an int, not 1.5"),
        ({"num_epochs": -1}, "num_epochs is -1: give the number of epochs, or 0 for endless"),
        ({"epoch_barrier": 0}, "epoch_barrier is 0: give True or False"),
    ],
)
def test_wrong_service_arguments_name_the_remedy(arguments: dict[str, Any], remedy: str) -> None:
    with pytest.raises(InvalidArgument, match=remedy):
        DataShardService(**{"batch_size": 4, "dataset_size": 8, "master_client": FakeMaster(), **arguments})


def test_no_number_of_epochs_is_one() -> None:
    with DataShardService(4, FakeMaster(), dataset_size=8, num_epochs=None) as service:
        assert service.progress().num_epochs == 1


def test_quarantine_without_room_is_refused_with_the_remedy() -> None:
    reader = NumberReader({"a": 8})
    plans: list[dict[str, Any]] = [{"reader": reader}, {"dataset_size": 8}]
    for plan in plans:
        with DataShardService(4, FakeMaster(), **plan) as service:
            for consumer in (ShardedDataset, ImageDataset, ShardedRecords):
                with pytest.raises(
                    InvalidArgument, match=r"'quarantine' .*max_bad_records=0.*max_bad_records=N"
                ):
                    consumer(service, reader, on_bad_record="quarantine")
            ShardedDataset(service, reader)
        with DataShardService(4, FakeMaster(), **plan, max_bad_records=1) as service:
            ShardedDataset(service, reader, on_bad_record="quarantine")


def test_quarantine_of_data_that_the_master_knows_by_name_is_not_judged_before_it_is_registered() -> None:
    with DataShardService(4, FakeMaster()) as service:
        ShardedDataset(service, NumberReader({"a": 8}), on_bad_record="quarantine")


def test_a_loader_says_how_many_threads_it_has() -> None:
    with ElasticDataLoader(NumberReader({"a": 8}), 4, num_threads=3) as loader:
        assert loader.num_threads == 3
        assert repr(loader) == "<ElasticDataLoader 'training' batch_size=4 num_workers=0 num_threads=3>"
    with ElasticDataLoader(NumberReader({"a": 8}), 4) as loader:
        assert loader.num_threads == 0
        assert "num_threads" not in repr(loader)


def test_what_threads_cannot_do_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="num_threads is -1"):
        ElasticDataLoader(range(8), 4, num_threads=-1)
    with pytest.raises(InvalidArgument, match="prefetch_factor is 0: threads are at least one batch ahead"):
        ElasticDataLoader(range(8), 4, num_threads=1, prefetch_factor=0)
    with ElasticDataLoader(range(8), 4, num_threads=1, prefetch_factor=1) as loader:
        assert sum(map(len, loader)) == 8
    with trainer(FakeMaster()) as (service, dataset):
        with pytest.raises(InvalidArgument, match="leave it out with batch_size=None"):
            elastic(dataset, batch_size=None, num_threads=2)
        with pytest.raises(InvalidArgument, match="Doubled has an __iter__ of its own"):
            elastic(Doubled(service, dataset.reader), num_threads=2)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"dp": "fsdp"}, "dp= names dimensions of mesh=: give that too"),
        ({"process_group": object()}, "give synchronous=True too"),
        ({"process_group": object(), "synchronous": False}, "give synchronous=True too"),
        ({"process_group": object(), "mesh": object()}, "leave out process_group="),
        ({"synchronous": False, "mesh": object()}, "leave out process_group=, and synchronous= too"),
        ({"mesh": object()}, r"mesh=… needs torch\.distributed"),
        ({"mesh": object(), "synchronous": True}, r"mesh=… needs torch\.distributed"),
        ({"synchronous": True}, r"synchronous=True needs torch\.distributed"),
    ],
)
def test_who_steps_together_is_said_in_one_way(arguments: dict[str, Any], remedy: str) -> None:
    with pytest.raises(InvalidArgument, match=remedy):
        ElasticDataLoader(NumberReader({"a": 8}), 4, **arguments)


def test_a_default_that_the_service_has_is_shown_as_such() -> None:
    assert "batch_size: 'int | None' = <the service's>" in str(inspect.signature(ElasticDataLoader))


def test_batch_size_and_shuffle_may_stand_where_a_dataloader_has_them() -> None:
    with ElasticDataLoader(list(range(40)), 10, True) as loader:
        batches = [batch.tolist() for batch in loader]
    assert [len(batch) for batch in batches] == [10] * 4
    read = [number for batch in batches for number in batch]
    assert sorted(read) == list(range(40)) != read


@pytest.mark.parametrize("name", [None, "", 3])
def test_a_name_that_is_none_is_refused_where_the_loader_is_made(name: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"dataset_name is {name!r}: give the dataset a name"):
        ElasticDataLoader([1, 2], batch_size=2, dataset_name=name)


@pytest.mark.parametrize("data", [[], torch.zeros(0, 3), range(0)])
def test_data_without_records_are_refused_where_the_loader_is_made(data: Any) -> None:
    with pytest.raises(InvalidArgument, match="has no records: there is nothing to read"):
        ElasticDataLoader(data, batch_size=4)


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
@pytest.mark.parametrize("name", ["transform", "collate_fn", "worker_init_fn"])
def test_what_cannot_be_sent_to_spawned_workers_is_named(name: str) -> None:
    own: Any = {name: lambda value: value}
    with (
        ElasticDataLoader([1, 2], 2, num_workers=1, multiprocessing_context="spawn", **own) as loader,
        pytest.raises(
            InvalidArgument, match=rf"{name}= cannot be sent to loader workers .* 'spawn': Can't .*"
        ),
    ):
        next(iter(loader))


def test_what_forked_workers_refuse_is_no_matter_of_pickles() -> None:
    own: Any = {"prefetch_factor": 2.5, "collate_fn": lambda samples: samples}
    with (
        ElasticDataLoader([1, 2], 2, num_workers=1, multiprocessing_context="fork", **own) as loader,
        pytest.raises(TypeError, match="float"),
    ):
        next(iter(loader))


def test_of_samples_of_a_mixture_that_are_not_alike_the_error_names_the_components() -> None:
    rows: list[Any] = [{"x": 1}] * 8
    data = Mixture({"images": list(torch.zeros(8, 3)), "rows": rows}, num_records=16)
    with ElasticDataLoader(data, batch_size=4) as loader, pytest.raises((TypeError, KeyError)) as raised:
        next(iter(loader))
    assert "has samples of 'images', 'rows': where they are not alike" in raised.value.__notes__[-1]


@pytest.mark.parametrize(
    ("how", "epochs", "said"),
    [
        ("one loop", 3, ["2 of 3 epochs (num_epochs) were not read"]),
        ("one loop", 1, []),
        ("saved", 3, []),
        ("went back", 1, []),
        ("left", 3, []),
        ("epochs", 3, []),
        ("stopped early", 3, []),
    ],
)
def test_epochs_that_nobody_can_read_any_more_are_said_as_the_loader_is_closed(
    how: str, epochs: int, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with ElasticDataLoader(range(8), batch_size=4, num_epochs=epochs) as loader:
        for _ in loader.epochs() if how in ("epochs", "stopped early") else range(1):
            for _ in loader:
                if how == "left":
                    break
            if how == "stopped early":
                break
        if how == "saved":
            loader.state_dict()
        if how == "went back":
            loader.load_state_dict(None)
    assert len(caplog.messages) == len(said)
    assert all(text in message for text, message in zip(said, caplog.messages, strict=True))


@pytest.mark.parametrize(("name", "restores", "said"), [("", False, 1), ("other", False, 0), ("", True, 0)])
def test_two_runs_of_one_name_and_folder_in_a_program_are_said(
    name: str, restores: bool, said: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named: Any = {"dataset_name": name} if name else {}
    one = ElasticDataLoader(range(8), batch_size=4, audit_dir=tmp_path)
    other = ElasticDataLoader(range(8), batch_size=4, audit_dir=tmp_path, **named)
    with one, other:
        assert len(list(one)) == 2
        if restores:
            other.load_state_dict(one.state_dict())
        list(other)
        assert [message.startswith("two datasets of this program") for message in caplog.messages] == [
            True
        ] * said
