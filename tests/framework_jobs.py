"""Jobs of ranks as processes, which are killed or told to end, and started again.

A job's program is a module with `run(folder, settings, environment)`, which is one rank. It notes the number
of each step in the file `steps-RANK`, and rank 0 of the last attempt what it found in `result.json`.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import quiet_port

from edl_torch.audit.chain import final_words
from edl_torch.audit.verdict import audit
from edl_torch.master.journal import view
from edl_torch.master.server import ThreadedMaster

JOB_S = 110.0  # on a machine that is busy with other things
TOLD = 128 + signal.SIGTERM  # the exit status of a program that was told to end, and has saved


@dataclass
class Death:
    """Kills its process when it comes to `place` for the `count`-th time; never without one.

    With `later_s` it is so much later, wherever that is. Of all ranks the last one dies, or `rank`.
    """

    place: str = ""
    count: int = -1
    later_s: float = 0.0
    rank: int = -1

    def of(self, rank: int, ranks: int) -> Death:
        """What this is for one of the ranks."""
        return self if rank == self.rank % ranks else Death()

    def at(self, place: str) -> None:
        """Say where the process is."""
        self.count -= place == self.place
        if place != self.place or self.count:
            return
        if not self.later_s:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # nothing of Python's runs when it comes
        signal.setitimer(signal.ITIMER_REAL, self.later_s)


class Job:
    """Ranks of one job under one master, and what they leave in `folder`."""

    def __init__(self, folder: Path, program: str, master: ThreadedMaster, settings: Any) -> None:
        self.folder = folder
        self._program = program
        self._master = master
        self._settings = settings
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([program])  # imports take seconds
        self.kills = 0

    def _start(self, ranks: int, settings: Any = None) -> list[Any]:
        port = quiet_port()
        processes = []
        for rank in range(ranks):
            environment = {
                "EDL_MASTER_ADDR": self._master.address,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            if ranks > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            arguments = (self._program, self.folder, settings or self._settings, environment)
            processes.append(self._context.Process(target=run_program, args=arguments))
            processes[-1].start()
        return processes

    def run(self, ranks: int) -> dict[str, Any]:
        """Run to the end. Returns what rank 0 found."""
        processes = self._start(ranks)
        _end(processes, lambda: not _alive(processes))
        assert [process.exitcode for process in processes] == [0] * ranks
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    def run_and_kill(self, ranks: int, chance: random.Random, most_steps: int) -> None:
        """Kill one rank somewhere in the steps to come, and the others soon after, as launchers do."""
        processes = self._start(ranks)
        first = self._steps() + chance.randrange(most_steps)
        _end(processes, lambda: self._steps() > first or len(_alive(processes)) < ranks)
        time.sleep(chance.random() * 0.05)
        alive = _alive(processes)
        if alive:
            self.kills += 1
            chance.choice(alive).kill()
            time.sleep(chance.random() * 0.1)
        _kill(processes)

    def run_to_death(self, ranks: int, settings: Any) -> None:
        """Run until a rank has killed itself, as `settings` say, and kill the others soon after.

        It may come to its end before.
        """
        processes = self._start(ranks, settings)
        _end(processes, lambda: any(process.exitcode for process in processes) or not _alive(processes))
        if any(process.exitcode for process in processes):
            dying = processes[settings.death.rank]
            dying.join(5)
            assert dying.exitcode < 0, "an attempt failed by itself"
            self.kills += 1
        _kill(processes)

    def run_and_tell(self, ranks: int, chance: random.Random, most_steps: int) -> bool:
        """Send SIGTERM to one rank, or to all, somewhere in the steps to come. All save, and end.

        Returns False where the job came to its end before.
        """
        processes = self._start(ranks)
        first = self._steps() + chance.randrange(most_steps)
        _end(processes, lambda: self._steps() > first or len(_alive(processes)) < ranks)
        for process in chance.sample(processes, chance.choice((1, ranks))):
            process.terminate()
        _end(processes, lambda: not _alive(processes))
        codes = {process.exitcode for process in processes}
        assert codes in ({0}, {TOLD}), codes
        assert len({self.steps(rank)[-1] for rank in range(ranks)}) == 1, "ranks ended after different steps"
        return codes == {TOLD}

    def steps(self, rank: int = 0) -> list[int]:
        """The numbers of the steps that a rank has taken, in all attempts."""
        file = self.folder / f"steps-{rank}"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def _steps(self) -> int:
        return len(self.steps())

    def acknowledged(self) -> int:
        """Records that have counted by now, of all epochs, as the master has it."""
        return acknowledged_by(self.folder / "state")

    def prove(self) -> int:
        """Prove from the trainers' logs that each record had one outcome. Returns their number."""
        verdict = audit_of(self.folder, words=final_words(view(self.folder / "state")))
        assert verdict.proven, verdict
        return verdict.acknowledged


def acknowledged_by(state: Path) -> int:
    """Records that have counted, of all epochs, by the journal of a job's master."""
    return sum(ledger.acknowledged for ledger in view(state).ledgers)


def audit_of(folder: Path, words: Any = None) -> Any:
    """The verdict on a job, from its trainers' logs, and from what the master's journal says of them."""
    (verdict,) = audit([folder / "audit"], words=words)
    return verdict


def note_step(folder: Path, step: int) -> None:
    """Note, in a program, that this rank has taken a step."""
    with (folder / f"steps-{os.environ.get('RANK', '0')}").open("a") as file:
        file.write(f"{step}\n")


def run_program(program: str, folder: Path, settings: Any, environment: dict[str, str]) -> None:
    """Be one rank; say where it stands before it is given up."""
    faulthandler.dump_traceback_later(JOB_S - 5.0)
    os.environ.update(environment)
    __import__(program).run(folder, settings)


@contextmanager
def jobs_of(program: str, folder: Path) -> Iterator[Callable[[Any], Job]]:
    """Make jobs of `program`, under masters with a journal in `folder / "state"`."""
    masters: list[ThreadedMaster] = []

    def start(settings: Any) -> Job:
        masters.append(ThreadedMaster("127.0.0.1:0", state=folder / "state", grace_s=0.2))
        return Job(folder, program, masters[-1], settings)

    yield start
    for master in masters:
        with suppress(RuntimeError):
            master.stop()


def _alive(processes: list[Any]) -> list[Any]:
    return [process for process in processes if process.is_alive()]


def _kill(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
        process.join()


def _end(processes: list[Any], reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + JOB_S
    while not reached():
        if time.monotonic() > deadline:
            _kill(processes)
            raise TimeoutError(f"the job was not there within {JOB_S:g} s")
        time.sleep(0.01)
