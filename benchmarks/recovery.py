"""How long deaths take: a trainer's until its records are lent again, a master's until it serves again.

`python benchmarks/recovery.py --json runs/recovery.json`. Real processes over loopback; every number is a
distribution over rounds, and a target holds for the slowest of them.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import parser, write_json
from recovery_deaths import Death, killed_trainers, restarted_masters

GOAL_KILLED_S, GOAL_RESTART_S, GOAL_SLACK_S = 2.0, 2.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything."""

    kills: int
    silences: int
    lease_timeout_s: float
    restarts: int
    leases: int


FULL = Sizes(kills=20, silences=12, lease_timeout_s=6.0, restarts=12, leases=10_000)
QUICK = Sizes(kills=2, silences=2, lease_timeout_s=1.5, restarts=2, leases=300)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Seconds of all rounds, and what none of them should exceed."""

    what: str
    seconds: tuple[float, ...]
    most: float | None = None

    @property
    def figures(self) -> dict[str, float]:
        """The quickest round, the middle, the tenth from the end of a hundred, and the slowest."""
        ordered = sorted(self.seconds)
        p90 = statistics.quantiles(ordered, n=10, method="inclusive")[-1] if len(ordered) > 1 else ordered[0]
        return {"min": ordered[0], "median": statistics.median(ordered), "p90": p90, "max": ordered[-1]}

    @property
    def met(self) -> bool | None:
        """Whether every round reached the target; None without one."""
        return None if self.most is None else max(self.seconds) <= self.most

    def __str__(self) -> str:
        line = f"{self.what:<72}" + "".join(f"{value:>8.2f}" for value in self.figures.values())
        return line if self.most is None else f"{line}  ≤ {self.most:g}  {'met' if self.met else 'MISSED'}"

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        plain = {"what": self.what, "unit": "s", "seconds": list(self.seconds), "most": self.most}
        return {**plain, **self.figures, "met": self.met}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = parser("How long it takes to recover from deaths.").parse_args(arguments)
    sizes = QUICK if options.quick else FULL
    print(f"{'seconds':<72}{'min':>8}{'median':>8}{'p90':>8}{'max':>8}  target")
    found = []
    for distribution in (*trainers(sizes), *masters(sizes)):
        print(distribution, flush=True)
        found.append(distribution.as_json())
    if options.json is not None:
        write_json(options.json, {"quick": options.quick, "distributions": found})


def trainers(sizes: Sizes) -> Iterator[Distribution]:
    """From a trainer's death until all that it held is lent to another one."""
    killed = killed_trainers(sizes.kills, Death.KILLED)
    yield Distribution(what="trainer killed: its records are lent again", seconds=killed, most=GOAL_KILLED_S)
    timeout_s = sizes.lease_timeout_s
    for death in (Death.STOPPED, Death.VANISHED):
        yield Distribution(
            what=f"trainer {death.value}, lease timeout {timeout_s:g} s",
            seconds=killed_trainers(sizes.silences, death, lease_timeout_s=timeout_s),
            most=timeout_s + GOAL_SLACK_S,
        )


def masters(sizes: Sizes) -> Iterator[Distribution]:
    """From a master's start until it serves what was in flight when the one before was killed."""
    with tempfile.TemporaryDirectory() as folder:
        restarts = restarted_masters(Path(folder), sizes.restarts, sizes.leases)
    head = f"master started again, {sizes.leases:,} leases in flight:"
    for what, seconds, most in (
        ("ready", [one.ready_s for one in restarts], None),
        ("first call answered", [one.answered_s for one in restarts], GOAL_RESTART_S),
        ("every lease confirmed", [one.confirmed_s for one in restarts], GOAL_RESTART_S),
        ("a client that waited", [one.waited_s for one in restarts], None),
    ):
        yield Distribution(what=f"{head} {what}", seconds=tuple(seconds), most=most)


if __name__ == "__main__":
    main()
