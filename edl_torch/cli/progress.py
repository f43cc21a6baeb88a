"""A progress bar on a terminal; nothing anywhere else.

It must not know what is counted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30
_EVERY_S = 0.1


class ProgressLine:
    """`with ProgressLine(total, "records") as show: show(count)`; the line is gone at the end."""

    def __init__(
        self,
        total: int,
        what: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._what = total, what
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()
        self._clock = clock
        self._began = clock()
        self._next = self._began
        self._drawn = False

    def __call__(self, count: int) -> None:
        """Show that `count` are done, at most ten times a second."""
        if self._shown and (now := self._clock()) >= self._next:
            self._next = now + _EVERY_S
            self._draw(count, now)

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _draw(self, count: int, now: float) -> None:
        part = min(1.0, count / self._total) if self._total else 1.0
        bar = "#" * int(part * _WIDTH)
        rate = count / max(now - self._began, 1e-9)
        left = f", {max(0, self._total - count) / rate:,.0f} s left" if count else ""
        line = f"[{bar:<{_WIDTH}}] {part:4.0%}  {count:,} of {self._total:,} {self._what}{left}"
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()
        self._drawn = True
