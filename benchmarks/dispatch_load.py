"""Loads on servers, round by round: the contenders of a round in turn, in an order that is turned around.

The trainers are a process of their own (`dispatch_peers.py`). It does not know what the numbers should be.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from serving import Server, environment_of_children

PEERS = Path(__file__).with_name("dispatch_peers.py")
PAGE = bytes(4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`sessions` of a kind that ask for `count` at a time; `rate` calls a second in all, 0: as answered."""

    kind: str
    sessions: int
    count: int
    rate: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One contender in one round; processor time is that of the server and of the peers for 1,000 calls."""

    calls: float
    items: float
    p50_ms: float
    p99_ms: float
    server_cpu_s: float
    peers_cpu_s: float


class Rounds:
    """All rounds by contender."""

    def __init__(self, rounds: Mapping[str, list[Round]]) -> None:
        self._rounds = rounds

    def median(self, name: str, what: str) -> float:
        """The median of a number over the rounds."""
        return statistics.median(float(getattr(one, what)) for one in self._rounds[name])

    def ratio(self, what: str, ours: str, theirs: str) -> tuple[float, float, float]:
        """Quartiles of the ratio of a number, taken between the two of one round."""
        pairs = zip(self._rounds[ours], self._rounds[theirs], strict=True)
        ratios = [getattr(mine, what) / getattr(other, what) for mine, other in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return low, middle, high

    def as_json(self) -> dict[str, list[dict[str, float]]]:
        """Every round."""
        return {
            name: [{what: getattr(one, what) for what in one.__slots__} for one in some]
            for name, some in self._rounds.items()
        }


def contest(contenders: Mapping[str, tuple[Server, Load]], rounds: int, seconds: float) -> Rounds:
    """One short round that is not counted, then `rounds` that are."""
    measured: dict[str, list[Round]] = {name: [] for name in contenders}
    for server, load in contenders.values():
        one_round(server, load, seconds / 5)
    for number in range(rounds):
        for name in contenders if number % 2 else reversed(list(contenders)):
            measured[name].append(one_round(*contenders[name], seconds))
    return Rounds(measured)


def one_round(server: Server, load: Load, seconds: float) -> Round:
    """Put the load on the server for so long."""
    numbers = (seconds, load.sessions, load.count, load.rate)
    before = server.cpu_s()
    done = subprocess.run(
        [sys.executable, str(PEERS), load.kind, server.address, *map(str, numbers)],
        env=environment_of_children(),
        stdout=subprocess.PIPE,
        check=True,
    )
    used = server.cpu_s() - before
    found = json.loads(done.stdout)
    per_1000 = 1000 / found["answered"]
    return Round(
        **{name: found[name] for name in ("calls", "items", "p50_ms", "p99_ms")},
        server_cpu_s=used * per_1000,
        peers_cpu_s=found["cpu_s"] * per_1000,
    )


def syncs_a_second(folder: Path, seconds: float) -> float:
    """How often the disk of `folder` makes a page at the end of a file safe, one after the other."""
    path = folder / "sync"
    with path.open("wb", buffering=0) as file:
        count, begun = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - begun) < seconds or not count:
            file.write(PAGE)
            os.fdatasync(file.fileno())
            count += 1
    path.unlink()
    return count / elapsed
