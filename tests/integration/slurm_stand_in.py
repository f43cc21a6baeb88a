"""A stand-in for Slurm on this machine: it reads `#SBATCH` lines, starts scripts, signals and requeues them.

The commands `srun` and `scontrol` that scripts find are this file, too. It knows one node, 127.0.0.1, and of
Slurm's options those that the recipes have.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

NODE = "127.0.0.1"


class BatchJob:
    """A script in the queue, through all its starts. `options` are those of sbatch's command line."""

    def __init__(self, number: int, folder: Path, script: Path, *arguments: str, **options: str) -> None:
        self._folder = folder / f"job-{number}"
        self._folder.mkdir()
        self._command = ["bash", str(script), *arguments]
        self.options = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script.read_text(), re.M))
        self.options |= options
        commands = self._folder / "bin"
        commands.mkdir()
        for name in ("srun", "scontrol"):
            path = commands / name
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" {name} "$@"\n')
            path.chmod(0o755)
        self._environment = {
            "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_NODELIST": NODE,
            "SLURM_NTASKS": self.options["ntasks"],
            "SLURMD_NODENAME": NODE,
            "STAND_IN": str(self._folder),
        }
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was never started"
        return self._process

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def start(self) -> None:
        """Start the script, as Slurm does when there is room."""
        for name in ("steps", "requeued"):
            (self._folder / name).unlink(missing_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, **self._environment, "SLURM_RESTART_COUNT": str(self.starts)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.starts += 1

    def reach_limit(self) -> None:
        """Send the notice of `--signal` before the limit of time: to the steps, with `B:` to the script."""
        whom, _, name = self.options["signal"].partition("@")[0].rpartition(":")
        number = signal.Signals[f"SIG{name}"]
        for pid in [self.process.pid] if whom == "B" else self._steps():
            os.kill(pid, number)

    def preempt(self) -> None:
        """Take the nodes away: SIGTERM to all of the job, and it is requeued where it may be."""
        assert "requeue" in self.options
        (self._folder / "requeued").touch()
        os.killpg(self.process.pid, signal.SIGTERM)

    def wait(self) -> int:
        """Wait for the end of this start; SIGKILL comes when the grace is over. Returns the exit status."""
        try:
            return self.process.wait(30)
        finally:
            self.kill()

    @property
    def requeued(self) -> bool:
        """Whether it is in the queue again."""
        return (self._folder / "requeued").exists()

    def kill(self) -> None:
        """End what is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _steps(self) -> list[int]:
        from edl_torch.testing import wait_until  # not in each `srun` and `scontrol`

        path = self._folder / "steps"
        wait_until(path.exists, timeout_s=30)
        return [int(line) for line in path.read_text().split()]


def srun(*command: str) -> int:
    """Start a task for each of `SLURM_NTASKS`; returns the highest status."""
    tasks = [
        subprocess.Popen(command, env={**os.environ, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
        for task in range(int(os.environ["SLURM_NTASKS"]))
    ]
    signal.signal(signal.SIGTERM, lambda *_: None)  # the real one passes it on: they have it already
    pids = Path(os.environ["STAND_IN"], "steps")
    pids.with_suffix(".new").write_text("\n".join(str(task.pid) for task in tasks))
    pids.with_suffix(".new").rename(pids)
    statuses = [task.wait() for task in tasks]
    return max(128 - status if status < 0 else status for status in statuses)


def scontrol(*arguments: str) -> int:
    """`show hostnames` and `requeue`, which Slurm refuses for a job that it has put into the queue itself."""
    if arguments[0] == "show":
        print(arguments[-1])
        return 0
    requeued = Path(os.environ["STAND_IN"], "requeued")
    if requeued.exists():
        print("scontrol: error: Job is pending execution", file=sys.stderr)
        return 1
    requeued.touch()
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scontrol": scontrol}[sys.argv[1]](*sys.argv[2:]))
