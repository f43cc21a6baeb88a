"""Contenders measured in turn, round by round, and compared within each round; tables and JSON of the result.

A machine's speed drifts while a benchmark runs, so only ratios of neighbouring rounds are trusted: their
median is what is reported. It does not know what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

Round = Callable[[], int]  # does the work once; returns how many records that were

_PACKAGES = ("torch", "numpy", "opencv-python-headless", "pillow", "grpcio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Contenders by name that do the same work, and ratios to look at: `(ours, theirs, target or None)`."""

    title: str
    contenders: Mapping[str, Round]
    ratios: Sequence[tuple[str, str, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The throughput of `ours` over that of `theirs`: median and quartiles over the rounds."""

    ours: str
    theirs: str
    median: float
    low: float
    high: float
    target: float | None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        return None if self.target is None else self.median >= self.target


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One contest: records a second of every contender in every round, and the ratios."""

    title: str
    throughputs: dict[str, list[float]]
    ratios: list[Ratio]


def measure(contest: Contest, rounds: int) -> Result:
    """One round of each contender that is not counted, then `rounds` that are, in alternating order."""
    for contender in contest.contenders.values():
        contender()
    names = list(contest.contenders)
    throughputs: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            throughputs[name].append(_throughput(contest.contenders[name]))
    ratios = [_ratio(throughputs, *row) for row in contest.ratios]
    return Result(title=contest.title, throughputs=throughputs, ratios=ratios)


def _throughput(contender: Round) -> float:
    begun = time.perf_counter()
    records = contender()
    return records / (time.perf_counter() - begun)


def _ratio(throughputs: Mapping[str, list[float]], ours: str, theirs: str, target: float | None) -> Ratio:
    pairs = zip(throughputs[ours], throughputs[theirs], strict=True)
    ratios = [mine / other for mine, other in pairs]
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Ratio(ours=ours, theirs=theirs, median=median, low=low, high=high, target=target)


def print_result(result: Result) -> None:
    """Two small tables: throughputs, then ratios with their targets."""
    print(f"\n{result.title}")
    for name, values in result.throughputs.items():
        print(f"  {name:<34}{statistics.median(values):>14,.0f} records/s")
    for ratio in result.ratios:
        verdict = "" if ratio.target is None else f"  target {ratio.target:.2f}  {_verdict(ratio.met)}"
        what = f"{ratio.ours} / {ratio.theirs}"
        print(f"  {what:<52}{ratio.median:>8.3f}  [{ratio.low:.3f} … {ratio.high:.3f}]{verdict}")
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
    return {"python": platform.python_version(), "cpus": os.cpu_count(), "packages": versions}
