"""What ten open pages cost a master that is as busy as it can be.

`python benchmarks/watching.py --json runs/watching.json`. Two masters have the same load in turn; ten viewers
follow the page of one of them all the time.
"""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from dispatch_load import Load, contest
from finding import Finding
from harness import parser, write_json
from serving import Server, master

VIEWERS = 10
CLIENTS = 64
GOAL = 0.99


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = parser("What open pages cost a master.").parse_args(arguments)
    rounds, seconds = (2, 0.3) if options.quick else (21, 1.5)
    findings = []
    for finding in watched(rounds, seconds):
        print(finding, flush=True)
        findings.append(finding.as_json())
    if options.json is not None:
        write_json(options.json, {"quick": options.quick, "findings": findings})


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
