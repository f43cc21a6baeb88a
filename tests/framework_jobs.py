"""Jobs of ranks as processes, which are killed and started again."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edl_torch.master.threaded import ThreadedMaster

JOB_S = 110.0  # on a machine that is busy with other things


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

    def _start(self, ranks: int) -> list[Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = []
        for rank in range(ranks):
            environment = {
                "EDL_MASTER_ADDR": self._master.address,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            if ranks > 1:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            arguments = (self._program, self.folder, self._settings, environment)
            processes.append(self._context.Process(target=run_program, args=arguments))
            processes[-1].start()
        return processes

    def run(self, ranks: int) -> dict[str, Any]:
        """Run to the end. Returns what rank 0 found."""
        processes = self._start(ranks)
        _end(processes, lambda: not any(process.is_alive() for process in processes))
        assert [process.exitcode for process in processes] == [0] * ranks
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    def run_and_kill(self, ranks: int, chance: random.Random, most_steps: int) -> None:
        """Kill one rank somewhere in the steps to come, and the others soon after, as launchers do."""
        processes = self._start(ranks)
        first = self._steps() + chance.randrange(most_steps)
        _end(processes, lambda: self._steps() > first or not all(process.is_alive() for process in processes))
        time.sleep(chance.random() * 0.05)
        alive = [process for process in processes if process.is_alive()]
        if alive:
            self.kills += 1
            chance.choice(alive).kill()
            time.sleep(chance.random() * 0.1)
        for process in processes:
            process.kill()
            process.join()

    def _steps(self) -> int:
        file = self.folder / "steps-0"
        return len(file.read_text().splitlines()) if file.exists() else 0


def run_program(program: str, folder: Path, settings: Any, environment: dict[str, str]) -> None:
    """Be one rank; say where it stands before it is given up."""
    faulthandler.dump_traceback_later(JOB_S - 5.0)
    __import__(program).run(folder, settings, environment)


def _end(processes: list[Any], reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + JOB_S
    while not reached():
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
            raise TimeoutError(f"the job was not there within {JOB_S:g} s")
        time.sleep(0.01)
