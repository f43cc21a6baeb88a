"""Figures as people read them: durations, rates, shares, epochs."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that fits; a dash where they are not known."""
    if seconds is None:
        return "-"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 2 * 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    return f"{seconds / 86400:.0f} days"


def rate(records: float) -> str:
    """Return records a second."""
    digits = 0 if records >= 100 else 1 if records >= 10 else 2
    return f"{records:,.{digits}f}/s"


def percent(value: float | None) -> str:
    """Return a share of 0 to 100, rounded down, so that only the end is 100 %; a dash for None."""
    if value is None:
        return "-"
    return f"{int(value)} %" if value >= 10 else f"{int(value * 10) / 10} %"


def share(value: float | None) -> str:
    """Return a share of 0 to 1 in percent; a dash for None."""
    return percent(None if value is None else 100 * value)


def epoch_of(epoch: int, num_epochs: int) -> str:
    """Return "2 of 3" for epoch 1 of 3, "3 of 3" after the last one, and "2, endless" where none is last."""
    return f"{min(epoch, num_epochs - 1) + 1} of {num_epochs}" if num_epochs else f"{epoch + 1}, endless"
