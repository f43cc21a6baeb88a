"""Silent connections take no more of a master's files than they may: it goes on, and its log stays short."""

from __future__ import annotations

import resource
import socket
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import quiet_port

FEW = 256
STRANGERS = 488

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at /proc"),
]


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))


@pytest.mark.parametrize("port", ["calls", "page", "health"])
def test_silent_connections_keep_nobody_out(make_master, port, tmp_path) -> None:
    if port == "page":
        pytest.importorskip("aiohttp")
    master = make_master(durable=True)
    ports = {"page": quiet_port(), "health": quiet_port()}
    master.arguments = (*master.arguments, "--http", f"127.0.0.1:{ports['page']}")
    master.arguments += ("--health-addr", f"127.0.0.1:{ports['health']}")
    master.start(preexec_fn=few_files)
    ports["calls"] = int(master.address.rpartition(":")[2])
    known = master.client(master_timeout_s=30)
    known.status()
    with ExitStack() as strangers:
        for _ in range(STRANGERS):
            strangers.enter_context(socket.create_connection(("127.0.0.1", ports[port]), 10))
        assert known.status().trainers == ()
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['page']}/healthz", timeout=60) as answer:
            assert answer.status == 200
        # A silent one is thrown out after some seconds, and who comes then finds a place.
        assert master.client(master_timeout_s=60).status().trainers == ()
        assert len(list(Path(f"/proc/{master.process.pid}/fd").iterdir())) < FEW - 16
    log = master.log
    assert len(log.splitlines()) < 20, log[:2000]
    assert "Too many open files" not in log
