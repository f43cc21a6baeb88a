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
STRANGERS = 170  # at each port: all of the files would not do

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks at /proc"),
]


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))


def test_silent_connections_keep_nobody_out(make_master) -> None:
    """Neither at the port for calls, nor at that of the page, nor at that for health."""
    pytest.importorskip("aiohttp")
    page, health = quiet_port(), quiet_port()
    master = make_master("--http", f"127.0.0.1:{page}", "--health-addr", f"127.0.0.1:{health}", durable=True)
    master.start(preexec_fn=few_files)
    known = master.client(master_timeout_s=30)
    known.status()
    with ExitStack() as strangers:
        for port in (page, health, int(master.address.rpartition(":")[2])):
            for _ in range(STRANGERS):
                strangers.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        assert known.status().trainers == ()
        with urllib.request.urlopen(f"http://127.0.0.1:{page}/healthz", timeout=60) as answer:
            assert answer.status == 200
        # A silent one is thrown out after some seconds, and who comes then finds a place.
        assert master.client(master_timeout_s=60).status().trainers == ()
        assert len(list(Path(f"/proc/{master.process.pid}/fd").iterdir())) < FEW - 16
    log = master.log
    assert len(log.splitlines()) < 30, log[:2000]
    assert "Too many open files" not in log
