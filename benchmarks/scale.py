"""One master with hundreds of trainers: its memory for each, its work for each, and how long a lease takes.

`python benchmarks/scale.py --json runs/scale.json`. Every trainer has a session, a connection, a stream and
heartbeats of its own, over grpc on loopback; they live in two processes (`scale_peers.py`) on the same cores.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from finding import Finding
from harness import parser, write_json
from serving import Server, environment_of_children, master

from edl_torch.core.members import HEARTBEATS_PER_TIMEOUT

PEERS = Path(__file__).with_name("scale_peers.py")
ROUNDS = 5
LEASE_TIMEOUT_S = 30.0  # what a master has by default
QUIET_S = 3600.0  # of lease timeout, for a master that asks for no heartbeat meanwhile

GOAL_KB, GOAL_IDLE, GOAL_P99_MS = 200.0, 0.05, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything. Rates are a second, of all trainers together."""

    trainers: int
    processes: int
    seconds: float
    leases: float
    beats: float


FULL = Sizes(trainers=500, processes=2, seconds=10.0, leases=250.0, beats=250.0)
QUICK = Sizes(trainers=20, processes=2, seconds=0.5, leases=100.0, beats=20.0)


class Crowd:
    """Processes of trainers that are all there, and do what they are told."""

    def __init__(self, address: str, sizes: Sizes, stack: ExitStack) -> None:
        share, rest = divmod(sizes.trainers, sizes.processes)
        counts = [share + (number < rest) for number in range(sizes.processes)]
        self._processes = [stack.enter_context(_peers(address, count)) for count in counts]
        for process in self._processes:
            _answer(process)

    def do(self, what: str, rate: float, seconds: float) -> dict[str, float]:
        """All make calls at this rate together. Of the latencies the worst process counts."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{what} {rate / len(self._processes)} {seconds}\n")
            process.stdin.flush()
        return self.answers()

    def answers(self) -> dict[str, float]:
        """What all have to say, added up."""
        answers = [_answer(process) for process in self._processes]
        return {name: (sum if name == "calls" else max)(a[name] for a in answers) for name in answers[0]}


@contextmanager
def _peers(address: str, count: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(PEERS), address, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_of_children(),
    )
    try:
        yield process
    finally:
        process.communicate(timeout=60)


def _answer(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("the trainers' process ended; what it said is above")
    answer: dict[str, float] = json.loads(line)
    return answer


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = parser("What hundreds of trainers cost a master.").parse_args(arguments)
    sizes = QUICK if options.quick else FULL
    found = []
    with tempfile.TemporaryDirectory() as folder:
        journals = [["--state", f"{folder}/{name}"] for name in ("quiet", "asking")]
        for title, flags in (("in memory", ([], [])), ("with journal", journals)):
            print(f"\n{sizes.trainers} trainers, master {title}")
            for finding in measured(sizes, *flags):
                print(f"  {finding}", flush=True)
                found.append({"master": title, **finding.as_json()})
    if options.json is not None:
        write_json(options.json, {"quick": options.quick, "sizes": asdict(sizes), "findings": found})


def measured(sizes: Sizes, quiet: Sequence[str], asking: Sequence[str]) -> Iterator[Finding]:
    """Everything about a kind of master, by one that asks for no heartbeat meanwhile and one that does."""
    with ExitStack() as stack:
        server = stack.enter_context(master(*quiet, "--lease-timeout-s", f"{QUIET_S:g}"))
        with ExitStack() as first:  # what the first trainer brings into memory is not counted
            Crowd(server.address, Sizes(**{**asdict(sizes), "trainers": 2, "processes": 1}), first)
        before_mb, began = server.rss_mb(), time.perf_counter()
        crowd = Crowd(server.address, sizes, stack)
        yield Finding(what="until all have a stream and a lease", value=time.perf_counter() - began, unit="s")
        grown_kb = 1024 * (server.rss_mb() - before_mb) / sizes.trainers
        yield Finding(what="memory of the master for a trainer", value=grown_kb, unit="KB", most=GOAL_KB)
        idle, _ = _loaded(server, crowd, "beats", 0.0, sizes.seconds)
        yield Finding(what="CPU while nobody asks anything, of one core", value=idle, unit="")
        yield from _calls(sizes, server, crowd, idle)
    yield from _heartbeats(sizes, asking, idle)


def _heartbeats(sizes: Sizes, flags: Sequence[str], idle: float) -> Iterator[Finding]:
    timeout_s = HEARTBEATS_PER_TIMEOUT * sizes.trainers / sizes.beats
    with ExitStack() as stack:
        server = stack.enter_context(master(*flags, "--lease-timeout-s", f"{timeout_s:g}"))
        crowd = Crowd(server.address, sizes, stack)
        busy, beats = _loaded(server, crowd, "beats", 0.0, sizes.seconds)
    each_s = (busy - idle) * sizes.seconds / beats["calls"]
    yield Finding(what="CPU to ask for a heartbeat and take it", value=1e6 * each_s, unit="µs")
    usual = sizes.trainers * HEARTBEATS_PER_TIMEOUT / LEASE_TIMEOUT_S
    yield Finding(
        what=f"  all trainers' heartbeats ({usual:g} a second), of one core",
        value=idle + usual * each_s,
        unit="",
        most=GOAL_IDLE,
    )


def _calls(sizes: Sizes, server: Server, crowd: Crowd, idle: float) -> Iterator[Finding]:
    rounds = [_loaded(server, crowd, "leases", sizes.leases, sizes.seconds / ROUNDS) for _ in range(ROUNDS)]
    middle = {
        name: statistics.median(answer[name] for _, answer in rounds)
        for name in ("calls", "p50_ms", "p99_ms")
    }
    yield Finding(what=f"lease or report, {sizes.leases:g} a second: p50", value=middle["p50_ms"], unit="ms")
    yield Finding(what="  p99, median of the rounds", value=middle["p99_ms"], unit="ms", most=GOAL_P99_MS)
    quietest = min(answer["p99_ms"] for _, answer in rounds)
    yield Finding(what="  p99, quietest round", value=quietest, unit="ms")
    each_s = (statistics.median(part for part, _ in rounds) - idle) * sizes.seconds / ROUNDS / middle["calls"]
    yield Finding(what="  CPU for a call", value=1e6 * each_s, unit="µs")
    crowd.do("waits", 0.0, sizes.seconds)
    waiting, _ = _timed(server, crowd.answers)
    yield Finding(what="CPU while all wait for a last shard, of one core", value=waiting, unit="")


def _loaded(
    server: Server, crowd: Crowd, what: str, rate: float, seconds: float
) -> tuple[float, dict[str, float]]:
    """The part of one core that the master used meanwhile, and what the trainers saw."""
    return _timed(server, lambda: crowd.do(what, rate, seconds))


def _timed(server: Server, action: Callable[[], dict[str, float]]) -> tuple[float, dict[str, float]]:
    began, cpu = time.perf_counter(), server.cpu_s()
    answer = action()
    return (server.cpu_s() - cpu) / (time.perf_counter() - began), answer


if __name__ == "__main__":
    main()
