"""The master alone: datasets of any size, leases and acknowledgements a second, what a journal costs.

`python benchmarks/dispatch.py --json runs/dispatch.json`. One lease and one acknowledgement count as two.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from contenders import environment_of_children, loopback_master
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

SIZES = (10**3, 10**6, 10**9, 10**12)
HUGE = SIZES[-1]
A_CALL = 100
SHARD = 256
TRAINERS = 4  # that ask for a hundred at a time
CLIENTS = 64  # that make single calls
OFFERED = 1000.0  # single calls a second, of all clients together

GOAL_MS, GOAL_MB = 50.0, 100.0
GOAL_OVER_GRPC, GOAL_WITH_JOURNAL = 50_000.0, 25_000.0
GOAL_P99_MS = 10.0
GOAL_HALF, GOAL_OF_ECHO = 0.5, 0.8

PEERS = Path(__file__).with_name("dispatch_peers.py")


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
    rounds, calls, seconds = (2, 4, 0.2) if options.quick else (5, 60, 3.0)
    findings = []
    for finding in (*sizes(rounds), *in_process(rounds, calls), *over_grpc(rounds, seconds)):
        print(describe(finding), flush=True)
        findings.append(finding)
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
    return f"{line}  target {sign} {goal:,g}  {'met' if finding.met else 'MISSED'}"


def sizes(rounds: int) -> Iterator[Finding]:
    """Register datasets of all sizes with every shuffle and lend the first slices: time and memory."""
    for size in SIZES:
        times = [_timed(partial(_register_and_lease, size)) * 1e3 for _ in range(rounds)]
        tracemalloc.start()
        _register_and_lease(size)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        what, last = f"register {size:,} records, shuffled", size == HUGE
        yield Finding(what=what, value=statistics.median(times), unit="ms", most=GOAL_MS if last else None)
        yield Finding(
            what="  memory for it (tracemalloc)",
            value=peak / 2**20,
            unit="MB",
            most=GOAL_MB if last else None,
        )
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    yield Finding(what="  resident at most, this whole benchmark with torch", value=resident, unit="MB")


def _register_and_lease(size: int) -> None:
    master = LocalMaster(dispatcher=Dispatcher(ledger_id="benchmark"))
    trainer = Trainer(master, "huge", 0, size)
    trainer.exchange()


def in_process(rounds: int, calls: int) -> Iterator[Finding]:
    """Leases and acknowledgements a second, by call."""
    trainer = Trainer(LocalMaster(dispatcher=Dispatcher(ledger_id="benchmark")), "rates", 0)
    trainer.work(calls)
    rates = [2 * A_CALL * calls / _timed(lambda: trainer.work(calls)) for _ in range(rounds)]
    what = f"leases and acknowledgements in process, {A_CALL} a call"
    yield Finding(what=what, value=statistics.median(rates), unit="/s")


def over_grpc(rounds: int, seconds: float) -> Iterator[Finding]:
    """The same over grpc, and single round trips, with and without a journal, beside a bare echo."""
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory()), "state")
        plain = stack.enter_context(loopback_master())
        durable = stack.enter_context(loopback_master("--state", str(state)))
        echo = stack.enter_context(_echo())
        masters = plain.address, durable.address
        batched = [[_peers("trainers", a, seconds, TRAINERS, A_CALL) for a in masters] for _ in range(rounds)]
        paced = [
            [_peers("trainers", a, seconds, CLIENTS, 1, OFFERED) for a in masters] for _ in range(rounds)
        ]
        closed = [
            [
                *(_peers("trainers", a, seconds, CLIENTS, 1) for a in masters),
                _peers("echoes", echo, seconds, CLIENTS, 1),
            ]
            for _ in range(rounds)
        ]
    each = f"{A_CALL} a call, {TRAINERS} trainers"
    for place, (kept, goal) in enumerate((("", GOAL_OVER_GRPC), (", journal", GOAL_WITH_JOURNAL))):
        yield Finding(
            what=f"over grpc, {each}{kept}", value=_median(batched, place, "items"), unit="/s", least=goal
        )
    yield Finding(what="  with journal / without", value=_ratio(batched, 1, 0), unit="", least=GOAL_HALF)
    for place, kept in enumerate(("", ", journal")):
        what = f"{CLIENTS} clients offering {OFFERED:,.0f} calls/s{kept}"
        yield Finding(what=f"{what}: answered", value=_median(paced, place, "calls"), unit="/s")
        yield Finding(what="  p50", value=_median(paced, place, "p50_ms"), unit="ms")
        yield Finding(
            what="  p99",
            value=_median(paced, place, "p99_ms"),
            unit="ms",
            most=None if kept else GOAL_P99_MS,
        )
    for place, kept in enumerate(("", ", journal")):
        what = f"{CLIENTS} clients, single calls, unbounded{kept}"
        yield Finding(what=what, value=_median(closed, place, "calls"), unit="/s")
        goal_of_echo = None if kept else GOAL_OF_ECHO
        yield Finding(what="  / bare grpc echo", value=_ratio(closed, place, 2), unit="", least=goal_of_echo)


Measured = list[list[dict[str, float]]]  # rounds of contenders


def _median(rounds: Measured, place: int, what: str) -> float:
    return statistics.median(one[place][what] for one in rounds)


def _ratio(rounds: Measured, ours: int, theirs: int) -> float:
    return statistics.median(one[ours]["calls"] / one[theirs]["calls"] for one in rounds)


def _peers(
    kind: str, address: str, seconds: float, sessions: int, count: int, rate: float = 0.0
) -> dict[str, float]:
    arguments = [kind, address, *map(str, (seconds, sessions, count, rate))]
    done = subprocess.run(
        [sys.executable, str(PEERS), *arguments],
        env=environment_of_children(),
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


@contextmanager
def _echo() -> Iterator[str]:
    """The address of a bare grpc server that returns what it gets."""
    server = subprocess.Popen(
        [sys.executable, str(PEERS), "echo"],
        env=environment_of_children(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
    finally:
        server.kill()
        server.communicate()


def _timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class Trainer:
    """A session that leases slices and acknowledges them whole."""

    def __init__(self, master: MasterPort, dataset: str, number: int, size: int = HUGE) -> None:
        self._master = master
        self._dataset = dataset
        self._session = f"{dataset}-{number}"
        self._request = 0
        registration = Registration(
            name=dataset,
            sources=(Source(name="records", count=size),),
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
