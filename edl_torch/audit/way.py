"""How a trainer came to acknowledge records: what the claim that they were trained on rests on."""

from __future__ import annotations

from enum import IntEnum


class Way(IntEnum):
    """Of several that one report carries, the highest counts: it proves the least."""

    STEP = 1  # an attached optimizer stepped
    NEXT = 2  # the loop asked for the next batch, or for the end
    TOKEN = 3  # a token was taken while the loop had the batch in hand
    REPORT = 4  # the loop said so, of records that came in one stream
    COUNT = 5  # the loop said so, of records of several loader workers, which were then counted
    UNKNOWN = 6  # the log does not say

    @property
    def exact(self) -> bool:
        """Whether it says which records."""
        return self < Way.COUNT

    @property
    def label(self) -> str:
        """As logs and `--json` have it."""
        return self.name.lower()
