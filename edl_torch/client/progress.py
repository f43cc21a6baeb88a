"""How far a dataset is, how fast it goes on, and how long this trainer waits for it: for people and loggers.

Values and arithmetic; it does not know where the counts come from.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from edl_torch.core.calls import DatasetStatus
from edl_torch.core.measures import Measures


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(DatasetStatus):
    """State of a dataset, with the counts of all its trainers, and what this trainer has measured.

    Attributes:
        measures: of this trainer alone, since its service was made.
    """

    measures: Measures

    @classmethod
    def of(cls, status: DatasetStatus, measures: Measures) -> Self:
        """Return the progress of a dataset, and of the trainer with these measures."""
        counts = {field.name: getattr(status, field.name) for field in fields(DatasetStatus)}
        return cls(**counts, measures=measures)

    def __repr__(self) -> str:
        total = "endless" if self.total is None else self.total
        bad = f"quarantined={self.quarantined} " if self.quarantined else ""
        return (
            f"<Progress {self.dataset!r} epoch={self.epoch} records={self.n}/{total} {bad}"
            f"percent={self.percent:.1f} rate={self.rate:.1f}/s trainers={self.trainers}>"
        )

    @property
    def n(self) -> int:
        """Records with an outcome, of all epochs: trained on, in quarantine, or dropped."""
        return self.outcomes

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
            "data/mean_read_s": self.measures.mean_read_s,
            "data/mean_transform_s": self.measures.mean_transform_s,
            "data/waiting_share": self.waiting_share,
        }
        return {name: float(value) for name, value in values.items() if value is not None}
