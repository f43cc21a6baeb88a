"""How far a dataset is, how fast it goes on, and how long this trainer waits for it: for people and loggers.

Values and arithmetic; it does not know where the counts come from.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from edl_torch.core.calls import DatasetStatus
from edl_torch.core.measures import Measures

WINDOW_S = 60.0  # the rate is that of about so long
BETWEEN_S = 1.0  # looks that are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(DatasetStatus):
    """State of a dataset, with the counts of all its trainers, and what this trainer has measured.

    Attributes:
        measures: of this trainer alone, since its service was made.
        rate: records per second of all trainers together, over about the last minute; None where there was no
            look before this one.
    """

    measures: Measures
    rate: float | None

    @property
    def n(self) -> int:
        """Records with an outcome, of all epochs: trained on, in quarantine, or dropped."""
        return self.acknowledged + self.quarantined + self.dropped

    @property
    def total(self) -> int | None:
        """Records of all epochs; None where they are endless."""
        return self.size * self.num_epochs or None

    @property
    def percent(self) -> float | None:
        """`n` of `total`; None where epochs are endless."""
        return None if self.total is None else 100.0 * self.n / self.total

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the present rate; None where there is no end or no rate."""
        if self.total is None or not self.rate:
            return None
        return max(0, self.total - self.n) / self.rate

    @property
    def waiting_share(self) -> float | None:
        """The share of its time that this trainer's loop waited for data; see `Measures`."""
        return self.measures.waiting_share

    def as_dict(self) -> dict[str, float]:
        """Return what is known as numbers by name, for loggers: `writer.add_scalar(name, value, step)`."""
        values = {
            "data/epoch": self.epoch,
            "data/records": self.n,
            "data/percent": self.percent,
            "data/records_per_s": self.rate,
            "data/eta_s": self.eta_s,
            "data/quarantined": self.quarantined,
            "data/trainers": self.trainers,
            "data/batches": self.measures.batches,
            "data/waited_s": self.measures.waited.sum_s,
            "data/waited_for_ranks_s": self.measures.waited_for_ranks_s,
            "data/stepped_s": self.measures.stepped.sum_s,
            "data/waiting_share": self.waiting_share,
        }
        return {name: float(value) for name, value in values.items() if value is not None}


class Pace:
    """Makes the progress of one dataset of its looks, one after the other. `clock` tells seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lineage = ("", 0)
        self._looks: deque[tuple[float, int]] = deque()  # when, and the records with an outcome by then

    def __repr__(self) -> str:
        return f"<Pace looks={len(self._looks)}>"

    def progress(self, status: DatasetStatus, measures: Measures) -> Progress:
        """Return the progress at this look."""
        now = self._clock()
        counts = {field.name: getattr(status, field.name) for field in fields(DatasetStatus)}
        progress = Progress(**counts, measures=measures, rate=None)
        return replace(progress, rate=self._rate(now, (status.ledger, status.lineage), progress.n))

    def _rate(self, now: float, lineage: tuple[str, int], records: int) -> float | None:
        looks = self._looks
        if lineage != self._lineage:  # counts of another history
            self._lineage = lineage
            looks.clear()
        while len(looks) > 1 and looks[1][0] <= now - WINDOW_S:
            looks.popleft()
        if not looks or now - looks[-1][0] >= BETWEEN_S:
            looks.append((now, records))
        began, before = looks[0]
        return max(0, records - before) / (now - began) if now > began else None
