"""Jobs under torchrun: which they are, who has the master and where, and that it ends with its agent."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from edl_torch.client.environment import finds_master_through_torchrun
from edl_torch.client.torchrun import init_process_group, sidecar
from edl_torch.client.torchrun import job as job_module
from edl_torch.client.torchrun import job as worker_module
from edl_torch.client.torchrun.job import Job
from edl_torch.client.torchrun.sidecar import MasterEntry
from edl_torch.errors import InvalidArgument, MasterStartError

JOB = Job(
    run_id="run",
    rank=0,
    world_size=2,
    node=0,
    nodes=1,
    least_nodes=1,
    most_nodes=1,
    host="localhost",
    port=1,
    agents_store=True,
    agent=1,
    log_dir=None,
)


class Machines:
    """Masters that do nothing but listen; counts those that were started."""

    def __init__(self) -> None:
        self.started: list[socket.socket] = []
        self.kept: MasterEntry | None = None
        self.fails = ""

    def start(self) -> MasterEntry:
        if self.fails:
            raise MasterStartError(self.fails)
        self.started.append(socket.create_server(("127.0.0.1", 0)))
        return MasterEntry.of(f"127.0.0.1:{self.started[-1].getsockname()[1]}", token="its own")

    def running(self) -> MasterEntry | None:
        return self.kept

    def kill(self) -> None:
        self.started[-1].close()


@pytest.fixture
def machines() -> Iterator[Machines]:
    machines = Machines()
    with ExitStack() as stack:
        yield machines
        for server in machines.started:
            stack.enter_context(server)


@pytest.fixture
def store() -> dist.HashStore:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    return store


def find(store: dist.Store, machines: Any, job: Job = JOB) -> MasterEntry:
    return sidecar.MasterFinder(job, store, machines).find()


def found_at_once(store: dist.Store, *workers: tuple[Machines, Job]) -> list[MasterEntry]:
    """What workers find that look at the same time."""
    found: list[MasterEntry] = []
    threads = [
        threading.Thread(target=lambda who=who, job=job: found.append(find(store, who, job)), daemon=True)
        for who, job in workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_workers_that_come_at_once_start_one_master(store: dist.HashStore, machines: Machines) -> None:
    found = found_at_once(store, *[(machines, JOB)] * 8)
    assert found == [found[0]] * 8
    assert found[0].token == "its own"
    assert len(machines.started) == 1


def test_a_restarted_worker_finds_the_master_of_before(store: dist.HashStore, machines: Machines) -> None:
    first = find(store, machines)
    assert find(store, machines, replace(JOB, rank=1)) == first
    assert len(machines.started) == 1


def test_a_master_that_is_gone_is_followed_by_another_one(store: dist.HashStore, machines: Machines) -> None:
    first = find(store, machines)
    machines.kill()
    second = find(store, machines)
    assert second != first
    assert find(store, machines) == second


def test_in_a_new_store_the_master_that_another_nodes_agent_kept_goes_on(machines: Machines) -> None:
    kept = machines.start()
    theirs = Machines()
    theirs.kept = kept
    store = dist.HashStore()
    other = replace(JOB, nodes=2, node=1, rank=1)
    assert found_at_once(store, (machines, replace(JOB, nodes=2)), (theirs, other)) == [kept, kept]
    assert len(machines.started) == 1


def test_a_worker_that_dies_before_it_writes_its_entry_holds_nobody_up_for_long(
    store: dist.HashStore, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "CLAIM_S", 0.1)
    dist.PrefixStore("edl_torch/run/master", store).add("claim/1", 1)
    found = find(store, machines)
    for _ in range(2):
        assert find(store, machines) == found, "later incarnations do not wait for the one that died"
    machines.kill()
    assert find(store, machines) != found
    assert len(machines.started) == 2


def test_who_cannot_start_it_tells_the_others_why(store: dist.HashStore, machines: Machines) -> None:
    machines.fails = "no room"
    with pytest.raises(MasterStartError, match="no room"):
        find(store, machines)
    store_of_claims = dist.PrefixStore("edl_torch/run/master", store)
    assert MasterEntry.read(store_of_claims.get("entry/1")).error == "no room"
    machines.fails = ""
    find(store, machines)  # a restart tries again
    assert len(machines.started) == 1


def test_nodes_that_come_and_go_over_a_store_of_an_agent_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker_module._warn_of_store(replace(JOB, least_nodes=2, most_nodes=2))
    worker_module._warn_of_store(replace(JOB, most_nodes=3, agents_store=False))
    assert not caplog.records
    for _ in range(2):
        worker_module._warn_of_store(replace(JOB, most_nodes=3))
    (record,) = caplog.records
    assert "1 to 3 nodes" in record.getMessage()
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in record.getMessage()


def test_a_loopback_master_of_another_node_is_refused_with_what_to_do() -> None:
    elsewhere = MasterEntry(address="127.0.0.1:50001", network="another machine")
    with pytest.raises(MasterStartError, match=r"of another node only.*EDL_MASTER_INSECURE=1"):
        _ = elsewhere.answers


def test_a_loopback_master_that_another_node_kept_is_not_looked_for_here(machines: Machines) -> None:
    theirs = replace(machines.start(), network="another machine")  # something answers here, too
    store = dist.HashStore()
    store_of_claims = dist.PrefixStore("edl_torch/run/master", store)
    store_of_claims.set("node/1", theirs.text)
    with pytest.raises(MasterStartError, match="of another node only"):
        find(store, machines, replace(JOB, nodes=2))


@pytest.mark.parametrize(("given", "passed"), [(None, None), (7.0, timedelta(seconds=7))])
def test_without_a_time_limit_each_backend_has_torchs_own(
    monkeypatch: pytest.MonkeyPatch, given: float | None, passed: timedelta | None
) -> None:
    """That of nccl is shorter than gloo's."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **named: calls.append(named))
    init_process_group("nccl", timeout_s=given)
    assert calls == [{"timeout": passed}]


# What torchrun says to its workers, and what it does not ----------------------------------------------------


WORKER = {
    "TORCHELASTIC_RUN_ID": "run",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_a_worker_of_an_agent(tmp_path: Path) -> None:
    error_file = tmp_path / "run_x" / "attempt_2" / "0" / "error.json"
    error_file.parent.mkdir(parents=True)
    job = Job.from_env(WORKER | {"TORCHELASTIC_ERROR_FILE": str(error_file)})
    assert (job.rank, job.world_size, job.node, job.nodes) == (3, 4, 1, 2)
    assert (job.host, job.port, job.agents_store) == ("node-0", 29500, True)
    assert job.log_dir == tmp_path / "run_x"


@pytest.mark.parametrize(
    "error_file", ["", "error.json", "/tmp/error.json", "/nowhere/attempt_0/0/error.json"]
)
def test_a_folder_that_is_not_the_agents_is_not_used(error_file: str) -> None:
    assert Job.from_env(WORKER | {"TORCHELASTIC_ERROR_FILE": error_file}).log_dir is None


@pytest.mark.parametrize(("name", "value"), [("RANK", ""), ("WORLD_SIZE", "two"), ("MASTER_ADDR", "")])
def test_a_variable_that_torchrun_would_have_set_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        Job.from_env(WORKER | {name: value})


def test_a_master_that_is_named_goes_first() -> None:
    assert finds_master_through_torchrun(WORKER)
    assert not finds_master_through_torchrun(WORKER | {"EDL_MASTER_ADDR": "m:1"})
    assert not finds_master_through_torchrun({"WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("arguments", "variable", "nodes"),
    [
        ("torchrun train.py", "", (1, 1)),
        ("torchrun --nnodes=1:3 train.py", "", (1, 3)),
        ("python -m torch.distributed.run --nnodes 2 train.py", "", (2, 2)),
        ("torchrun train.py", "1:4", (1, 4)),
        ("torchrun --nnodes=1 train.py", "4", (1, 1)),
        ("torchrun train.py --nnodes", "", (1, 1)),
        ("torchrun --nnodes=some train.py", "", (1, 1)),
        ("", "", (1, 1)),
    ],
)
def test_how_many_nodes_a_job_may_have(arguments: str, variable: str, nodes: tuple[int, int]) -> None:
    environment = {"PET_NNODES": variable} if variable else {}
    assert job_module._nodes(arguments.split(), environment) == nodes


def test_command_line_of_a_process() -> None:
    assert job_module._arguments(os.getpid())[1 : len(sys.orig_argv)] == sys.orig_argv[1:]
    assert job_module._arguments(0) == []
