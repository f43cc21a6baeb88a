"""Figures as people read them: durations, rates, shares, epochs."""

from __future__ import annotations

from edl_torch.core.calls import MasterStatus


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


def short(seconds: float | None) -> str:
    """Return seconds of which there are few in the unit that fits; a dash where they are not known."""
    if seconds is None:
        return "-"
    if seconds < 0.001:
        return f"{1e6 * seconds:.0f} µs"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def of_data(status: MasterStatus) -> str | None:
    """Return how long the loops waited for data, and what a batch takes; None where nothing was timed."""
    if status.waiting_share is None:
        return None
    line = f"waited for data {share(status.waiting_share)} of the time"
    if status.mean_read_s is None:
        return line
    read, transformed = short(status.mean_read_s), short(status.mean_transform_s)
    return f"{line}; a batch is read in {read}, transformed in {transformed}"


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
    """Return "0 of 3" in the first of 3 epochs, "3 of 3" after the last, "2, endless" where none is last."""
    return f"{epoch} of {num_epochs}" if num_epochs else f"{epoch}, endless"
