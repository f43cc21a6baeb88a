"""Our trainers under an ElasticDL master, over real grpc; that master is `their_master`, by field number."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from by_number import EVALUATION, WireTask
from kit import SIZE, Connect, Numbers, Server, Start
from their_master import TheirMaster

from edl_torch import DataShardService, ElasticDataLoader, ElasticDLMasterClient, MasterClient, ShardedDataset
from edl_torch.elasticdl.tasks import SourceMap
from edl_torch.elasticdl.wire import ForeignTask
from edl_torch.errors import (
    AccountingError,
    DatasetConflict,
    EdlError,
    InvalidArgument,
    MasterUnavailable,
    TooManyBadRecords,
    UnknownDataset,
    Unsupported,
)
from edl_torch.shard import DatasetSpec, Shard, Source, TaskType
from edl_torch.testing import wait_until

ORDERS = ["", "shuffle", "shuffle_shards"]


def numbers_of(shard: Shard) -> list[int]:
    return [index for _, index in shard.indices()]


def trained(loader: ElasticDataLoader[Any], service: DataShardService) -> Counter[int]:
    seen: Counter[int] = Counter()
    while not service.finished:
        for batch in loader:
            seen.update(batch.tolist())
    return seen


def fetched(service: DataShardService) -> Counter[int]:
    """Train on all that is left, shard by shard."""
    seen: Counter[int] = Counter()
    while not service.finished:
        while (shard := service.fetch_shard()) is not None:
            seen.update(numbers_of(shard))
            service.report_batch_done(len(shard))
    return seen


# fetch_shard and report_batch_done ----------------------------------------


@pytest.mark.parametrize("order", ORDERS)
def test_every_record_of_both_epochs_is_trained_on_once(
    master: TheirMaster, connect: Connect, order: str
) -> None:
    options: dict[str, Any] = {order: True} if order else {}
    service = DataShardService(
        4, connect(master), dataset_size=SIZE, num_epochs=2, num_minibatches_per_shard=3, **options
    )
    with service:
        seen = fetched(service)
    assert seen == master.outcomes == Counter(list(range(SIZE)) * 2)
    told = {1: 4, 2: 2, 3: SIZE, 6: 3} | ({ORDERS.index(order) + 3: 1} if order else {})
    assert master.params == [told]
    assert not master.failures


def test_a_shuffled_task_is_the_records_of_its_indices_in_their_order(
    master: TheirMaster, connect: Connect
) -> None:
    service = DataShardService(
        4, connect(master), dataset_size=SIZE, num_minibatches_per_shard=3, shuffle=True
    )
    with service:
        service.session.plan()
        wanted = list(master._todo[0].indices)
        got: list[int] = []
        while len(got) < len(wanted):
            shard = service.fetch_shard()
            assert shard is not None
            got += numbers_of(shard)
    assert got == wanted


def test_wait_is_waited_out_and_is_not_the_end(master: TheirMaster, connect: Connect) -> None:
    peer = DataShardService(8, connect(master, 1), dataset_size=SIZE, num_minibatches_per_shard=1)
    with peer, DataShardService(8, connect(master, 0), dataset_size=SIZE) as service:
        kept = peer.fetch_shard()
        assert kept is not None
        seen: Counter[int] = Counter()
        rest: list[Shard] = []

        def train() -> None:
            while (shard := service.fetch_shard()) is not None:
                rest.append(shard)
                service.report_batch_done(len(shard))

        trainer = threading.Thread(target=train)
        trainer.start()
        wait_until(lambda: master.waits >= 2)
        assert not service.finished
        assert trainer.is_alive()
        while kept is not None:  # another one was fetched ahead
            seen.update(numbers_of(kept))
            peer.report_batch_done(len(kept))
            kept = peer.fetch_shard()
        trainer.join(20)
        assert service.finished
        seen.update(number for shard in rest for number in numbers_of(shard))
    assert seen == master.outcomes == Counter(range(SIZE))


def test_a_dying_peer_gives_its_task_to_who_waits(master: TheirMaster, connect: Connect) -> None:
    peer = DataShardService(8, connect(master, 1), dataset_size=SIZE, num_minibatches_per_shard=1)
    service = DataShardService(8, connect(master, 0), dataset_size=SIZE)
    assert peer.fetch_shard() is not None
    killed = threading.Timer(0.2, master.worker_died, (1,))
    killed.start()
    with service:
        fetched(service)
    assert master.outcomes == Counter(range(SIZE))
    peer.close()


def test_a_trainer_that_leaves_gives_back_its_tasks(master: TheirMaster, connect: Connect) -> None:
    service = DataShardService(4, connect(master, 3), dataset_size=SIZE, num_minibatches_per_shard=2)
    assert service.fetch_shard() is not None
    service.report_batch_done()
    service.close()
    assert master.failures == ["worker 3 leaves before it has trained on all of it"] * len(master.failures)
    assert master.failures
    assert not master.doing


# Errors are never the end ----------------------------------------


def test_calls_that_fail_are_repeated_and_a_report_whose_answer_was_lost_counts_once(
    master: TheirMaster, connect: Connect
) -> None:
    master.refuse.update(get_task=2, report_training_params=2)
    master.lose["report_task_result"] = 2
    with DataShardService(8, connect(master), dataset_size=SIZE) as service:
        fetched(service)
    assert master.outcomes == Counter(range(SIZE))


def test_a_master_that_is_away_is_unavailable_and_not_an_end(master: TheirMaster, connect: Connect) -> None:
    with DataShardService(
        8, connect(master, master_timeout_s=1.5), dataset_size=SIZE, num_minibatches_per_shard=1
    ) as service:
        first = service.fetch_shard()
        assert first is not None
        service.report_batch_done(len(first))
        service.session.flush()
        master.close()

        def go_on() -> None:  # a task or two may have been fetched ahead; there are five
            while (shard := service.fetch_shard()) is not None:
                service.report_batch_done(len(shard))

        with pytest.raises(MasterUnavailable, match=master.address):
            go_on()


def test_a_report_that_no_master_heard_is_told_again(master: TheirMaster, connect: Connect) -> None:
    service = DataShardService(
        8, connect(master, master_timeout_s=1.5), dataset_size=8, num_minibatches_per_shard=1
    )
    with service:
        shard = service.fetch_shard()
        assert shard is not None
        master.refuse["report_task_result"] = 10**6
        service.report_batch_done(len(shard))
        with pytest.raises(MasterUnavailable):
            service.session.flush()
        assert not master.outcomes
        master.refuse["report_task_result"] = 0
        service.session.flush()
        assert master.outcomes == Counter(range(8))
        assert service.fetch_shard() is None
        assert service.finished


def test_a_task_of_a_type_that_was_not_asked_for_is_an_error(master: TheirMaster, connect: Connect) -> None:
    with DataShardService(8, connect(master), dataset_size=SIZE) as service:
        service.session.plan()
        master._todo[0].type = 2
        with pytest.raises(EdlError, match="EVALUATION"):
            service.fetch_shard()


def test_the_callback_at_the_end_is_passed_over(master: TheirMaster, connect: Connect) -> None:
    master.callback_wanted = True
    with DataShardService(8, connect(master), dataset_size=SIZE) as service:
        fetched(service)
    assert master.outcomes == Counter(range(SIZE))
    assert not master.doing


# ElasticDataLoader ----------------------------------------


@pytest.mark.parametrize("order", [*ORDERS, "in shards"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_elastic_loader_trains_on_each_record_once(
    master: TheirMaster, connect: Connect, order: str, num_workers: int
) -> None:
    options: dict[str, Any] = {order: True} if order.startswith("shuffle") else {}
    reader = Numbers()
    service = DataShardService(
        4, connect(master), reader=reader, num_epochs=2, num_minibatches_per_shard=3, **options
    )
    with service:
        dataset = ShardedDataset(service, reader, shuffle=order == "in shards")
        loader = ElasticDataLoader(dataset, num_workers=num_workers)
        batches = []
        while not service.finished:
            batches += [batch.tolist() for batch in loader]
    seen = [number for batch in batches for number in batch]
    assert Counter(seen) == master.outcomes == Counter(list(range(SIZE)) * 2)
    if order == "in shards" and not num_workers:
        assert seen[:12] != sorted(seen[:12]) == list(range(12))


def test_a_batch_counts_at_its_step_also_across_the_end(master: TheirMaster, connect: Connect) -> None:
    reader = Numbers()
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with DataShardService(8, connect(master), reader=reader, num_minibatches_per_shard=1) as service:
        service.attach(optimizer)
        loader = ElasticDataLoader(ShardedDataset(service, reader))
        for number, _ in enumerate(loader, 1):
            if number % 2 == 0:
                optimizer.step()
        assert number == 5
        assert not service.finished  # the fifth batch has no step yet, and its task no outcome
        assert sum(master.outcomes.values()) == 32
        with pytest.raises(AccountingError, match="step on them"):
            list(loader)  # the master says WAIT for ever, and this trainer would wait for itself
        optimizer.step()
        assert list(loader) == []
        assert service.finished
    assert master.outcomes == Counter(range(SIZE))


def test_drop_last_drops_less_than_a_batch(master: TheirMaster, connect: Connect) -> None:
    reader = Numbers()
    with DataShardService(16, connect(master), reader=reader, num_minibatches_per_shard=1) as service:
        loader = ElasticDataLoader(ShardedDataset(service, reader), drop_last=True)
        seen = trained(loader, service)
        assert service.progress().dropped == 8
    assert sum(seen.values()) == 32
    assert master.outcomes == Counter(range(SIZE))  # the master knows no dropped records


def test_a_broken_loop_goes_on_with_what_it_gave_back(master: TheirMaster, connect: Connect) -> None:
    reader = Numbers()
    with DataShardService(4, connect(master), reader=reader, num_minibatches_per_shard=5) as service:
        loader = ElasticDataLoader(ShardedDataset(service, reader), num_workers=2)
        seen: Counter[int] = Counter()
        for number, batch in enumerate(loader):
            if number == 3:
                break  # given back: not trained on
            seen.update(batch.tolist())
        seen += trained(loader, service)
    assert seen == master.outcomes == Counter(range(SIZE))


def quarantining(service: DataShardService, reader: Numbers) -> ElasticDataLoader[Any]:
    return ElasticDataLoader(ShardedDataset(service, reader, on_bad_record="quarantine"))


def test_bad_records_are_named_here_and_counted_there(master: TheirMaster, connect: Connect) -> None:
    reader = Numbers(bad=frozenset({5, 6, 31}))
    with DataShardService(4, connect(master), reader=reader, max_bad_records=3) as service:
        seen = trained(quarantining(service, reader), service)
        assert sorted(bad.index for bad in service.progress().quarantine) == [5, 6, 31]
    assert seen == Counter(set(range(SIZE)) - reader.bad)
    assert master.fail_count == 3
    assert not master.failures


def test_a_bad_record_counts_once_however_many_epochs_meet_it(start_master: Start, connect: Connect) -> None:
    reader = Numbers(bad=frozenset({5}))
    master = start_master([("", 0, SIZE)], num_epochs=3)
    with DataShardService(4, connect(master), reader=reader, max_bad_records=1) as service:
        seen = trained(quarantining(service, reader), service)
        assert [bad.index for bad in service.progress().quarantine] == [5, 5, 5]
    assert seen == Counter([*range(SIZE)] * 3) - Counter({5: 3})


def test_too_many_bad_records_stop_the_trainer(master: TheirMaster, connect: Connect) -> None:
    reader = Numbers(bad=frozenset({4, 5}))
    options = {"num_minibatches_per_shard": 1, "max_bad_records": 1}
    stops = pytest.raises(TooManyBadRecords, match=r"is 1; the last is record 5 of '': ValueError")
    with DataShardService(4, connect(master), reader=reader, **options) as service, stops:
        trained(quarantining(service, reader), service)


# Storages ----------------------------------------


def test_shards_that_the_master_made_keep_their_names(start_master: Start, connect: Connect) -> None:
    master = start_master([("a", 0, 20), ("b", 0, 20)])
    reader = Numbers({"b": 20, "a": 20})
    with DataShardService(4, connect(master), reader=reader, num_epochs=9) as service:
        seen = trained(ElasticDataLoader(ShardedDataset(service, reader)), service)
    assert seen == Counter([*range(20), *range(1000, 1020)])


@pytest.mark.parametrize("order", ORDERS)
def test_several_storages_are_numbered_together_where_the_master_knows_a_size_only(
    master: TheirMaster, connect: Connect, order: str
) -> None:
    reader = Numbers({"a": 10, "none": 0, "b": 17, "c": 3})
    options: dict[str, Any] = {order: True} if order else {}
    service = DataShardService(4, connect(master), reader=reader, num_minibatches_per_shard=2, **options)
    with service:
        seen = trained(ElasticDataLoader(ShardedDataset(service, reader)), service)
    assert seen == Counter([*range(10), *range(2000, 2017), *range(3000, 3003)])
    assert master.outcomes == Counter(range(30))


def test_other_data_at_the_master_is_an_error_that_names_it(start_master: Start, connect: Connect) -> None:
    for shards in ([("other", 0, 8)], [("", 0, SIZE + 8)]):
        master = start_master(shards, records_per_task=SIZE + 8)
        wrong = pytest.raises(DatasetConflict, match=r"record (0 of 'other'|40 of '')")
        with DataShardService(4, connect(master), reader=Numbers()) as service, wrong:
            service.fetch_shard()


def test_evaluation_tasks_are_asked_for_by_their_type(start_master: Start, connect: Connect) -> None:
    master = start_master()
    master.evaluation += [WireTask(name="e", start=n, end=n + 4, type=EVALUATION) for n in (0, 4)]
    reader = Numbers({"e": 8})
    service = DataShardService(
        4, connect(master), reader=reader, dataset_name="evaluation", task_type=TaskType.EVALUATION
    )
    with service:
        seen = trained(ElasticDataLoader(ShardedDataset(service, reader)), service)
    assert seen == Counter(range(8))
    assert not master.params  # they would become training data
    assert not master.doing


def test_our_client_of_that_protocol_under_our_own_master(server: Server) -> None:
    reader = Numbers()
    client = ElasticDLMasterClient(server.address, 1)
    with client, DataShardService(4, client, reader=reader, num_epochs=2, shuffle=True) as service:
        seen = trained(ElasticDataLoader(ShardedDataset(service, reader)), service)
    assert seen == Counter(list(range(SIZE)) * 2)
    assert server.training.finished


def test_a_source_with_a_start_is_numbered_from_its_start() -> None:
    spec = DatasetSpec(
        name="d", sources=(Source(name="a", start=5, count=3), Source(name="b", count=4)), records_per_shard=4
    )
    places = SourceMap(spec, shuffle=False)
    named = places.slices(ForeignTask(name="a", start=6, end=8), 0)
    together = places.slices(ForeignTask(start=1, end=5), 0)
    assert [(s.shard, s.skip, s.limit) for s in named] == [(0, 1, 2)]
    assert [(s.shard, s.skip, s.limit) for s in together] == [(0, 1, 2), (1, 0, 2)]


# What a trainer of ours cannot have of an ElasticDL master, and how it comes to speak to one ----------------


def test_what_the_protocol_lacks_is_refused_with_a_remedy(master: TheirMaster, connect: Connect) -> None:
    client = connect(master)
    with DataShardService(4, client, dataset_size=SIZE) as service:
        refusals = (service.state_dict, lambda: service.load_state_dict(None), client.status)
        for refused in refusals:
            with pytest.raises(Unsupported, match="edl-torch master"):
                refused()
    synchronous = pytest.raises(Unsupported, match="synchronous")
    with DataShardService(4, client, dataset_size=SIZE) as service, synchronous:
        service.position.synchronise(object())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="audit_dir"):
        DataShardService(4, client, dataset_size=SIZE, audit_dir="nowhere")
    nameless = pytest.raises(UnknownDataset, match="dataset_size")
    with DataShardService(4, connect(master), dataset_name="unknown") as service, nameless:
        service.fetch_shard()
    for options, error, word in (
        ({"dataset_size": 2**31}, InvalidArgument, "2147483647"),
        ({"dataset_size": SIZE, "records_per_shard": 6}, InvalidArgument, "batch_size=4"),
        ({"dataset_size": SIZE, "task_type": TaskType.PREDICTION}, Unsupported, "--prediction_data"),
    ):
        refusal = pytest.raises(error, match=word)
        with DataShardService(4, connect(master), **options) as service, refusal:  # type: ignore[arg-type]
            service.fetch_shard()
    assert len(master.params) == 1  # of the first service


def test_the_environment_chooses_the_protocol(master: TheirMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_MASTER_PROTOCOL", "elasticdl")
    monkeypatch.setenv("MASTER_ADDR", master.address)
    monkeypatch.setenv("WORKER_ID", "12")
    with DataShardService(8, dataset_size=8) as service:
        assert service.fetch_shard() is not None
        assert [worker for worker, _ in master.doing.values()] == [12]
        service.report_batch_done(8)
    monkeypatch.setenv("WORKER_ID", "twelve")
    with pytest.raises(InvalidArgument, match="'twelve'"):
        DataShardService(8, dataset_size=8)
    monkeypatch.setenv("EDL_MASTER_PROTOCOL", "elastic")
    with pytest.raises(InvalidArgument, match="edl_torch, elasticdl"):
        DataShardService(8, dataset_size=8)
    monkeypatch.setenv("EDL_MASTER_PROTOCOL", "elasticdl")
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(InvalidArgument, match="EDL_MASTER_ADDR"):
        DataShardService(8, dataset_size=8)


def test_the_wrong_protocol_says_which_is_right(master: TheirMaster) -> None:
    with (
        MasterClient(master.address, master_timeout_s=5) as client,
        DataShardService(8, client, dataset_size=8) as service,
        pytest.raises(EdlError, match="EDL_MASTER_PROTOCOL=elasticdl"),
    ):
        service.fetch_shard()
