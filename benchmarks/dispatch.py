"""The master alone: datasets of any size, leases and acknowledgements a second, what a journal costs.

`python benchmarks/dispatch.py --json runs/dispatch.json`. One lease and one acknowledgement count as two.
`--state-dir` is where the journal lies, on the disk that is meant.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from dispatch_load import PEERS, Load, Rounds, contest, syncs_a_second
from finding import Finding
from harness import parser, write_json
from serving import Server, master, serving

from edl_torch.core.calls import (
    NEW_PASS,
    Acknowledgement,
    Grant,
    LeaseCall,
    MasterApi,
    RegisterCall,
    Registration,
    ReportCall,
    RestoreCall,
    SnapshotCall,
)
from edl_torch.core.dispatcher import Dispatcher
from edl_torch.master.embedded import LocalMaster
from edl_torch.shard import Component, MixtureWeights, Source

SIZES = (10**3, 10**6, 10**9, 10**12)
HUGE = SIZES[-1]
BILLION = 10**9
A_CALL = 100
SHARD = 256
BATCH = 32
LEASES_HELD = 10
TRAINERS = 4  # that ask for a hundred at a time
CLIENTS = 64  # that make single calls
OFFERED = 1000.0  # single calls a second, of all clients together

GOAL_MS, GOAL_MB = 50.0, 100.0
GOAL_TOKEN_KB, GOAL_RESTORE_MS = 64.0, 100.0
GOAL_OVER_GRPC, GOAL_WITH_JOURNAL = 50_000.0, 25_000.0
GOAL_P99_MS = 10.0
GOAL_HALF, GOAL_OF_ECHO = 0.5, 0.8
GOALS_OF_MIXTURES = {5: 0.9, 1000: 0.7}  # of the rate of one dataset, by components
HEARING = 256  # trainers that hear of new weights


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    made = parser("What the master alone can do.")
    made.add_argument("--state-dir", type=Path, metavar="DIR", help="put the journal there, not in /tmp")
    options = made.parse_args(arguments)
    rounds, calls, seconds = (2, 4, 0.1) if options.quick else (15, 60, 0.8)
    findings = []
    stages = (
        sizes(rounds),
        tokens(rounds),
        in_process(rounds, calls),
        mixtures(rounds, calls),
        hearing(),
        over_grpc(rounds, seconds, options.state_dir),
    )
    for finding in chain(others("before"), *stages, others("after")):
        print(finding, flush=True)
        findings.append(finding.as_json())
    if options.json is not None:
        write_json(options.json, {"quick": options.quick, "findings": findings})


def others(when: str) -> Iterator[Finding]:
    """How many processes of anybody wanted a processor in the last minute."""
    yield Finding(what=f"load of the machine {when}", value=os.getloadavg()[0], unit="")


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


def _register_and_lease(size: int) -> None:
    master = LocalMaster(dispatcher=Dispatcher(ledger_id="benchmark"))
    trainer = Trainer(master, "huge", 0, size)
    trainer.exchange()


def tokens(rounds: int) -> Iterator[Finding]:
    """A token in the middle of an epoch: each trainer has trained on one batch of each of its leases."""
    master = LocalMaster(dispatcher=Dispatcher(ledger_id="benchmark"))
    trainers = [Trainer(master, "token", number, BILLION) for number in range(CLIENTS)]
    for trainer in trainers:
        trainer.begin(LEASES_HELD)
    token = trainers[0].snapshot()
    times = [_timed(partial(trainers[0].restore, token)) * 1e3 for _ in range(rounds)]
    what = f"token of {BILLION:,} records, {CLIENTS} trainers with {LEASES_HELD} leases each"
    yield Finding(what=what, value=len(token.encode()) / 1024, unit="KB", most=GOAL_TOKEN_KB)
    yield Finding(what="  to restore it", value=statistics.median(times), unit="ms", most=GOAL_RESTORE_MS)


def in_process(rounds: int, calls: int) -> Iterator[Finding]:
    """Leases and acknowledgements a second, by call."""
    trainer = Trainer(LocalMaster(dispatcher=Dispatcher(ledger_id="benchmark")), "rates", 0)
    trainer.work(calls)
    rates = [2 * A_CALL * calls / _timed(lambda: trainer.work(calls)) for _ in range(rounds)]
    what = f"leases and acknowledgements in process, {A_CALL} a call"
    yield Finding(what=what, value=statistics.median(rates), unit="/s")


def mixtures(rounds: int, calls: int) -> Iterator[Finding]:
    """The same of mixtures, beside one dataset that is not shuffled, by turns."""
    master = LocalMaster(dispatcher=Dispatcher(ledger_id="benchmark"))
    one = Trainer(master, "one", 0, **_ONE)
    one.work(calls)
    for number, goal in GOALS_OF_MIXTURES.items():
        mixed = Trainer(master, f"mixture of {number}", 0, **_mixture_of(number))
        mixed.work(calls)
        ratios = []
        for _ in range(rounds):
            alone = _timed(lambda: one.work(calls), time.process_time)
            ratios.append(alone / _timed(partial(mixed.work, calls), time.process_time))
        what = f"the same, a mixture of {number} / one dataset, by processor time"
        yield Finding(what=what, value=statistics.median(ratios), unit="", least=goal)


def hearing() -> Iterator[Finding]:
    """Of many trainers with two leases each: the last batch of old weights after new ones are answered."""
    master = LocalMaster(dispatcher=Dispatcher(ledger_id="benchmark"))
    trainers = [Trainer(master, "heard", number, **_mixture_of(5)) for number in range(HEARING)]
    for trainer in trainers:
        trainer.begin(2)
    weights = {f"c{c:04}": float(9 - c) for c in range(5)}
    start = master.set_weights("heard", weights, key="new").start
    old, wrong = [], 0
    for trainer in trainers:
        held = sum(grant.slice.limit - BATCH for grant in trainer.granted)
        assert all(grant.slice.shard * SHARD + grant.slice.stop <= start for grant in trainer.granted)
        trainer.begin(2)
        wrong += sum(grant.slice.shard * SHARD + grant.slice.skip < start for grant in trainer.granted)
        old.append(-(-held // BATCH))
    what = f"{HEARING} trainers: batches of old weights after new ones are answered, of each at most"
    yield Finding(what=what, value=max(old), unit="", most=2 * SHARD // BATCH)
    yield Finding(what="  leases of old weights after that", value=wrong, unit="", most=0)


_ONE: dict[str, Any] = {"shuffle": False, "shuffle_shards": False}


def _mixture_of(number: int) -> dict[str, Any]:
    components = tuple(
        Component(
            name=f"c{c:04}", sources=(Source(name="", count=1000 + c),), records_per_shard=SHARD, shuffle=True
        )
        for c in range(number)
    )
    weights = MixtureWeights(start=0, parts=tuple(1 + c % 7 for c in range(number)))
    return {**_ONE, "components": components, "weights": (weights,)}


def over_grpc(rounds: int, seconds: float, folder: Path | None) -> Iterator[Finding]:
    """The same over grpc, and single round trips, with and without a journal, beside a bare grpc server."""
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        plain = stack.enter_context(master())
        durable = stack.enter_context(master("--state", str(state / "state")))
        bare = stack.enter_context(serving([str(PEERS), "bare"]))
        syncs = syncs_a_second(state, seconds / 5)
        yield Finding(what="the journal's disk alone: fdatasync of a page", value=syncs, unit="/s")
        yield from batched(plain, durable, rounds, seconds)
        yield from paced(plain, durable, bare, rounds, seconds)
        yield from unbounded(plain, durable, bare, rounds, seconds)
        yield Finding(
            what=f"master of {HUGE:,} records after all this: resident at most",
            value=plain.peak_mb(),
            unit="MB",
            most=GOAL_MB,
        )


def batched(plain: Server, durable: Server, rounds: int, seconds: float) -> Iterator[Finding]:
    """A hundred a call."""
    load = Load(kind="trainers", sessions=TRAINERS, count=A_CALL)
    found = contest({"plain": (plain, load), "journal": (durable, load)}, rounds, seconds)
    for name, kept, goal in (("plain", "", GOAL_OVER_GRPC), ("journal", ", journal", GOAL_WITH_JOURNAL)):
        what = f"over grpc, {A_CALL} a call, {TRAINERS} trainers{kept}"
        yield Finding(what=what, value=found.median(name, "items"), unit="/s", least=goal)
        yield from _processors(found, name)
    yield from _ratio(found, "with journal / without", "journal", "plain", GOAL_HALF)


def paced(plain: Server, durable: Server, bare: Server, rounds: int, seconds: float) -> Iterator[Finding]:
    """So many calls a second, whatever comes of them."""
    load = Load(kind="trainers", sessions=CLIENTS, count=1, rate=OFFERED)
    servers = {"plain": (plain, load), "journal": (durable, load), "bare": (bare, load)}
    found = contest(servers, rounds, seconds)
    for name, kept in (("plain", ""), ("journal", ", journal"), ("bare", ", bare grpc server")):
        what = f"{CLIENTS} clients offering {OFFERED:,.0f} calls/s{kept}"
        yield Finding(what=f"{what}: answered", value=found.median(name, "calls"), unit="/s")
        yield Finding(what="  p50", value=found.median(name, "p50_ms"), unit="ms")
        most = GOAL_P99_MS if name == "plain" else None
        yield Finding(what="  p99", value=found.median(name, "p99_ms"), unit="ms", most=most)
        yield from _processors(found, name)


def unbounded(plain: Server, durable: Server, bare: Server, rounds: int, seconds: float) -> Iterator[Finding]:
    """One call after the other, as fast as they are answered."""
    load = Load(kind="trainers", sessions=CLIENTS, count=1)
    echo = Load(kind="echoes", sessions=CLIENTS, count=1)
    servers = {"plain": (plain, load), "journal": (durable, load), "bare": (bare, load), "echo": (bare, echo)}
    found = contest(servers, rounds, seconds)
    names = {
        "plain": "",
        "journal": ", journal",
        "bare": ", bare grpc server",
        "echo": ", bare echo of bytes",
    }
    for name, kept in names.items():
        what = f"{CLIENTS} clients, single calls, unbounded{kept}"
        yield Finding(what=what, value=found.median(name, "calls"), unit="/s")
        yield from _processors(found, name)
        if name in ("plain", "journal"):
            goal = GOAL_OF_ECHO if name == "plain" else None
            yield from _ratio(found, "/ bare grpc server, same messages", name, "bare", goal)
            yield from _ratio(found, "/ bare grpc echo of 64 bytes", name, "echo", goal)
    yield from _ratio(found, "with journal / without", "journal", "plain", GOAL_HALF)


def _processors(found: Rounds, name: str) -> Iterator[Finding]:
    for what, whose in (("server_cpu_s", "the server's"), ("peers_cpu_s", "the clients'")):
        yield Finding(what=f"  {whose} CPU, 1,000 calls", value=found.median(name, what), unit="s")


def _ratio(found: Rounds, what: str, ours: str, theirs: str, goal: float | None) -> Iterator[Finding]:
    low, middle, high = found.ratio("calls", ours, theirs)
    yield Finding(what=f"  {what}", value=middle, unit=f"[{low:.2f} … {high:.2f}]", least=goal)
    low, middle, high = found.ratio("server_cpu_s", theirs, ours)
    yield Finding(what="    by the servers' CPU alone", value=middle, unit=f"[{low:.2f} … {high:.2f}]")


def _timed(work: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
    begun = clock()
    work()
    return clock() - begun


class Trainer:
    """A session that leases slices and acknowledges them whole."""

    def __init__(self, master: MasterApi, dataset: str, number: int, size: int = HUGE, **more: Any) -> None:
        self._master = master
        self._dataset = dataset
        self._session = f"{dataset}-{number}"
        self._request = self._segment = 0
        self.granted: tuple[Grant, ...] = ()  # last
        registration = Registration(
            name=dataset,
            sources=(Source(name="records", count=size),),
            records_per_shard=SHARD,
            **{"shuffle": True, "shuffle_shards": True, **more},
        )
        answer = master.call(
            RegisterCall(
                session=self._session, worker_id=str(number), batch_size=BATCH, registration=registration
            )
        )
        self._named: dict[str, Any] = {
            "session": self._session,
            "dataset": dataset,
            "fence": answer.fence,
        }

    def work(self, calls: int) -> None:
        """So many exchanges."""
        for _ in range(calls):
            self.exchange()

    def exchange(self) -> None:
        """One call that leases, one that acknowledges."""
        self._acknowledge(
            Acknowledgement(task=grant.task, attempt=grant.attempt, upto=grant.slice.stop)
            for grant in self._lease(A_CALL)
        )

    def begin(self, count: int) -> None:
        """Lease so many slices, and train on the first batch of each."""
        self._acknowledge(
            Acknowledgement(task=grant.task, attempt=grant.attempt, upto=grant.slice.skip + BATCH)
            for grant in self._lease(count)
        )

    def _lease(self, count: int) -> tuple[Grant, ...]:
        self._request += 1
        call = LeaseCall(
            **self._named,
            request=self._request,
            epoch=NEW_PASS if self._request == 1 else 0,
            count=count,
            segment=self._segment,
        )
        answer = self._master.call(call)
        self._segment = max((one.number for one in answer.segments), default=self._segment)
        self.granted = answer.grants
        return answer.grants

    def _acknowledge(self, done: Iterable[Acknowledgement]) -> None:
        self._master.call(
            ReportCall(
                **self._named,
                request=self._request,
                acknowledgements=tuple(done),
            )
        )

    def snapshot(self) -> str:
        """The token."""
        return self._master.call(SnapshotCall(**self._named))

    def restore(self, token: str) -> None:
        """Go back to it."""
        self._request += 1
        call = RestoreCall(**self._named, request=self._request, token=token)
        self._named["fence"] = replace(self._named["fence"], lineage=self._master.call(call))


if __name__ == "__main__":
    main()
