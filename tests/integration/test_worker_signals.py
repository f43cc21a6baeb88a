"""SIGTERM to all processes of a trainer: its loader workers leave it to the trainer, and go with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import preloaded
import pytest
from processes import alive

from edl_torch.testing import wait_until

TRAINER = Path(__file__).with_name("signalled_trainer.py")

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="signals, /proc"), pytest.mark.slow]


def run(method: str, persistent: str, ending: str, signals: int = 1) -> tuple[int, str, str, list[int]]:
    """Exit status, output, errors, and the workers."""
    trainer = preloaded.Popen(
        [sys.executable, str(TRAINER), method, persistent, ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    try:
        workers = [int(word) for word in trainer.stdout.readline().split()[1:]]
        for _ in range(signals):
            os.killpg(trainer.pid, signal.SIGTERM)
        out, err = trainer.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
    return trainer.returncode, out, err, workers


@pytest.mark.parametrize(
    ("method", "persistent"),
    [
        ("fork", "once"),
        ("fork", "persistent"),
        ("spawn", "once"),
        pytest.param("spawn", "persistent", marks=pytest.mark.long),
        pytest.param("forkserver", "once", marks=pytest.mark.long),
        pytest.param("forkserver", "persistent", marks=pytest.mark.long),
    ],
)
def test_the_trainer_goes_on_with_its_workers(method: str, persistent: str) -> None:
    status, out, err, workers = run(method, persistent, "closed", signals=3)
    assert (status, out) == (0, "trained\n"), err
    assert "Error" not in err
    assert not any(alive(pid) for pid in workers)


@pytest.mark.parametrize("persistent", ["persistent", "once"])
def test_a_program_that_ends_in_the_middle_of_a_pass_ends_its_workers(persistent: str) -> None:
    status, out, err, workers = run("fork", persistent, "open")
    assert (status, out) == (0, "trained\n"), err
    assert "Error" not in err
    assert not any(alive(pid) for pid in workers)


def test_a_worker_that_is_stuck_is_ended() -> None:
    status, out, err, workers = run("fork", "once", "stuck")
    assert (status, out) == (0, "trained\n"), err
    assert not any(alive(pid) for pid in workers)


def test_workers_go_with_a_trainer_that_is_killed() -> None:
    status, out, err, workers = run("fork", "once", "killed")
    assert (status, out) == (-signal.SIGKILL, "trained\n"), err
    wait_until(lambda: not any(alive(pid) for pid in workers), timeout_s=30)


def test_what_a_worker_itself_does_with_the_signal_holds() -> None:
    status, out, err, _ = run("fork", "once", "own")
    assert (status, out) == (1, "")
    assert "LoaderWorkerDied" in err or "killed by signal" in err
