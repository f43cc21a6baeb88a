"""What ten open pages cost a master, in processor time: one whose trainers rest, and one that is busy.

`python benchmarks/watching.py --json runs/watching.json`. A master at rest is watched and not watched in
turn. One that answers as fast as it can is watched all the time, and counts what its page's own code takes
(`watching_peers.py`). Processor time is the same on a machine that does other things too.
"""

from __future__ import annotations

import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from statistics import median

from dispatch_load import Load, one_round
from finding import Finding
from harness import parser, write_json
from serving import Server, serving
from watching_peers import SECONDS, page_s

from edl_torch.client.grpc.client import MasterClient
from edl_torch.core.calls import NEW_PASS, LeaseCall, RegisterCall, Registration
from edl_torch.shard import Source

PEERS = Path(__file__).with_name("watching_peers.py")
VIEWERS = 10
CLIENTS = 64
TRAINERS = (64, 1000)
SETTLE_S = 2.0
GOAL = 0.01  # of a processor


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = parser("What open pages cost a master.").parse_args(arguments)
    rounds, seconds = (2, 0.3) if options.quick else (5, 6.0)
    findings = []
    measured = [resting(trainers, rounds, seconds) for trainers in TRAINERS]
    measured += [busy(trainers, rounds, 2 * seconds) for trainers in TRAINERS]
    for finding in chain.from_iterable(measured):
        print(finding, flush=True)
        findings.append(finding.as_json())
    if options.json is not None:
        write_json(options.json, {"quick": options.quick, "findings": findings})


def resting(trainers: int, rounds: int, seconds: float) -> Iterator[Finding]:
    """Processor time of a master whose trainers work on long batches, watched and not watched in turn."""
    differences = []
    with ExitStack() as stack:
        server, url, _ = stack.enter_context(_master(trainers))
        for _ in range(rounds):
            alone = _cpu_a_second(server, seconds)
            with _viewers(url, VIEWERS):
                differences.append(_cpu_a_second(server, seconds) - alone)
    what = f"processor time a second for {VIEWERS} pages, {trainers} trainers"
    yield Finding(what=what, value=median(differences), unit="s", most=GOAL)


def _take_part(client: MasterClient, session: str) -> None:
    source = Source(name="records", count=10**9)
    registration = Registration(name="training", sources=(source,), shuffle_shards=True)
    answer = client.call(
        RegisterCall(session=session, worker_id=session, batch_size=32, registration=registration)
    )
    client.call(
        LeaseCall(session=session, dataset="training", fence=answer.fence, request=1, epoch=NEW_PASS, count=4)
    )


def _cpu_a_second(server: Server, seconds: float) -> float:
    time.sleep(SETTLE_S)  # until viewers that have come or gone are seen
    before, begun = server.cpu_s(), time.monotonic()
    time.sleep(seconds)
    return (server.cpu_s() - before) / (time.monotonic() - begun)


def busy(trainers: int, rounds: int, seconds: float) -> Iterator[Finding]:
    """Share of the page's code in the processor time of a master that gets single calls, unbounded."""
    load = Load(kind="trainers", sessions=CLIENTS, count=1)
    of_page, of_master = [], []
    with ExitStack() as stack:
        server, url, counted = stack.enter_context(_master(trainers - CLIENTS))
        frames = stack.enter_context(_viewers(url, VIEWERS))
        calling = stack.enter_context(ThreadPoolExecutor(1))
        calling.submit(one_round, server, load, (rounds + 1) * seconds)
        time.sleep(seconds)  # until all clients have come
        for _ in range(rounds):
            page, whole = page_s(counted), server.cpu_s()
            time.sleep(seconds)
            of_page.append(page_s(counted) - page)
            of_master.append(server.cpu_s() - whole)
    shares = [page / whole for page, whole in zip(of_page, of_master, strict=True)]
    what = f"share of {VIEWERS} pages in a busy master's processor time, {trainers} trainers"
    unit = f"[{min(shares):.4f} … {max(shares):.4f}]"
    yield Finding(what=what, value=sum(of_page) / sum(of_master), unit=unit, most=GOAL)
    yield Finding(what="  frames that each viewer got", value=sum(frames) / VIEWERS, unit="")


@contextmanager
def _master(trainers: int) -> Iterator[tuple[Server, str, Path]]:
    """A master of so many trainers at rest; yields it, its page's stream, and where it counts."""
    port = _free_port()
    options = ("--addr", "127.0.0.1:0", "--http", f"127.0.0.1:{port}", "--lease-timeout-s", "3600")
    with tempfile.NamedTemporaryFile() as file, ExitStack() as stack:
        counted = Path(file.name)
        counted.write_bytes(bytes(SECONDS.size))
        server = stack.enter_context(serving([str(PEERS), file.name, *options]))
        client = stack.enter_context(MasterClient(server.address, "benchmark"))
        for number in range(trainers):
            _take_part(client, f"trainer-{number}")
        yield server, f"http://127.0.0.1:{port}/api/events", counted


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


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
