"""How many programs are drawn: the same few in each run, or as many others as a variable asks for.

`EDL_LOOPS=20` draws twenty times as many, from a random seed. A failure prints its smallest program, which is
code: `run(Program(…))` repeats it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

TIMES = int(os.environ.get("EDL_LOOPS", "0"))
# Of loops that the model calls exact, so many may not be proven. The last percent are some that are left
# between the steps of several optimizers: the few that are drawn each time have none of those.
DEMOTED = 0.02 if TIMES else 0.01


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
