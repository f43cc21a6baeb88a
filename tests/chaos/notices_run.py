"""Jobs whose processes get SIGTERM, and 30 s to save; each goes on until its data is finished.

    python tests/chaos/notices_run.py   # until 200 notices came
    python tests/chaos/notices_run.py --first 17 --notices 1 --keep runs/notices   # one job again

In the end the model must have learnt each record of each epoch once, and the audit prove it. Some signals
come before the program has looked at `preempted`, and end it as ever. A seed fixes what happens and when it
is due, not how the machine interleaves it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[1]))  # a script; pytest does so by itself

from chaos_processes import MasterProcess, living
from noticed_trainer import EPOCHS, RECORDS, Settings, start

from edl_torch.cli.main import main as edl_torch
from edl_torch.testing import wait_until

GRACE_S = 30.0
START_S = 90.0
LATEST = 2  # steps after the one under way, before all ranks know


class NoticeError(AssertionError):
    """A promise that does not hold."""


@dataclass
class Job:
    """One job through all its incarnations."""

    seed: int
    settings: Settings
    random: random.Random
    most: float  # notices; then it trains to its end
    took_s: list[float] = field(default_factory=list)  # from each notice to the end of its processes
    early: int = 0

    def __str__(self) -> str:
        s = self.settings
        workers = f"{s.num_workers} {s.method}{' persistent' * s.persistent}" if s.num_workers else "no"
        return (
            f"seed {self.seed}: {s.ranks} rank(s), {workers} workers; {len(self.took_s)} notices, at most "
            f"{max(self.took_s, default=0):.1f} s to the end; {self.early} signals before the first look"
        )

    def run(self) -> None:
        """Until it has finished, and the proof."""
        while not (self.settings.folder / "weights.json").exists():
            self._incarnation()
        self._judge()

    def _incarnation(self) -> None:
        before = set(self.settings.folder.glob("notes-*"))
        leader = start(self.settings if len(self.took_s) < self.most else replace(self.settings, step_s=0.0))
        try:
            self._signal(leader, before)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
        wait_until(lambda: not any(group == leader for _, group in living()), timeout_s=30)

    def _signal(self, leader: int, before: set[Path]) -> None:
        if len(self.took_s) >= self.most:
            wait_until(lambda: ended(leader) is not None, timeout_s=START_S)
            self._check(ended(leader) == 0, f"ended with {ended(leader)}, and nobody told it to")
            return
        early = self.random.random() < 0.1
        if early:
            time.sleep(self.random.random())
        else:
            wait_until(lambda: self._all_looked(before) or ended(leader) is not None, timeout_s=START_S)
            time.sleep(self.random.random() * 1.5)
        told = time.time()
        status = ended(leader)
        if status is None:
            with contextlib.suppress(ProcessLookupError):  # it may end by itself just now
                self._send(leader, before, to_all=early or self.random.random() < 0.7)
            wait_until(lambda: ended(leader) is not None, timeout_s=GRACE_S + 5)
            status = ended(leader)
        self._hold_against(status, told, self._notes(before))

    def _send(self, leader: int, before: set[Path], *, to_all: bool) -> None:
        if to_all:
            os.killpg(leader, signal.SIGTERM)
        else:
            pids = sorted({note["pid"] for note in self._notes(before)})
            os.kill(self.random.choice(pids), signal.SIGTERM)

    def _hold_against(self, status: int | None, told: float, notes: list[dict[str, Any]]) -> None:
        events = {
            event: [n for n in notes if n["event"] == event] for event in ("stepped", "saved", "finished")
        }
        if events["finished"]:
            self._check(status in (0, signal.SIGTERM, -signal.SIGTERM), f"finished, and ended with {status}")
            return
        if not events["saved"]:
            looked = {n["rank"] for n in events["stepped"] if n["at"] < told}
            self._check(len(looked) < self.settings.ranks, f"nothing was saved, status {status}")
            self.early += 1
            return
        self._check(status == self.settings.status, f"ended with {status} after it had saved")
        self._check(len(events["saved"]) == self.settings.ranks, "not all ranks have saved")
        self._check(len({n["step"] for n in events["saved"]}) == 1, "ranks have saved at different steps")
        after = max(sum(n["at"] > told for n in events["stepped"] if n["rank"] == r) for r in self._ranks)
        most = 2 if self.settings.ranks == 1 else LATEST + 2  # one more: its line may be late
        self._check(after <= most, f"{after} steps after the notice")
        self.took_s.append(time.time() - told)
        self._check(self.took_s[-1] < GRACE_S, f"it took {self.took_s[-1]:.1f} s")

    @property
    def _ranks(self) -> range:
        return range(self.settings.ranks)

    def _all_looked(self, before: set[Path]) -> bool:
        """Whether each rank has been through the body of its loop."""
        stepped = [note for note in self._notes(before) if note["event"] == "stepped"]
        return all(sum(note["rank"] == rank for note in stepped) > 1 for rank in self._ranks)

    def _notes(self, before: set[Path]) -> list[dict[str, Any]]:
        return [
            json.loads(line)
            for path in set(self.settings.folder.glob("notes-*")) - before
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")
        ]

    def _judge(self) -> None:
        weights = json.loads((self.settings.folder / "weights.json").read_text())
        learnt = [[-round(weight) for weight in epoch] for epoch in weights]
        self._check(learnt == [[1] * RECORDS] * EPOCHS, "the model has not learnt each record once")
        self._check(
            edl_torch(["audit", str(self.settings.folder / "audit")]) == 0, "the audit proves nothing"
        )

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise NoticeError(f"{self}: {what}")


_statuses: dict[int, int] = {}


def ended(pid: int) -> int | None:
    """The exit status of a child; None while it runs."""
    if pid not in _statuses:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            _statuses[pid] = os.waitstatus_to_exitcode(status)
    return _statuses.get(pid)


@contextlib.contextmanager
def job_of(seed: int, folder: Path, spawn: float, most: float = math.inf) -> Iterator[Job]:
    """The job of a seed; `spawn` is how many of those with workers spawn them."""
    chance = random.Random(seed)
    ranks = chance.choice((1, 1, 2, 2, 4))
    master = MasterProcess(folder) if ranks > 1 or chance.random() < 0.3 else None
    settings = Settings(
        folder=folder,
        ranks=ranks,
        num_workers=chance.choice((0, 2)) if ranks < 4 else 0,
        method="spawn" if chance.random() < spawn else "fork",
        persistent=chance.random() < 0.5,
        master="" if master is None else master.address,
        step_s=0.01 * ranks,
    )
    if master is not None:
        master.start()
    try:
        yield Job(seed, settings, chance, most)
    finally:
        if master is not None:
            master.kill()


def main() -> int:
    """The exit status is 0 when every promise held."""
    parser = argparse.ArgumentParser(description="jobs that are told to end")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--notices", type=int, default=200)
    parser.add_argument("--each", type=int, default=math.inf, help="notices of a job, at most")
    parser.add_argument("--spawn", type=float, default=0.3, help="of the jobs with loader workers")
    parser.add_argument("--keep", type=Path, help="keep every job's files there")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    took: list[float] = []
    failed, jobs, early = 0, 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        while len(took) < options.notices:
            seed, jobs = options.first + jobs, jobs + 1
            folder = (options.keep or Path(temporary)) / f"seed-{seed}"
            folder.mkdir(parents=True)
            with job_of(seed, folder, options.spawn, options.each) as job:
                try:
                    job.run()
                    print(job, flush=True)
                except (NoticeError, TimeoutError) as error:
                    failed += 1
                    print(f"FAILED: seed {seed}: {error}", flush=True)
            took += job.took_s
            early += job.early
    print(f"{jobs} jobs, {failed} failed; {len(took)} notices, {early} signals before the first look")
    print(f"from a notice to the end: median {statistics.median(took):.2f} s, worst {max(took):.2f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
