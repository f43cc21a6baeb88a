"""A master in the trainer's own process has a page where the environment asks for one."""

from __future__ import annotations

import json
import logging
import urllib.request

import pytest

pytest.importorskip("aiohttp")

from edl_torch.client.service import default_master
from edl_torch.client.torchrun import sidecar
from edl_torch.client.torchrun.job import Job
from edl_torch.errors import MasterStartError
from edl_torch.master.embedded import LocalMaster
from edl_torch.master.web import show


def test_the_page_is_that_of_the_master(calls) -> None:
    master = LocalMaster()
    url = show(master, "127.0.0.1:0")
    master.call(calls.register("a"))
    with urllib.request.urlopen(f"{url}api/status", timeout=10) as answer:
        assert json.load(answer)["trainers"][0]["worker_id"] == "w-a"
    master.close()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(f"{url}api/status", timeout=10)


def test_an_address_of_other_machines_is_refused() -> None:
    with pytest.raises(MasterStartError, match="can be reached from other machines"):
        show(LocalMaster(), "0.0.0.0:0")


def test_the_second_service_of_a_process_goes_without_a_page(monkeypatch, caplog) -> None:
    url = show(LocalMaster(), "127.0.0.1:0")
    monkeypatch.delenv("EDL_MASTER_ADDR", raising=False)
    monkeypatch.setenv("EDL_HTTP", url.removeprefix("http://").rstrip("/"))
    with caplog.at_level(logging.WARNING, logger="edl_torch"):
        assert isinstance(default_master(), LocalMaster)
    assert "another process has this port" in caplog.text


def test_the_master_of_a_torchrun_job_gets_the_address(monkeypatch, tmp_path) -> None:
    import ipaddress

    monkeypatch.setenv("EDL_HTTP", "127.0.0.1:9000")
    job = Job(
        run_id="r",
        rank=0,
        world_size=1,
        node=0,
        nodes=1,
        least_nodes=1,
        most_nodes=1,
        host="127.0.0.1",
        port=1,
        agents_store=True,
        agent=1,
        log_dir=None,
    )
    command = sidecar._command(job, ipaddress.ip_address("127.0.0.1"), tmp_path / "address")
    assert command[command.index("--http") + 1] == "127.0.0.1:9000"
