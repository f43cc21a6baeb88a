"""A worker ends when its torchrun agent is gone, as the agent would have ended it. Processes, no torchrun."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

WORKER = """
import os, signal, sys, time
from edl_torch.client.torchrun import job as worker
worker.KILL_S = float(sys.argv[1])
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker._end_with(os.getppid())
print("there", flush=True)
time.sleep(120)
"""
AGENT = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]).wait()"


@pytest.mark.parametrize(("kill_s", "worker"), [("120", "hears"), ("0.1", "deaf")])
def test_a_worker_ends_with_its_agent_though_it_is_deaf(kill_s: str, worker: str) -> None:
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, WORKER, kill_s, worker], stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    assert agent.stdout.readline() == "there\n"
    agent.kill()
    assert agent.communicate(timeout=30) == ("", None)  # the worker had the other end of the pipe
