"""A child of a process that has served: its garbage collector comes upon what grpc.aio left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE = """
import asyncio, gc, os, signal
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.master.server import MasterServer

async def serve():
    server = MasterServer(Dispatcher(ledger_id="l"), "127.0.0.1:0")
    await server.start()
    await server.stop()
    return server

gc.disable()
ring = [asyncio.run(serve())]
ring.append(ring)
del ring
child = os.fork()
if child == 0:
    signal.alarm(20)
    gc.collect()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == "0", done.stderr  # -14: the alarm
