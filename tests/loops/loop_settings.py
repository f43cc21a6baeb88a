"""How many programs are drawn: the same few in each run, or as many others as a variable asks for.

`EDL_LOOPS=20` draws twenty times as many, from a random seed: ten times are 6,750 programs.
`EDL_LOOPS_LOG=FILE` gets a line for each hundred that have run, and at last how many of the exact loops are
proven, and which are not. A failure prints its smallest program, which is code: `run(Program(…))` repeats it.
"""

from __future__ import annotations

import os
import time
from itertools import count
from pathlib import Path

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("EDL_LOOPS", "0"))
DEMOTED = 0.01  # of loops that the model calls exact, so many may not be proven; 11 of 3,190 were not

_LOG, _RUNS, _BEGAN = os.environ.get("EDL_LOOPS_LOG", ""), count(1), time.monotonic()


def count_run() -> None:
    """Note that a program is about to run."""
    if (number := next(_RUNS)) % 100 == 0:
        note(f"{number} programs in {time.monotonic() - _BEGAN:.0f} s")


def note(line: str) -> None:
    """Write a line into the log, where there is one."""
    if _LOG:
        with Path(_LOG).open("a") as log:
            log.write(f"{line}\n")


def drawing(examples: int) -> settings:
    """Settings of a test that draws so many programs."""
    return settings(
        max_examples=examples * (TIMES or 1),
        derandomize=not TIMES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
