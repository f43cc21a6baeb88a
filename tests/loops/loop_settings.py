"""How many programs are drawn: the same few in each run, or as many others as a variable asks for.

`EDL_LOOPS=20` draws twenty times as many, from a random seed. A failure prints its smallest program, which is
code: `run(Program(…))` repeats it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("EDL_LOOPS", "0"))


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
