"""One number of a benchmark beside what it should be, as a line of a table and as JSON.

It must not know how it was measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A number, its unit, and what it should be: at least `least`, or at most `most`."""

    what: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without one."""
        if self.least is not None:
            return self.value >= self.least
        return None if self.most is None else self.value <= self.most

    def __str__(self) -> str:
        line = f"{self.what:<68}{self.value:>14,.3f} {self.unit}"
        if self.met is None:
            return line
        sign, goal = ("≤", self.most) if self.least is None else ("≥", self.least)
        return f"{line}  {sign} {goal:,g}  {'met' if self.met else 'MISSED'}"

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        return {**asdict(self), "met": self.met}
