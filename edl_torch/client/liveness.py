"""Passes on to a trainer how the stream and the heartbeats of its session stand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from edl_torch.core.status import Measures
from edl_torch.trainer.liveness import Liveness
from edl_torch.trainer.measuring import Measuring

# Seconds of a clock that goes on while the machine sleeps, where the system has one; asked at each decision.
suspended_clock: Callable[[], float] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)


class LivenessFeed:
    """The `Listener` of one session; that says what each method tells. `changed` guards `liveness`.

    `wanted` hears that others wait, `tell` that the master wants to know all.
    """

    def __init__(
        self,
        liveness: Liveness,
        measuring: Measuring,
        changed: threading.Condition,
        wanted: Callable[[str], None],
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        self._liveness = liveness
        self._measuring = measuring
        self._changed = changed
        self.wanted = wanted
        self.tell = tell

    def __repr__(self) -> str:
        return f"<LivenessFeed {self._liveness}>"

    @property
    def member(self) -> int:
        return self._liveness.member

    @property
    def progress(self) -> int:
        return self._liveness.progress

    @property
    def measures(self) -> Measures:
        return self._measuring.measures()  # needs no lock, and waits for none

    @property
    def standing(self) -> bool:
        return self._liveness.standing

    def wait_standing(self, timeout_s: float) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._liveness.standing, timeout_s))

    def stood(self, asked_at: float, *, lease_timeout_s: float, progress_timeout_s: float = 0.0) -> None:
        with self._changed:
            self._liveness.stood(
                asked_at, lease_timeout_s=lease_timeout_s, progress_timeout_s=progress_timeout_s
            )
            self._changed.notify_all()

    def broke(self) -> None:
        with self._changed:
            self._liveness.broke()

    def answered(self, asked_at: float) -> None:
        with self._changed:
            self._liveness.answered(asked_at)

    def doubt(self) -> None:
        with self._changed:
            self._liveness.doubt()
