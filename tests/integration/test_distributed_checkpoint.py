"""A service in `torch.distributed.checkpoint`: saved and loaded with the model, as any Stateful."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
import torch.distributed.checkpoint as dcp
from loader_kit import all_records, elastic, flat, numbers, take, trainer
from master_kit import MasterProcess

from edl_torch.errors import InvalidArgument, TokenError
from edl_torch.testing import FakeMaster

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Counter(torch.nn.Module):
    """A model whose only weight is how often each record was trained on."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(size, dtype=torch.int64))

    def train_on(self, batch: Any) -> None:
        self.counts[numbers(batch)] += 1


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """DCP says that it runs without a process group, which is what is wanted here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninit.*")
        warnings.filterwarnings("ignore", message=".*TypedStorage is deprecated.*")
        yield


@pytest.mark.parametrize("num_workers", [0, 2])
def test_model_and_position_are_one_instant(tmp_path: Path, num_workers: int) -> None:
    model = Counter(40)
    with trainer(FakeMaster(), {"a": 40}) as (service, dataset):
        for count, batch in enumerate(elastic(dataset, num_workers=num_workers), 1):
            model.train_on(batch)
            if count == 4:
                dcp.save({"model": model, "data": service}, checkpoint_id=tmp_path / "saved")
            if count == 7:
                break  # what came after the checkpoint is not in it
    model = Counter(40)
    with trainer(FakeMaster(), {"a": 40}) as (service, dataset):
        dcp.load({"model": model, "data": service}, checkpoint_id=tmp_path / "saved")
        assert model.counts.sum() == 16 == service.progress().acknowledged
        for batch in elastic(dataset, num_workers=num_workers):
            model.train_on(batch)
        assert service.finished
    assert model.counts.tolist() == [1] * 40


def test_loading_in_the_middle_of_a_loop_goes_back(tmp_path: Path) -> None:
    model = Counter(40)
    with trainer(FakeMaster(), {"a": 40}) as (service, dataset):
        loader = elastic(dataset)
        for count, batch in enumerate(loader, 1):
            model.train_on(batch)
            if count == 2:
                dcp.save({"model": model, "data": service}, checkpoint_id=tmp_path / "saved")
            if count == 5:
                dcp.load({"model": model, "data": service}, checkpoint_id=tmp_path / "saved")
        assert count == 5
        for batch in loader:
            model.train_on(batch)
        assert service.finished
    assert model.counts.tolist() == [1] * 40


def test_a_service_that_leaves_the_shard_size_open_follows_the_checkpoint(tmp_path: Path) -> None:
    """DCP asks a service for its state before it loads one: that must not settle what the token says."""
    with trainer(FakeMaster(), batch_size=4, records_per_shard=None) as (service, dataset):
        loop = iter(elastic(dataset))
        trained = flat(take(loop, 3))
        dcp.save({"data": service}, checkpoint_id=tmp_path / "saved")
    with trainer(FakeMaster(), batch_size=6, records_per_shard=None) as (service, dataset):
        dcp.load({"data": service}, checkpoint_id=tmp_path / "saved")
        assert service.session.plan().spec.records_per_shard == 32
        trained += flat(take(iter(elastic(dataset)), 100))
        assert sorted(trained) == all_records()


def test_what_a_token_says_of_the_order_in_shards_stands() -> None:
    """As in the first pass: who saves has said which order it means."""
    with trainer(FakeMaster()) as (service, _):
        service.state_dict()
        with pytest.raises(InvalidArgument, match="in use with shuffle=False"):
            service.session.read_by(service._description.reader, shuffle=True)


def test_a_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    with trainer(FakeMaster(), seed=3) as (service, _):
        dcp.save({"data": service}, checkpoint_id=tmp_path / "saved")
    with trainer(FakeMaster(), seed=4) as (service, dataset):
        with pytest.raises(Exception, match="seed: registered 4, asked 3") as refused:
            dcp.load({"data": service}, checkpoint_id=tmp_path / "saved")
        assert isinstance(refused.value, TokenError)
        assert sorted(flat(take(iter(elastic(dataset)), 100))) == all_records()


# Several ranks ----------------------------------------------------------------------------------------------

SIZE, EPOCHS = 130, 2


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs `checkpoint_ranks.py` on so many ranks; what it says at the end."""

    def run(world: int, master: MasterProcess, saved: Path, what: str) -> dict[str, Any]:
        store = tmp_path / f"store-{what}-{world}"
        out = tmp_path / f"out-{what}-{world}"
        done = preloaded.run(
            [
                *(sys.executable, "-W", "ignore", str(HERE / "checkpoint_ranks.py"), what, str(world)),
                *(str(store), str(saved), str(out), str(SIZE), str(EPOCHS)),
            ],
            env={**os.environ, "EDL_MASTER_ADDR": master.address, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        said: dict[str, Any] = json.loads(out.read_text())
        return said

    return run


def test_what_two_ranks_saved_is_restored_on_three_and_on_one(
    ranks: Callable[..., dict[str, Any]], start_master: Callable[..., MasterProcess], tmp_path: Path
) -> None:
    master = start_master("--grace-s", "0.2")
    saved = ranks(2, master, tmp_path / "saved", "save")
    assert 0 < saved["counted"] < SIZE
    for world, where in ((3, master), (1, start_master())):  # the job's own master, and a new one
        said = ranks(world, where, tmp_path / "saved", "load")
        assert said["found"] == saved["counted"]
        assert said["lineage"] == 2
        assert said["counts"] == [EPOCHS] * SIZE
