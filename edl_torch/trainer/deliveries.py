"""What has been delivered to a plain loop in one pass: no report may count more than that.

It is known from the batches of a loader, from the samples drawn out of a dataset, or from the leases granted.
Arithmetic only; it does not know torch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol


class Stream(Protocol):
    """One stream of records, as far as it has been read."""

    granted: int  # samples
    ended: bool  # nothing more will be granted to it


class Deliveries(Protocol):
    """What was delivered in one pass. `batch_size` is that of whole batches, 0 where it is not known."""

    batch_size: int

    @property
    def batches(self) -> int | None:
        """Batches delivered; None where it is not known."""

    def records(self, streams: Collection[Stream]) -> tuple[int, int]:
        """The least and the most samples that may have been delivered."""

    def may_end_short(self, streams: Collection[Stream]) -> bool:
        """Whether the last batch delivered may be smaller than the others."""


class GrantedRecords:
    """Records count as delivered once they are granted: for `fetch_shard`, and for other processes."""

    batch_size = 0
    batches = None

    def records(self, streams: Collection[Stream]) -> tuple[int, int]:
        granted = _granted(streams)
        return granted, granted

    def may_end_short(self, streams: Collection[Stream]) -> bool:
        return True  # as every shard may


class DrawnSamples:
    """Samples drawn one by one from a dataset in the trainer's own process.

    It takes the place of a `Tally` there: who reads moves the last item of the run.
    """

    batch_size = 0
    batches = None

    def __init__(self) -> None:
        self._before = 0
        self._run = [0, 0, 0]

    def start(self, task: int, position: int) -> list[int]:
        """Begin to draw a lease at `position`. Returns `[task, first, next]`."""
        self._before = self._drawn
        self._run = [task, position, position]
        return self._run

    @property
    def _drawn(self) -> int:
        return self._before + self._run[2] - self._run[1]

    def records(self, streams: Collection[Stream]) -> tuple[int, int]:
        return self._drawn, self._drawn

    def may_end_short(self, streams: Collection[Stream]) -> bool:
        return _all_read(streams) and self._drawn == _granted(streams)


class DeliveredBatches:
    """Batches that a loader has handed to its loop. A subclass says how many.

    A worker's batches are whole but for its last one, which `drop_last` withholds.
    """

    def __init__(self, batch_size: int, *, drop_last: bool) -> None:
        self.batch_size = batch_size
        self._drop_last = drop_last

    @property
    def batches(self) -> int:
        """Batches delivered."""
        raise NotImplementedError

    def records(self, streams: Collection[Stream]) -> tuple[int, int]:
        batches = self.batches
        if_whole = batches * self.batch_size
        most = min(if_whole, _granted(streams))
        missing = sum(self._missing(stream, batches) for stream in streams)
        return min(most, max(0, if_whole - missing)), most

    def _missing(self, stream: Stream, batches: int) -> int:
        """What the stream's last batch lacks, where that may be among so many batches of all."""
        whole, rest = divmod(stream.granted, self.batch_size)
        delivered = stream.ended and rest and whole < batches and not self._drop_last
        return self.batch_size - rest if delivered else 0

    def may_end_short(self, streams: Collection[Stream]) -> bool:
        return _all_read(streams) and self.batches * self.batch_size > _granted(streams)


def _granted(streams: Collection[Stream]) -> int:
    return sum(stream.granted for stream in streams)


def _all_read(streams: Collection[Stream]) -> bool:
    return all(stream.ended for stream in streams)
