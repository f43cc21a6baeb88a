"""ElasticDL's own, unmodified client under our master, where it is installed."""

from __future__ import annotations

import inspect
from collections import Counter

import pytest
from kit import Server

service_module = pytest.importorskip(
    "elasticai_api.common.data_shard_service", reason="ElasticDL's client is missing"
)
client_module = pytest.importorskip("elasticai_api.common.master_client")
channel_module = pytest.importorskip("elasticai_api.util.grpc_utils")

if list(inspect.signature(client_module.MasterClient.__init__).parameters)[1:] != ["channel", "worker_id"]:
    pytest.skip("elasticai_api is a descendant of ElasticDL's client", allow_module_level=True)

RECORDS = 100


@pytest.mark.parametrize("order", ["", "shuffle", "shuffle_shards"])
def test_two_unmodified_clients_drain_our_master(server: Server, order: str) -> None:
    seen: Counter[int] = Counter()
    options = {order: True} if order else {}
    services = [
        service_module.DataShardService(
            client_module.MasterClient(channel_module.build_channel(server.address), worker),
            batch_size=5,
            num_epochs=2,
            dataset_size=RECORDS,
            num_minibatches_per_shard=4,
            **options,
        )
        for worker in range(2)
    ]
    while services:
        for service in list(services):
            shard = service.fetch_shard()
            if shard is None:
                services.remove(service)
                continue
            numbers = list(shard.indices) or list(range(shard.start, shard.end))
            seen.update(numbers)
            for first in range(0, len(numbers), 5):
                service.report_batch_done(len(numbers[first : first + 5]))
    assert seen == Counter(list(range(RECORDS)) * 2)
    assert server.training.finished


def test_its_record_index_service(server: Server) -> None:
    service = service_module.RecordIndexService(
        client_module.MasterClient(channel_module.build_channel(server.address), 0),
        batch_size=5,
        num_epochs=1,
        dataset_size=20,
        shuffle=True,
    )
    seen = Counter(service.fetch_record_index() for _ in range(10))
    service.report_batch_done()
    service.report_batch_done()
    seen.update(service.fetch_record_index() for _ in range(10))
    service.report_batch_done()
    service.report_batch_done()
    assert seen == Counter(range(20))
    assert server.training.finished
