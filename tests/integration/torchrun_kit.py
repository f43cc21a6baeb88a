"""torchrun agents as processes of one machine, each as if it were a node, and what their workers wrote down.

It does not know what is tested.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import preloaded
from processes import alive, quiet_port

from edl_torch.testing import wait_until

TORCHRUN = Path(__file__).parents[1] / "preloaded_torchrun.py"
WORKER = Path(__file__).with_name("torchrun_worker.py")
ASYNCHRONOUS = Path(__file__).with_name("torchrun_trainer.py")
QUICK = "join_timeout=120,keep_alive_interval=1,keep_alive_max_attempt=5,read_timeout=60,last_call_timeout="


class Agent:
    """One `torchrun`. Its worker's output and logs are in `logs/NAME`."""

    def __init__(
        self, name: str, folder: Path, command: list[str], *, prefix: Sequence[str] = (), **environment: str
    ) -> None:
        self.name = name
        self.logs = folder / "logs" / name
        self.logs.mkdir(parents=True)
        foreign = ("EDL_MASTER", "TORCH")
        kept = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        with open(self.logs / "agent.log", "wb") as log:
            start = subprocess.Popen if prefix else preloaded.Popen
            self.process = start(
                [*prefix, sys.executable, str(TORCHRUN), f"--log-dir={self.logs}", *command],
                stdout=log,
                stderr=log,
                env=kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment,
                start_new_session=True,
            )

    @property
    def master_log(self) -> str:
        """What the master beside it has said."""
        (log,) = self.logs.glob("*/edl_torch_master.log")
        return log.read_text()

    def kill(self) -> None:
        """As the kernel or a cloud does it: the agent alone, without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    @property
    def log(self) -> str:
        """What the agent and its workers have printed."""
        return (self.logs / "agent.log").read_text(errors="replace")

    @property
    def has_master(self) -> bool:
        """Whether a master was started beside it."""
        return any(self.logs.glob("*/edl_torch_master.address"))


class Host(Protocol):
    """Where an agent runs: `prefix` before a command lets it run there."""

    address: str
    prefix: list[str]


class Cluster:
    """The agents of one elastic job over `folder`, `least` to 3 of them; they meet at `meeting`.

    Those who could begin wait so long for others.
    """

    def __init__(
        self, folder: Path, least: int = 1, meeting: str = "localhost", last_call_s: int = 3
    ) -> None:
        self.folder = folder
        self._least = least
        self._meeting = meeting
        self._settings = f"{QUICK}{last_call_s}"
        self.agents: list[Agent] = []
        self._port = quiet_port()
        (folder / "steps").mkdir()

    def start(self, name: str, host: Host | None = None, **environment: str) -> Agent:
        """Another node; `host` gives it a machine of its own."""
        command = [f"--nnodes={self._least}:3", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=job"]
        command += [
            f"--rdzv-endpoint={self._meeting}:{self._port}",
            f"--rdzv-conf={self._settings}",
            "--max-restarts=20",
        ]
        command += ["--monitor-interval=0.1"]
        if host is not None:  # all hosts of a test have this machine's name: who is who must be said
            is_host = int(host.address == self._meeting)
            command += [f"--local-addr={host.address}", f"--rdzv-conf={self._settings},is_host={is_host}"]
        command += [str(WORKER), str(self.folder)]
        settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        prefix = [] if host is None else host.prefix
        self.agents.append(Agent(name, self.folder, command, prefix=prefix, **settings | environment))
        return self.agents[-1]

    def await_rendezvous(self) -> None:
        """Wait until the first agent serves as the place where the others meet."""
        wait_until(lambda: _listens(self._port), timeout_s=60)

    def diary(self) -> list[dict[str, Any]]:
        """What all workers wrote down, each in its order."""
        return [
            json.loads(line)
            for file in sorted((self.folder / "steps").iterdir())
            for line in file.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def most_steps(self, world: int, *, not_by: frozenset[int] = frozenset()) -> int:
        """The most steps that a worker took in an incarnation of `world` workers."""
        steps: dict[int, int] = {}
        for note in self.diary():
            if "step" in note and note["world_size"] == world and note["pid"] not in not_by:
                steps[note["pid"]] = steps.get(note["pid"], 0) + 1
        return max(steps.values(), default=0)

    def pids(self) -> frozenset[int]:
        """All workers so far."""
        return frozenset(note["pid"] for note in self.diary())

    def close(self) -> None:
        """End what is left, agents first so that they start nothing more."""
        for agent in self.agents:
            if agent.process.poll() is None:
                agent.kill()
        for pid in self.pids():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
