"""Trainers that are killed, told to end, or stopped for a while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import preloaded
import pytest
from chaos_job import Run
from chaos_plan import LONG, SHORT, Kind, make_plan
from chaos_processes import Launcher
from ride_kit import BATCH, Gate, Master, Trainer, check

from edl_torch.testing import wait_until

GIVEN = [int(word) for word in os.environ.get("EDL_CHAOS_SEEDS", "").split()]
SEEDS = GIVEN or [14, pytest.param(27, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(errors=tmp_path_factory.mktemp("launcher") / "log") as launcher:
        yield launcher


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_dies_each_record_has_one_outcome(tmp_path: Path, launcher: Launcher, seed: int) -> None:
    """How many hanging loops were seen depends on the machine: `test_master_restart` shows that they are."""
    plan = make_plan(seed, SHORT)
    print(f"EDL_CHAOS_SEEDS={seed}; {plan}")
    result = Run(plan, tmp_path, launcher).result()
    print(result)
    assert result.killed >= plan.counts[Kind.KILL]


def test_a_seed_fixes_the_schedule() -> None:
    assert make_plan(5, LONG) == make_plan(5, LONG)
    assert make_plan(5, LONG) != make_plan(6, LONG)


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_leaves_a_trainer_in_one_trouble_at_a_time(seed: int) -> None:
    plan = make_plan(seed, LONG)
    assert plan.counts[Kind.KILL] == LONG.trainer_kills
    assert plan.counts[Kind.MASTER] == LONG.master_kills
    until: dict[int, float] = {}
    for fault in sorted(plan.faults, key=lambda fault: fault.at_s):
        assert fault.at_s >= until.get(fault.slot, 0.0)
        until[fault.slot] = fault.at_s + fault.for_s


# Jobs that get SIGTERM at random moments, save and go on; `make chaos` has the long version -----------------


RUN = Path(__file__).with_name("notices_run.py")


@pytest.mark.timeout(660)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("seed", "spawn"),
    [
        pytest.param(4, 0.0, id="forked workers", marks=pytest.mark.long),
        pytest.param(21, 1.0, id="spawned workers", marks=pytest.mark.long),
        pytest.param(9, 0.0, id="two ranks, forked workers", marks=pytest.mark.long),
        pytest.param(6, 0.0, id="four ranks", marks=pytest.mark.long),
    ],
)
def test_a_job_that_is_told_to_end_goes_on_where_it_was(seed: int, spawn: float, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(RUN), "--first", str(seed), "--spawn", str(spawn)]
    limits = ["--notices", "2", "--each", "2", "--keep", str(tmp_path / "jobs")]
    run = preloaded.Popen([*command, *limits], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = run.communicate(timeout=600)
    finally:
        run.terminate()
        run.wait(30)
    print(out)
    assert run.returncode == 0, err
    assert "1 jobs, 0 failed; 2 notices" in out


# A trainer process that is stopped for longer than its timeout, and continued -------------------------------


HERE = Path(__file__).parent
SIZE = 600


class Process:
    """A trainer process, and the batches that it was done with."""

    def __init__(self, address: str, out: Path) -> None:
        self._out = out
        self._process = preloaded.Popen(
            [sys.executable, "-W", "ignore", HERE / "stoppable_trainer.py", address, out, str(SIZE)],
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        )

    def batches(self) -> list[list[int]]:
        if not self._out.exists():
            return []
        lines = self._out.read_text().split("\n")[:-1]
        return [[int(number) for number in line.split()] for line in lines]

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def done(self) -> list[int]:
        errors = self._process.communicate(timeout=60)[1].decode()
        assert self._process.returncode == 0, errors
        return [record for batch in self.batches() for record in batch]

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    processes: list[Process] = []

    def start(address: str) -> Process:
        processes.append(Process(address, tmp_path / f"trained-{len(processes)}"))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def test_a_stopped_and_continued_trainer_doubles_one_batch_at_most(
    start_master: Callable[..., Master], start_process: Callable[[str], Process]
) -> None:
    master = start_master(lease_timeout_s=1.5)
    stopped = start_process(master.address)
    wait_until(lambda: len(stopped.batches()) >= 5, timeout_s=40)
    stopped.signal(signal.SIGSTOP)
    wait_until(lambda: master.dispatcher.expired >= 1)
    before = len(stopped.batches())
    gate = Gate(20)  # what the stopped one held is served first
    living = Trainer(master.address, gate, size=SIZE)
    gate.wait_reached()
    stopped.signal(signal.SIGCONT)
    wait_until(lambda: len(stopped.batches()) > before + 5)  # it goes on, with new leases
    gate.open()
    check(master, stopped.done(), living.done().trained, size=SIZE, doubled=BATCH)
