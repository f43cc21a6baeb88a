"""What torchrun says to its workers, and what it does not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edl_torch.client.environment import finds_master_through_torchrun
from edl_torch.client.torchrun import job as job_module
from edl_torch.client.torchrun.job import Job
from edl_torch.errors import InvalidArgument

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
