"""`DataShardService` as its users meet it: registration, defaults, shards, states, the end."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from edl_torch import DataShardService, ElasticDataLoader, LocalMaster, ShardedDataset, TaskType
from edl_torch.core.calls import Registration
from edl_torch.errors import InvalidArgument, MasterUnavailable, ServiceClosed, UnknownDataset
from edl_torch.readers import MapDatasetReader
from edl_torch.shard import Source
from edl_torch.testing import FakeMaster


def test_without_a_master_one_is_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EDL_MASTER_ADDR", "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with DataShardService(4, dataset_size=8) as service:
        assert isinstance(service.session.master, LocalMaster)
        assert service.fetch_shard() is not None


def test_a_given_master_outlives_the_service() -> None:
    master = LocalMaster()
    for _ in range(2):
        with DataShardService(4, master, dataset_size=8):
            pass
    assert master.status().trainers == ()
    master.close()


def test_the_timeout_of_a_master_client_is_set_at_the_client() -> None:
    with pytest.raises(InvalidArgument, match="MasterClient"):
        DataShardService(4, FakeMaster(), dataset_size=8, master_timeout_s=3.0)


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_how_long_a_master_may_be_away_is_set_at_the_service(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDL_MASTER_ADDR", "127.0.0.1:1")
    monkeypatch.setenv("EDL_MASTER_TIMEOUT_S", "0.1" if how == "environment" else "500")
    timeout_s = 0.1 if how == "argument" else None
    with (
        DataShardService(4, dataset_size=8, master_timeout_s=timeout_s) as service,
        pytest.raises(MasterUnavailable, match=r"127\.0\.0\.1:1 within 0\.1 s"),
    ):
        service.fetch_shard()


def test_a_trainer_that_comes_to_finished_data_says_so(caplog: pytest.LogCaptureFixture) -> None:
    master = FakeMaster()
    for told in (0, 1):
        with DataShardService(4, master.connect(f"trainer {told}"), dataset_size=8) as service:
            while not service.finished:
                while service.fetch_shard():
                    service.report_batch_done()
        assert caplog.text.count("training was finished before this trainer came") == told


def test_the_default_shard_is_eight_batches() -> None:
    with DataShardService(4, FakeMaster(), dataset_size=100) as service:
        assert service.session.plan().spec.records_per_shard == 32
    with DataShardService(4, FakeMaster(), dataset_size=100, num_minibatches_per_shard=3) as service:
        assert service.session.plan().spec.records_per_shard == 12


def test_what_is_no_reader_and_no_master_is_refused_with_the_remedy() -> None:
    wrong: Any = "photos"
    with pytest.raises(InvalidArgument, match=r"create_shards\(\).* not 'photos': .*open_reader\(path\)"):
        DataShardService(4, FakeMaster(), reader=wrong)
    with pytest.raises(InvalidArgument, match=r"MasterClient\('host:port'\) makes one of an address"):
        DataShardService(4, wrong, dataset_size=8)
    with DataShardService(4, FakeMaster(), dataset_size=8) as service:
        with pytest.raises(
            InvalidArgument, match=r"read_records\(\).* not list: .*MapDatasetReader\(dataset\)"
        ):
            ShardedDataset(service, [1, 2])  # type: ignore[arg-type]
        loader = ElasticDataLoader(ShardedDataset(service, MapDatasetReader(range(8))))
        assert repr(loader) == "<ElasticDataLoader 'training' batch_size=4 num_workers=0>"


def test_nothing_is_registered_before_the_first_use() -> None:
    fake = FakeMaster()
    with DataShardService(4, fake, dataset_size=8):
        assert fake.status().datasets == ()


def test_the_name_is_enough_where_the_master_knows_the_dataset() -> None:
    fake = FakeMaster()
    fake.define(
        Registration(
            name="training", sources=(Source(name="x", count=10),), records_per_shard=5, num_epochs=3
        )
    )
    with DataShardService(2, fake) as service:
        assert service.size == 10
        assert service.progress().num_epochs == 3
        shard = service.fetch_shard()
        assert shard is not None
        assert (shard.name, shard.start) == ("x", 0)


def test_the_name_is_not_enough_where_nobody_knows_it() -> None:
    with (
        DataShardService(2, FakeMaster(), dataset_name="elsewhere") as service,
        pytest.raises(UnknownDataset, match=r"no dataset 'elsewhere'.*no reader"),
    ):
        service.fetch_shard()


def test_record_count_is_what_is_leased_and_not_acknowledged() -> None:
    kind = TaskType.PREDICTION
    with DataShardService(4, FakeMaster(), dataset_size=20, records_per_shard=8, task_type=kind) as service:
        assert service.task_type is service.progress().task_type is kind
        assert service.record_count == 0
        assert service.fetch_shard() is not None
        assert service.record_count == 8
        assert service.report_batch_done() is False
        assert service.record_count == 4
        assert service.report_batch_done() is True
        assert service.record_count == 0


def test_fetching_on_after_the_end_gives_none_for_ever() -> None:
    with DataShardService(4, FakeMaster(), dataset_size=4) as service:
        assert service.fetch_shard() is not None
        service.report_batch_done()
        assert [service.fetch_shard() for _ in range(3)] == [None, None, None]
        assert service.finished
        assert service.epoch == 1


def test_shards_that_were_not_reported_are_read_again_with_a_warning() -> None:
    with DataShardService(8, FakeMaster(), dataset_size=8, records_per_shard=8) as service:
        assert service.fetch_shard() is not None
        assert service.fetch_shard() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match=r"8 record\(s\) that were not reported"):
                service.fetch_shard()
        assert service.progress().leased == 0, "they go back also where warnings are errors"
        again = service.fetch_shard()
        assert again is not None
        assert (again.start, again.end) == (0, 8)


def test_repr_shows_the_state() -> None:
    service = DataShardService(4, FakeMaster(), dataset_size=8)
    assert repr(service).startswith("<DataShardService 'training' new batch_size=4 held=0")
    service.fetch_shard()
    assert " open " in repr(service)
    assert "held=4" in repr(service)
    service.close()
    assert " closed " in repr(service)


def test_close_gives_everything_back_and_ends_every_call() -> None:
    fake = FakeMaster()
    service = DataShardService(4, fake, dataset_size=8)
    service.fetch_shard()
    service.close()
    service.close()
    assert fake.dataset_status("training").leased == 0
    assert fake.dataset_status("training").trainers == 0
    for call in (service.fetch_shard, service.report_batch_done, service.state_dict, service.progress):
        with pytest.raises(ServiceClosed, match="'training' is closed: make a new one"):
            call()
