"""Where a master may listen, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from edl_torch.core.changes import Changes
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.errors import MasterStartError
from edl_torch.master.addresses import checked_address
from edl_torch.master.durable import GroupCommit
from edl_torch.master.server import MasterServer, serve, write_address_file
from edl_torch.rpc.credentials import ServerCredentials
from edl_torch.system.address import HostPort


def start(address, **options):
    async def run():
        server = MasterServer(Dispatcher(ledger_id="l"), address, **options)
        try:
            return await server.start()
        finally:
            await server.stop()

    return asyncio.run(run())


def test_port_0_picks_one():
    assert start("127.0.0.1:0").port > 0


def test_port_in_use_is_said_plainly():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(MasterStartError, match=f"127.0.0.1:{port}.*another process has this port"):
            start(f"127.0.0.1:{port}")


def test_port_of_another_master_is_in_use(server):
    with pytest.raises(MasterStartError, match="another process has this port"):
        start(server.address)


@pytest.mark.parametrize("address", ["", "localhost", "127.0.0.1:x", "127.0.0.1:70000"])
def test_bad_address_is_refused(address):
    with pytest.raises(MasterStartError, match="cannot listen"):
        start(address)


def test_a_master_that_cannot_start_ends_the_thread_of_its_journal():
    changes, threads = Changes(), threading.active_count()

    async def run():
        await serve(
            Dispatcher(ledger_id="l", changes=changes),
            "127.0.0.1:x",
            on_ready=lambda address: None,
            make_commits=lambda: GroupCommit(changes, lambda keys: lambda: None),
        )

    with pytest.raises(MasterStartError, match="cannot listen"):
        asyncio.run(run())
    assert threading.active_count() == threads


def test_unknown_host_is_named():
    with pytest.raises(MasterStartError, match=r"'no-such-host.invalid' is unknown"):
        start("no-such-host.invalid:1")


def test_address_of_another_machine_is_refused():
    with pytest.raises(MasterStartError, match="no interface of this machine"):
        start("192.0.2.1:0", insecure=True)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"])
def test_open_address_needs_to_be_asked_for(address):
    with pytest.raises(MasterStartError, match="--insecure"):
        checked_address(address, insecure=False, credentials=ServerCredentials())
    assert checked_address(address, insecure=True, credentials=ServerCredentials()).port == 0


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0", "127.1.2.3:0"])
def test_loopback_needs_nothing(address):
    assert checked_address(address, insecure=False, credentials=ServerCredentials()).port == 0


def test_address_file_is_complete_or_absent(tmp_path):
    path = tmp_path / "address"
    write_address_file(path, HostPort("::1", 5))
    assert path.read_text() == "[::1]:5\n"
    assert [p.name for p in tmp_path.iterdir()] == ["address"]
    with pytest.raises(MasterStartError, match="cannot write the address file"):
        write_address_file(tmp_path / "none" / "address", HostPort("h", 5))
