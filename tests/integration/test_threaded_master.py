"""A master on a thread: it goes on from its journal, and says in its constructor why it cannot start."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from edl_torch import DataShardService, MasterClient
from edl_torch.client.grpc.channel import FollowingChannel
from edl_torch.core.calls import RegisterCall, Registration
from edl_torch.errors import AccessDenied, MasterStartError
from edl_torch.master import server
from edl_torch.master.durable import DurableState
from edl_torch.master.server import ThreadedMaster
from edl_torch.rpc.credentials import Credentials, ServerCredentials
from edl_torch.shard import Source
from edl_torch.testing import wait_until

LOOPBACK = "127.0.0.1:0"


def register(address: str) -> int:
    """How many records the dataset has, which the first call makes."""
    registration = Registration(
        name="training", sources=(Source(name="", count=7),), records_per_shard=2, shuffle=True
    )
    call = RegisterCall(session="s", worker_id="w", batch_size=2, registration=registration)
    with MasterClient(address, "w", master_timeout_s=5.0) as client:
        return sum(source.count for source in client.call(call).spec.sources)


def test_it_goes_on_where_its_journal_ends(tmp_path: Path) -> None:
    first = ThreadedMaster(LOOPBACK, state=tmp_path)
    assert register(first.address) == 7
    first.stop()
    second = ThreadedMaster(LOOPBACK, state=tmp_path)
    with MasterClient(second.address, "w", master_timeout_s=5.0) as client:
        assert client.dataset_status("training").size == 7
        assert client.status().durable
    second.stop()


def test_why_it_cannot_start_is_raised_where_it_is_made(tmp_path: Path) -> None:
    master = ThreadedMaster(LOOPBACK, state=tmp_path / "one")
    with pytest.raises(MasterStartError, match=r"another master .* uses the journal"):
        ThreadedMaster(LOOPBACK, state=tmp_path / "one")  # its journal has a master
    with pytest.raises(MasterStartError, match="another process has this port"):
        ThreadedMaster(master.address, state=tmp_path / "two")
    with pytest.raises(MasterStartError, match="can be reached from other machines"):
        ThreadedMaster("0.0.0.0:0", state=tmp_path / "three")
    master.stop()


def test_one_that_takes_too_long_to_start_is_an_error_and_never_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, left = threading.Event(), threading.active_count()

    def slowly(*arguments: Any, **options: Any) -> DurableState:
        assert disk.wait(30)
        return DurableState(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(server, "START_S", 0.01)
        patch.setattr(server, "DurableState", slowly)
        with pytest.raises(MasterStartError, match=r"did not start within 0\.01 s"):
            ThreadedMaster(LOOPBACK, state=tmp_path)
        disk.set()
        wait_until(lambda: threading.active_count() == left)
    ThreadedMaster(LOOPBACK, state=tmp_path).stop()  # nobody holds the journal


def test_a_channel_that_follows_it_carries_the_token_for_its_door(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-this-test-alone")
    token.chmod(0o600)
    master = ThreadedMaster(
        LOOPBACK, state=tmp_path / "state", credentials=ServerCredentials.read(token_file=token)
    )
    channel = FollowingChannel(lambda: master.address, Credentials.read(token_file=token))
    with MasterClient(channel, "w", master_timeout_s=5.0) as client:
        assert client.status().durable
    stranger = FollowingChannel(lambda: master.address, Credentials())
    with MasterClient(stranger, "w", master_timeout_s=5.0) as client, pytest.raises(AccessDenied):
        client.status()
    master.stop()


def test_after_stop_its_journal_and_its_port_are_free(tmp_path: Path) -> None:
    first = ThreadedMaster(LOOPBACK, state=tmp_path)
    first.stop()
    ThreadedMaster(first.address, state=tmp_path).stop()


def test_a_service_closes_after_its_client(tmp_path: Path) -> None:
    """As at the end of a program that closes neither: what was lent is taken back, and nothing is raised."""
    master = ThreadedMaster(LOOPBACK, state=tmp_path)
    try:
        client = MasterClient(master.address)
        service = DataShardService(batch_size=2, dataset_size=8, master_client=client)
        assert service.fetch_shard() is not None
        client.close()
        service.close()
        with closing(MasterClient(master.address)) as watcher:
            wait_until(lambda: watcher.status().datasets[0].leases == 0)
    finally:
        master.stop()
