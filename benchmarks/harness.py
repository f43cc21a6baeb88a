"""Contenders measured in turn, round by round, and compared within each round; tables and JSON of the result.

A machine's speed drifts while a benchmark runs, so only ratios of neighbouring rounds are trusted: their
median is what is reported. Beside throughput by the clock stands throughput by processor time, which other
people's processes disturb less. It does not know what is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

Round = Callable[[], int]  # does the work once; returns how many records that were

_PACKAGES = ("torch", "numpy", "opencv-python-headless", "grpcio")
_OPTIONAL = ("pillow", "pyarrow", "pandas", "pyodps", "pyrecordio", "cramjam", "google-crc32c")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Contenders by name that do the same work, and ratios to look at: `(ours, theirs, target or None)`."""

    title: str
    contenders: Mapping[str, Round]
    ratios: Sequence[tuple[str, str, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The throughput of `ours` over that of `theirs`: median and quartiles over the rounds.

    `processor` is the median where a second is one of processor time, of this process and its children.
    """

    ours: str
    theirs: str
    median: float
    low: float
    high: float
    processor: float
    target: float | None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        return None if self.target is None else self.median >= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One contest: records a second of every contender in every round, and the ratios.

    `by_processor` are records a second of processor time, `load` the machine's before and after.
    """

    title: str
    throughputs: dict[str, list[float]]
    by_processor: dict[str, list[float]]
    load: tuple[float, float]
    ratios: list[Ratio]


def measure(contest: Contest, rounds: int) -> Result:
    """One round of each contender that is not counted, then `rounds` that are, in alternating order."""
    for contender in contest.contenders.values():
        contender()
    names, load = list(contest.contenders), os.getloadavg()[0]
    throughputs: dict[str, list[float]] = {name: [] for name in names}
    by_processor: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            by_clock, by_work = _throughput(contest.contenders[name])
            throughputs[name].append(by_clock)
            by_processor[name].append(by_work)
    return Result(
        title=contest.title,
        throughputs=throughputs,
        by_processor=by_processor,
        load=(load, os.getloadavg()[0]),
        ratios=[_ratio(throughputs, by_processor, *row) for row in contest.ratios],
    )


def _throughput(contender: Round) -> tuple[float, float]:
    begun, worked = time.perf_counter(), processor_s()
    records = contender()
    took, work = time.perf_counter() - begun, processor_s() - worked
    return records / took, records / work if work else math.nan


def processor_s() -> float:
    """Seconds of processor time so far, of this process and of its children that live, with the threads that
    have ended; nan where the system has no such clocks."""
    children = (child.pid for child in multiprocessing.active_children())
    try:
        return time.process_time() + sum(time.clock_gettime(_clock_of(pid)) for pid in children if pid)
    except OSError:
        return math.nan


def _clock_of(pid: int) -> int:
    """What clock_getcpuclockid(3) gives on Linux."""
    return ~pid << 3 | 2


def _ratio(
    throughputs: Mapping[str, list[float]],
    by_processor: Mapping[str, list[float]],
    ours: str,
    theirs: str,
    target: float | None,
) -> Ratio:
    low, median, high = _quartiles(throughputs[ours], throughputs[theirs])
    _, processor, _ = _quartiles(by_processor[ours], by_processor[theirs])
    return Ratio(
        ours=ours, theirs=theirs, median=median, low=low, high=high, processor=processor, target=target
    )


def _quartiles(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    low, median, high = (
        statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    )
    return low, median, high


def print_result(result: Result) -> None:
    """Two small tables: throughputs, then ratios with their targets."""
    print(f"\n{result.title}  (load {result.load[0]:.1f} … {result.load[1]:.1f})")
    for name, values in result.throughputs.items():
        print(f"  {name:<34}{statistics.median(values):>14,.0f} records/s")
    for ratio in result.ratios:
        verdict = "" if ratio.target is None else f"  target {ratio.target:.2f}  {_verdict(ratio.met)}"
        what = f"{ratio.ours} / {ratio.theirs}"
        print(
            f"  {what:<52}{ratio.median:>8.3f}  [{ratio.low:.3f} … {ratio.high:.3f}]"
            f"  by processor time {ratio.processor:.3f}{verdict}"
        )
    sys.stdout.flush()


def _verdict(met: bool | None) -> str:
    return "met" if met else "MISSED"


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="PATH", help="write the results there")
    made.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that it runs; numbers mean nothing"
    )
    return made


def write_json(path: Path, body: Mapping[str, object]) -> None:
    """Write `body`, with what is needed to know where the numbers come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), **body}, indent=1) + "\n")


def results_as_json(results: Iterable[Result]) -> list[dict[str, object]]:
    """Plain values; each ratio with whether it met its target."""
    plain = []
    for result in results:
        ratios = [{**asdict(ratio), "met": ratio.met} for ratio in result.ratios]
        plain.append({**asdict(result), "ratios": ratios})
    return plain


def environment() -> dict[str, object]:
    """Python, packages and processors."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    for name in _OPTIONAL:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"python": platform.python_version(), "cpus": os.cpu_count(), "packages": versions}
