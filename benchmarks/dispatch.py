"""The master alone: registering a huge dataset, and leases and acknowledgements a second.

`python benchmarks/dispatch.py --json runs/dispatch.json`. One lease and one acknowledgement count as two.
"""

from __future__ import annotations

import resource
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from contenders import loopback_master
from harness import parser, write_json

from edl_torch.client.port import MasterPort
from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    LeaseCall,
    RegisterCall,
    Registration,
    ReportCall,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.master.embedded import LocalMaster
from edl_torch.shard import Source

HUGE = 10**12
A_CALL = 100
SHARD = 256
TRAINERS = 4  # threads of this process, each with a session of its own

GOAL_MS, GOAL_MB = 50.0, 100.0
GOAL_OVER_GRPC = 50_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A number, its unit, and what it should be: at least `least`, or at most `most`."""

    what: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.least is not None:
            return self.value >= self.least
        return None if self.most is None else self.value <= self.most


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = parser("What the master alone can do.").parse_args(arguments)
    rounds, calls = (2, 4) if options.quick else (9, 60)
    findings = [*huge_dataset(rounds), *rates(rounds, calls)]
    for finding in findings:
        print(describe(finding))
    if options.json is not None:
        rows = [
            {"what": f.what, "value": f.value, "unit": f.unit, "least": f.least, "most": f.most, "met": f.met}
            for f in findings
        ]
        write_json(options.json, {"quick": options.quick, "findings": rows})


def describe(finding: Finding) -> str:
    """One line of the table."""
    line = f"{finding.what:<58}{finding.value:>14,.2f} {finding.unit}"
    goal = finding.least if finding.least is not None else finding.most
    if goal is None:
        return line
    sign = "≥" if finding.least is not None else "≤"
    return f"{line}  target {sign} {goal:,.0f}  {'met' if finding.met else 'MISSED'}"


def huge_dataset(rounds: int) -> list[Finding]:
    """Register 10¹² records with every shuffle and lend the first: time, and the memory that it took."""
    times = [_timed(_register_and_lease) * 1e3 for _ in range(rounds)]
    tracemalloc.start()
    _register_and_lease()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return [
        Finding(
            what="register 10¹² records, shuffled", value=statistics.median(times), unit="ms", most=GOAL_MS
        ),
        Finding(what="  memory for it (tracemalloc)", value=peak / 2**20, unit="MB", most=GOAL_MB),
        Finding(what="  resident at most, this whole benchmark with torch", value=resident, unit="MB"),
    ]


def _register_and_lease() -> None:
    master = LocalMaster(dispatcher=Dispatcher(ledger_id="benchmark"))
    trainer = Trainer(master, "huge", 0)
    trainer.exchange()


def rates(rounds: int, calls: int) -> list[Finding]:
    """Leases and acknowledgements a second, by call and over grpc."""
    with ExitStack() as stack:
        local = _trainers(LocalMaster(dispatcher=Dispatcher(ledger_id="benchmark")), 1)
        remote = _trainers(stack.enter_context(loopback_master()), TRAINERS)
        _together(local, calls)
        _together(remote, calls)
        pairs = [(_rate(local, calls), _rate(remote, calls)) for _ in range(rounds)]
    here, there = (statistics.median(values) for values in zip(*pairs, strict=True))
    each = f"{A_CALL} a call"
    return [
        Finding(what=f"leases and acknowledgements in process, {each}", value=here, unit="/s"),
        Finding(
            what=f"the same over grpc on loopback, {TRAINERS} trainers",
            value=there,
            unit="/s",
            least=GOAL_OVER_GRPC,
        ),
    ]


def _trainers(master: MasterPort, count: int) -> list[Trainer]:
    return [Trainer(master, "rates", number) for number in range(count)]


def _rate(trainers: list[Trainer], calls: int) -> float:
    return 2 * A_CALL * calls * len(trainers) / _timed(lambda: _together(trainers, calls))


def _together(trainers: list[Trainer], calls: int) -> None:
    threads = [threading.Thread(target=trainer.work, args=(calls,)) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class Trainer:
    """A session that leases slices and acknowledges them whole."""

    def __init__(self, master: MasterPort, dataset: str, number: int) -> None:
        self._master = master
        self._dataset = dataset
        self._session = f"{dataset}-{number}"
        self._request = 0
        registration = Registration(
            name=dataset,
            sources=(Source(name="records", count=HUGE),),
            records_per_shard=SHARD,
            shuffle=True,
            shuffle_shards=True,
        )
        answer = master.register(
            RegisterCall(
                session=self._session, worker_id=str(number), batch_size=32, registration=registration
            )
        )
        self._lineage = answer.lineage

    def work(self, calls: int) -> None:
        """So many exchanges."""
        for _ in range(calls):
            self.exchange()

    def exchange(self) -> None:
        """One call that leases, one that acknowledges."""
        self._request += 1
        leases = self._master.lease(
            LeaseCall(
                session=self._session,
                dataset=self._dataset,
                lineage=self._lineage,
                request=self._request,
                epoch=NEW_PASS if self._request == 1 else 0,
                count=A_CALL,
            )
        )
        done = tuple(
            Acknowledgement(task=grant.task, attempt=grant.attempt, upto=grant.slice.stop)
            for grant in leases.grants
        )
        self._master.report(
            ReportCall(
                session=self._session,
                dataset=self._dataset,
                lineage=self._lineage,
                request=self._request,
                acknowledgements=done,
            )
        )


if __name__ == "__main__":
    main()
