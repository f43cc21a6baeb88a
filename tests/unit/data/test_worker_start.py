"""What SIGTERM does to a loader worker that has read all it had, and ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

ENDING = """
import os, signal, sys
from edl_torch.data.worker_start import WorkerStart

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

WorkerStart({init})(0)
last = Last()  # goes with the interpreter, when handlers in Python are gone
"""


def status(init: str) -> int:
    program = [sys.executable, "-c", ENDING.format(init=init)]
    return subprocess.run(program, timeout=60, check=False).returncode


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_a_worker_whose_interpreter_ends_is_deaf_to_the_last() -> None:
    assert status("None") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="signals")
def test_what_a_worker_itself_does_with_the_signal_holds_to_the_end() -> None:
    own = "lambda worker: signal.signal(signal.SIGTERM, lambda *_: None)"
    assert status(own) == -signal.SIGTERM
