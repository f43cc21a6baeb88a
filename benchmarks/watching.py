"""What ten open pages cost a master: processor time of one whose trainers rest, calls of one that is busy.

`python benchmarks/watching.py --json runs/watching.json`. A master is watched and not watched in turn; then
two masters have the same load in turn, and ten viewers follow the page of one of them all the time. With
`--cpu` only the first: processor time is the same on a machine that does other things too.
"""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from statistics import median

from dispatch_load import Load, contest
from finding import Finding
from harness import parser, write_json
from serving import Server, master

from edl_torch.client.grpc.client import MasterClient
from edl_torch.core.calls import NEW_PASS, LeaseCall, RegisterCall, Registration
from edl_torch.shard import Source

VIEWERS = 10
CLIENTS = 64
TRAINERS = (64, 1000)  # of a master at rest
SETTLE_S = 2.0
GOAL = 0.99


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    made = parser("What open pages cost a master.")
    made.add_argument(
        "--cpu", action="store_true", help="only processor time: for a machine that is not quiet"
    )
    options = made.parse_args(arguments)
    rounds, seconds = (2, 0.3) if options.quick else (21, 1.5)
    findings = []
    measured = [resting(trainers, max(1, rounds // 4), 4 * seconds) for trainers in TRAINERS]
    if not options.cpu:
        measured.append(watched(rounds, seconds))
    for finding in chain.from_iterable(measured):
        print(finding, flush=True)
        findings.append(finding.as_json())
    if options.json is not None:
        write_json(options.json, {"quick": options.quick, "findings": findings})


def resting(trainers: int, rounds: int, seconds: float) -> Iterator[Finding]:
    """Processor time of a master whose trainers work on long batches, watched and not watched in turn."""
    differences = []
    with ExitStack() as stack:
        server, url = stack.enter_context(_with_page(*_free_ports(1)))
        client = stack.enter_context(MasterClient(server.address, "benchmark"))
        for number in range(trainers):
            _take_part(client, f"trainer-{number}")
        for _ in range(rounds):
            alone = _cpu_a_second(server, seconds)
            with _viewers(url, VIEWERS):
                differences.append(_cpu_a_second(server, seconds) - alone)
    what = f"processor time a second for {VIEWERS} pages, {trainers} trainers"
    yield Finding(what=what, value=median(differences), unit="s", most=1 - GOAL)


def _take_part(client: MasterClient, session: str) -> None:
    source = Source(name="records", count=10**9)
    registration = Registration(name="training", sources=(source,), shuffle_shards=True)
    answer = client.register(
        RegisterCall(session=session, worker_id=session, batch_size=32, registration=registration)
    )
    client.lease(
        LeaseCall(session=session, dataset="training", fence=answer.fence, request=1, epoch=NEW_PASS, count=4)
    )


def _cpu_a_second(server: Server, seconds: float) -> float:
    time.sleep(SETTLE_S)  # until viewers that have come or gone are seen
    before, begun = server.cpu_s(), time.monotonic()
    time.sleep(seconds)
    return (server.cpu_s() - before) / (time.monotonic() - begun)


def watched(rounds: int, seconds: float) -> Iterator[Finding]:
    """Single calls, unbounded, with and without viewers; both masters have the page."""
    load = Load(kind="trainers", sessions=CLIENTS, count=1)
    with ExitStack() as stack:
        alone, seen = (stack.enter_context(_with_page(port)) for port in _free_ports(2))
        frames = stack.enter_context(_viewers(seen[1], VIEWERS))
        found = contest({"alone": (alone[0], load), "watched": (seen[0], load)}, rounds, seconds)
        yield Finding(what="calls, nobody looks", value=found.median("alone", "calls"), unit="/s")
        yield Finding(what=f"calls, {VIEWERS} pages open", value=found.median("watched", "calls"), unit="/s")
        for what, ours, theirs in (("calls", "watched", "alone"), ("server_cpu_s", "alone", "watched")):
            low, middle, high = found.ratio(what, ours, theirs)
            name = "by the clock" if what == "calls" else "by the servers' CPU"
            unit = f"[{low:.3f} … {high:.3f}]"
            yield Finding(what=f"  watched / alone, {name}", value=middle, unit=unit, least=GOAL)
        yield Finding(what="frames that the viewers got", value=float(sum(frames)), unit="")


@contextmanager
def _with_page(port: int) -> Iterator[tuple[Server, str]]:
    with master("--http", f"127.0.0.1:{port}") as server:
        yield server, f"http://127.0.0.1:{port}/api/events"


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


@contextmanager
def _viewers(url: str, count: int) -> Iterator[list[int]]:
    """Follow the stream from so many threads; yields how many frames each has got."""
    frames = [0] * count
    answers = [urllib.request.urlopen(url, timeout=60) for _ in range(count)]

    def follow(place: int) -> None:
        try:
            for line in answers[place]:
                frames[place] += line.startswith(b"data:")
        except (OSError, ValueError, AttributeError):
            return  # closed

    for place in range(count):
        threading.Thread(target=follow, args=(place,), daemon=True).start()
    try:
        yield frames
    finally:
        for answer in answers:
            answer.fp = None


if __name__ == "__main__":
    main()
