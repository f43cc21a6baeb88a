"""Which master the environment names."""

from __future__ import annotations

import pytest

from edl_torch.client.environment import (
    default_worker_id,
    master_address_from_env,
    master_timeout_from_env,
)
from edl_torch.client.service import default_master
from edl_torch.errors import InvalidArgument


@pytest.mark.parametrize(
    ("environ", "address"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": ""}, None),
        ({"EDL_MASTER_ADDR": "m:1"}, "m:1"),
        ({"EDL_MASTER_ADDR": " "}, None),
        ({"EDL_MASTER_ADDR": "m:1", "MASTER_ADDR": "other:2", "WORLD_SIZE": "4"}, "m:1"),
        ({"MASTER_ADDR": "m:1", "WORLD_SIZE": "4"}, "m:1"),
        ({"MASTER_ADDR": "node-0"}, None),
        ({"MASTER_ADDR": "::1", "MASTER_PORT": "29500"}, None),
    ],
)
def test_address(environ, address):
    assert master_address_from_env(environ) == address


@pytest.mark.parametrize("torchrun", [{}, {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}])
def test_several_ranks_without_a_master_are_told_what_to_do(torchrun):
    with pytest.raises(InvalidArgument, match=r"edl-torch master.*EDL_MASTER_ADDR"):
        master_address_from_env({"WORLD_SIZE": "2"} | torchrun)


@pytest.mark.parametrize("address", ["m", "m:", "m:0", "m:x", "::1"])
def test_unusable_address_names_the_variable(address):
    with pytest.raises(InvalidArgument, match="EDL_MASTER_ADDR"):
        master_address_from_env({"EDL_MASTER_ADDR": address})


def test_world_size_must_be_a_number():
    with pytest.raises(InvalidArgument, match="'two'"):
        master_address_from_env({"WORLD_SIZE": "two"})


def test_worker_id():
    assert default_worker_id({"EDL_TRAINER": " left ", "WORKER_ID": "w7"}) == "left"
    assert default_worker_id({"EDL_TRAINER": "", "WORKER_ID": "w7", "RANK": "3"}) == "w7"
    host, rank, process = default_worker_id({"RANK": "3"}).rsplit("-", 2)
    assert host
    assert rank == "3"
    assert process.isdigit()
    assert default_worker_id({}).rsplit("-", 2)[1] == "0"


def test_a_master_in_the_process_knows_the_trainer_by_its_name(monkeypatch):
    for name in ("EDL_MASTER_ADDR", "WORKER_ID", "EDL_TRAINER"):
        monkeypatch.delenv(name, raising=False)
    assert default_master().worker_id == "local"
    monkeypatch.setenv("EDL_TRAINER", "left")
    assert default_master().worker_id == "left"


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, 600),
        ({"TORCHELASTIC_RUN_ID": "run"}, 30),
        ({"EDL_MASTER_TIMEOUT_S": " 2.5 "}, 2.5),
        ({"EDL_MASTER_TIMEOUT_S": "0"}, 0),
        ({"TORCHELASTIC_RUN_ID": "run", "EDL_MASTER_ADDR": "m:1"}, 600),
    ],
)
def test_how_long_a_master_may_be_away(environ, seconds):
    assert master_timeout_from_env(environ) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_a_time_that_is_none_is_refused(text):
    with pytest.raises(InvalidArgument, match="EDL_MASTER_TIMEOUT_S is"):
        master_timeout_from_env({"EDL_MASTER_TIMEOUT_S": text})
