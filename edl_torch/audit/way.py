"""Ways in which a trainer came to acknowledge records, and how much each of them proves."""

from __future__ import annotations

from enum import IntEnum


class Way(IntEnum):
    """Way of an acknowledgement. Of several in one report the highest counts: it proves the least."""

    STEP = 1  # an attached optimizer stepped
    NEXT = 2  # the loop asked for the next batch, or for the end
    TOKEN = 3  # a token was taken while the loop had the batch in hand
    REPORT = 4  # the loop said so, of records that came in one stream
    COUNT = 5  # the loop said so, of records of several loader workers, which were then counted
    UNKNOWN = 6  # the log does not say

    @property
    def exact(self) -> bool:
        """Whether it says which records were trained on."""
        return self < Way.COUNT

    @property
    def label(self) -> str:
        """Name in logs and `--json`."""
        return self.name.lower()
