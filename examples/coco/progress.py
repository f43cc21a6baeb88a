"""The line that says how far training is.

On a terminal one line is drawn over and over; elsewhere a plain line is printed now and then. It must not
know what is trained.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

BAR_WIDTH = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What one line shows; `done` and `total` count records of this epoch, `rate` is that of all ranks."""

    epoch: int
    num_epochs: int
    done: int
    total: int
    rate: float
    loss: float
    shards_left: int


class ProgressLine:
    """Draws standings to a stream: at most every half second on a terminal, else every ten."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream if stream is not None else sys.stdout
        self.terminal = self.stream.isatty()
        self._clock = clock
        self._started = self._drawn = clock()
        self._records = 0
        self._width = 0

    def now(self) -> float:
        """Seconds on the line's clock."""
        return self._clock()

    @property
    def rate(self) -> float:
        """Records a second since this line was made or restarted."""
        elapsed = self._clock() - self._started
        return self._records / elapsed if elapsed > 0 else 0.0

    def restart(self) -> None:
        """Measure the rate anew, as at the beginning of an epoch."""
        self._started, self._records = self._clock(), 0

    def count(self, records: int) -> None:
        """Add records that were trained on."""
        self._records += records

    @property
    def due(self) -> bool:
        """Whether the line is old enough to be drawn anew."""
        return self._clock() - self._drawn >= (0.5 if self.terminal else 10.0)

    def draw(self, standing: Standing) -> None:
        """Show the standing now."""
        self._drawn = self._clock()
        text = self._text(standing)
        if not self.terminal:
            print(text, file=self.stream, flush=True)
            return
        self.stream.write("\r" + text.ljust(self._width))
        self.stream.flush()
        self._width = len(text)

    def say(self, text: str) -> None:
        """Print a whole line in place of the drawn one."""
        lead = "\r" if self.terminal and self._width else ""
        print(lead + text.ljust(self._width), file=self.stream, flush=True)
        self._width = 0

    def _text(self, standing: Standing) -> str:
        share = standing.done / standing.total if standing.total else 1.0
        bar = "#" * round(BAR_WIDTH * share)
        return (
            f"epoch {standing.epoch}/{standing.num_epochs} "
            f"[{bar:-<{BAR_WIDTH}}] {standing.done}/{standing.total}  {standing.rate:.0f} records/s  "
            f"loss {standing.loss:.3f}  shards left {standing.shards_left}"
        )
