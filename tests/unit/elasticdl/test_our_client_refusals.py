"""What a trainer of ours cannot have of an ElasticDL master, and how it comes to speak to one."""

from __future__ import annotations

import pytest
from client_kit import SIZE, Connect
from their_master import TheirMaster

from edl_torch import DataShardService, MasterClient
from edl_torch.errors import EdlError, InvalidArgument, UnknownDataset, Unsupported
from edl_torch.shard import TaskType


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
