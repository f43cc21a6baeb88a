"""Real ranks over gloo in a device mesh: gradients are those of one process, and checkpoints go on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch.distributed as dist
from loader_kit import NumberReader
from master_kit import MasterProcess
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from edl_torch import ElasticDataLoader
from edl_torch.errors import InvalidArgument
from edl_torch.testing import FakeMaster

HERE = Path(__file__).parent
RECORDS = 29


def test_gradients_are_those_of_one_process(
    tmp_path: Path, start_master: Callable[..., MasterProcess]
) -> None:
    run("mesh_process.py", start_master().address, tmp_path / "store", tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    check([rank["tp"] for rank in found], parts=2)
    check([rank["hsdp"] for rank in found], parts=1)


def run(script: str, master: str, *arguments: Path) -> None:
    done = preloaded.run(
        [sys.executable, "-W", "ignore", str(HERE / script), *map(str, arguments)],
        env={**os.environ, "EDL_MASTER_ADDR": master, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


def test_large_batches_arrive_whole_and_a_rank_that_is_killed_ends_the_job(
    tmp_path: Path, start_master: Callable[..., MasterProcess]
) -> None:
    run("parts_process.py", start_master().address, tmp_path)
    holder, follower = (json.loads((tmp_path / f"large.{rank}.json").read_text()) for rank in range(2))
    assert follower == holder
    assert sorted(number for batch in holder["seen"] for number in batch) == list(range(24))
    for job, survivor in (("holder dies", 1), ("follower dies", 0)):
        assert not (tmp_path / f"{job}.{1 - survivor}.json").exists()
        found = json.loads((tmp_path / f"{job}.{survivor}.json").read_text())
        assert "another rank of this job is gone" in found["error"]
        assert len(found["seen"]) <= 4
    borrower = json.loads((tmp_path / "lender dies.1.json").read_text())
    assert "another rank of this job is gone" in borrower["error"]


def check(ranks: list[dict[str, Any]], parts: int) -> None:
    assert max(rank["worst"] for rank in ranks) < 1e-12
    holders = ranks[::parts]
    assert {rank["trainers"] for rank in ranks} == {len(holders)}
    for number, rank in enumerate(ranks):
        assert rank["trained"] == holders[number // parts]["trained"]
    for epoch in ("first", "again"):
        trained = [number for rank in holders for number in rank["trained"][epoch]]
        assert sorted(trained) == list(range(RECORDS))


@pytest.fixture
def only_rank() -> Iterator[None]:
    """The only rank of a job."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loader(mesh: DeviceMesh | None, **arguments: object) -> ElasticDataLoader:
    return ElasticDataLoader(
        NumberReader({"a": 9}), 4, master_client=FakeMaster().connect(), mesh=mesh, **arguments
    )  # type: ignore[arg-type]


def test_a_mesh_of_one_dimension_is_that_of_synchronous_ranks(only_rank: None) -> None:
    with loader(init_device_mesh("cpu", (1,))) as synchronous:
        assert [len(batch) for batch in synchronous] == [4, 4, 1]


def test_arguments_that_contradict_a_mesh_are_refused(only_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(InvalidArgument, match="no dimension 'data', but 'dp', 'tp'"):
        loader(mesh, dp="data")
    for arguments in ({"synchronous": False}, {"process_group": dist.group.WORLD}):
        with pytest.raises(InvalidArgument, match="mesh= says which ranks step together"):
            loader(mesh, **arguments)
    with pytest.raises(InvalidArgument, match="dp= names dimensions of mesh="):
        loader(None, dp="replicate")


def test_a_mesh_needs_a_process_group() -> None:
    with pytest.raises(InvalidArgument, match=r"needs torch.distributed: call torch"):
        loader(object())  # type: ignore[arg-type]
