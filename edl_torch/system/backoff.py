"""Pauses between attempts, which grow and are never alike: many who try again do not come at once."""

from __future__ import annotations

import random
from collections.abc import Iterator

# The user's random numbers stay as they were, and forked children share no seed.
JITTER = random.SystemRandom()


def backoff(first_s: float = 0.05, longest_s: float = 1.0) -> Iterator[float]:
    """Endless jittered pauses in seconds: of at most `first_s`, each twice as long, up to `longest_s`."""
    pause_s = first_s
    while True:
        pause_s = min(longest_s, pause_s)
        yield JITTER.uniform(0.5, 1.0) * pause_s
        pause_s *= 2
