"""Whether a chaos run kept the promises: master, audit and the trainers' own notes must agree.

It knows how many faults there were, not when.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from chaos_plan import BATCH, EPOCHS, Kind, Plan
from chaos_processes import Life
from fences import Onlooker

from edl_torch import MasterClient
from edl_torch.audit.chain import FinalWord
from edl_torch.audit.verdict import Verdict, audit

RELEASED = re.compile(r"^(\S+ \S+) .* released .* worker=(\S+) .*why=expired", re.MULTILINE)


class ChaosError(AssertionError):
    """A promise did not hold; names the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run did, and what it cost.

    `doubled` records were trained twice; `charged` of them were not in the last batch of a dead trainer. All
    disruptions together excuse `allowed`. `tail_s` is the part of `took_s` after the last fault. `release_s`
    are the times from a trainer's kill until the master took its leases back, where its log has that;
    `stalled` is how often it took leases for want of progress.
    """

    plan: Plan
    killed: int
    doubled: int
    charged: int
    allowed: int
    verdict: Verdict
    took_s: float
    tail_s: float
    release_s: tuple[float, ...]
    stalled: int

    def __str__(self) -> str:
        return (
            f"{self.plan}; {self.verdict.acknowledged} acknowledged, {self.verdict.refused} refused, "
            f"{self.verdict.assumed} assumed, trained twice {self.doubled} ({self.charged} of them "
            f"without a death; at most {self.allowed}); "
            f"{self.took_s:.1f} s, {self.tail_s:.1f} s of them in peace"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Raises ChaosError where a promise was broken. `broken` counts connections that broke at random."""

    plan: Plan
    address: str
    audit_dir: Path
    lives: Sequence[Life]
    broken: int
    master_log: str

    def result(self, *, took_s: float, tail_s: float) -> Result:
        """Judge a job that has ended."""
        self._check_status()
        verdict = self._check_audit()
        doubled, charged = self._doubled()
        killed = sum(life.killed_at is not None for life in self.lives)
        disturbances = self._disturbances()
        self._expect(
            charged <= BATCH * disturbances,
            f"{charged} records were trained twice beyond the last batches of the dead; "
            f"{disturbances} stops and cuts excuse {BATCH} each",
        )
        return Result(
            plan=self.plan,
            killed=killed,
            doubled=doubled,
            charged=charged,
            allowed=BATCH * (killed + disturbances),
            verdict=verdict,
            took_s=took_s,
            tail_s=tail_s,
            release_s=tuple(self._release_times()),
            stalled=self.master_log.count("why=stalled"),
        )

    def _check_status(self) -> None:
        with MasterClient(self.address, "chaos", master_timeout_s=20.0) as client:
            status = client.dataset_status("training")
        self._expect(status.finished and status.acknowledged == self.plan.records, f"not all: {status}")
        left = (status.todo, status.leased, status.quarantined, status.dropped)
        self._expect(not any(left), f"something is left: {status}")

    def _check_audit(self) -> Verdict:
        """By the logs alone, and by the master's word as well."""
        with MasterClient(self.address, "chaos", master_timeout_s=20.0) as client:
            token = Onlooker(client, "training").snapshot()
        for words in ({}, {"training": FinalWord(token=token)}):
            (verdict,) = audit([self.audit_dir], words=words)
            counted = verdict.acknowledged == self.plan.records
            self._expect(verdict.delivered and counted, f"not proven: {verdict}")
        return verdict

    def _doubled(self) -> tuple[int, int]:
        """Records trained more than once, and those of them that no last batch of a dead trainer explains."""
        trained = {life.worker_id: life.batches for life in self.lives}
        times = Counter(record for batches in trained.values() for batch in batches for record in batch)
        wanted = {(epoch, record) for epoch in range(EPOCHS) for record in range(self.plan.size)}
        self._expect(set(times) == wanted, f"never trained on: {sorted(wanted - set(times))[:20]}")
        dead = [trained[life.worker_id] for life in self.lives if life.killed_at is not None]
        excused = Counter(record for batches in dead if batches for record in batches[-1])
        charged = {record: count - excused[record] - 1 for record, count in times.items()}
        return times.total() - len(times), sum(count for count in charged.values() if count > 0)

    def _disturbances(self) -> int:
        """Stops, hangs and cuts: each may cost a batch. The master's deaths cost none."""
        counts = self.plan.counts
        planned = sum(counts[kind] for kind in (Kind.STOP, Kind.HANG, Kind.CUT, Kind.HOLD, Kind.REFUSE))
        return planned + self.broken

    def _release_times(self) -> Iterator[float]:
        """From each kill to the moment when the master took the leases back, where it could be seen."""
        released = {worker: stamp for stamp, worker in RELEASED.findall(self.master_log)}
        for life in self.lives:
            if life.killed_at is not None and life.worker_id in released:
                stamp = datetime.strptime(released[life.worker_id], "%Y-%m-%d %H:%M:%S,%f")
                yield stamp.timestamp() - life.killed_at

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise ChaosError(f"{self.plan}\n{what}\nthe master said:\n{self.master_log[-4000:]}")
