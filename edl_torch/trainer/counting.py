"""What a plain DataLoader's reports prove, and what was delivered to its loop.

A batch does not say where it came from, so only records that must have been consumed under any order of
workers count as trained on. With one stream of records that is exact; with more it is late, never early. A
report of more than was delivered is refused: that is known from the batches of a loader, from the samples
drawn out of a dataset, or from the leases granted. Arithmetic only; it does not know torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from edl_torch.core.calls import Grant
from edl_torch.core.leases import Span
from edl_torch.errors import AccountingError, InvalidArgument


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


_REMEDY = (
    "report each batch once, with report_batch_done(batch_size=…) where its number of records is not the "
    "service's batch_size, or use ElasticDataLoader"
)


class _Stream:
    """The records that one loader worker was granted in this pass, in order."""

    def __init__(self) -> None:
        self.granted = 0  # samples: quarantined records are none
        self.counted = 0
        self.ended = False
        self._leases: deque[tuple[int, Span]] = deque()

    def grant(self, grant: Grant) -> None:
        self._leases.append((grant.task, Span(done=grant.slice.skip, stop=grant.slice.stop)))
        self.granted += grant.slice.limit

    def fail(self, task: int, position: int) -> None:
        for number, span in self._leases:
            if number == task and span.close(position, position + 1):
                self.granted -= 1

    def count_up_to(self, samples: int) -> list[tuple[int, int, int]]:
        """Move on to `samples` in all; returns (task, position, position after) for what that passes."""
        passed = []
        while self.counted < samples:
            task, span = self._leases[0]
            first = span.done
            self.counted += span.close(first, span.position_after(samples - self.counted))
            passed.append((task, first, span.done))
            if span.is_done:
                self._leases.popleft()
        return passed


class StreamCounts:
    """The counts of one pass: H_w records granted to worker w, k batches or r records reported.

    `deliveries` bounds the reports; without it, what was granted does.
    """

    def __init__(self, batch_size: int, deliveries: Deliveries | None = None) -> None:
        self._batch_size = batch_size
        self._deliveries = deliveries or GrantedRecords()
        self._streams: dict[str, _Stream] = {}
        self._default_reports = 0
        self._is_explicit = False  # whether a report has said how many records the batch has
        self._explicit_records = 0

    def __repr__(self) -> str:
        return f"<StreamCounts streams={len(self._streams)} unreported={self.unreported}>"

    @property
    def exact(self) -> bool:
        """Whether reports say precisely which records were trained on."""
        return len(self._streams) <= 1

    @property
    def is_reported(self) -> bool:
        """Whether a batch of this pass was reported."""
        return bool(self._default_reports) or self._is_explicit

    @property
    def unreported(self) -> int:
        """Samples granted whose training no report has proved."""
        return sum(stream.granted - stream.counted for stream in self._streams.values())

    @property
    def uncounted(self) -> int:
        """Samples that were reported and are not proved: nobody can say which ones they are."""
        streams = self._streams.values()
        reported = self._explicit_records + self._batch_size * self._default_reports
        granted, counted = sum(s.granted for s in streams), sum(s.counted for s in streams)
        return 0 if self.exact else max(0, min(reported, granted) - counted)

    def grant(self, stream: str, grant: Grant) -> None:
        """Note that a worker drew a lease."""
        self._streams.setdefault(stream, _Stream()).grant(grant)

    def lose_sight(self) -> None:
        """Go by what was granted from now on: what is delivered cannot be seen any more."""
        self._deliveries = GrantedRecords()

    def end(self, stream: str) -> None:
        """Note that a worker has read all that it will get in this pass."""
        if stream in self._streams:
            self._streams[stream].ended = True

    def fail(self, task: int, position: int) -> None:
        """A record went to quarantine: it will not be in a batch."""
        for stream in self._streams.values():
            stream.fail(task, position)

    def report(self, batch_size: int | None) -> list[tuple[int, int, int]]:
        """Note that one batch was trained on, of the default size or of `batch_size` records.

        Returns runs (task, position, position after) that are proved by it. Raises AccountingError where that
        is more than was delivered, InvalidArgument where sizes disagree; the counts are then as before.
        """
        self._check_kind(batch_size)
        size = self._checked_size(batch_size)
        self._count(batch_size)
        passed = []
        for stream in self._streams.values():
            proved = stream.counted + size if self.exact else self._proved(stream)
            passed += stream.count_up_to(min(stream.granted, max(stream.counted, proved)))
        return passed

    def _check_kind(self, batch_size: int | None) -> None:
        other_kind = self._is_explicit if batch_size is None else self._default_reports
        if other_kind and not self.exact:
            raise InvalidArgument(
                "with several loader workers give report_batch_done() a batch_size always or never; "
                "ElasticDataLoader needs no reports"
            )
        loaded = self._deliveries.batch_size
        if batch_size is None and loaded not in (0, self._batch_size):
            raise InvalidArgument(
                f"report_batch_done() without a size stands for the service's batch_size, {self._batch_size} "
                f"record(s), and the DataLoader's batches have {loaded}: give both the same, call "
                f"report_batch_done(batch_size=…) with the number of records in the batch, or use "
                f"ElasticDataLoader"
            )

    def _checked_size(self, batch_size: int | None) -> int:
        """The records that a report stands for: the default one of a short last batch fewer than others."""
        if batch_size is None and not self.exact:
            self._check_batches()
            return self._batch_size
        streams = self._streams.values()
        _, delivered = self._deliveries.records(streams)
        reported = sum(stream.counted for stream in streams) if self.exact else self._explicit_records
        size = self._batch_size if batch_size is None else batch_size
        left = delivered - reported
        if batch_size is None and 0 < left < size and self._deliveries.may_end_short(streams):
            return left
        if size > left:
            raise AccountingError(
                f"{size} record(s) are reported as trained on, and of the {delivered} delivered in this pass "
                f"{left} are not reported yet: {_REMEDY}"
            )
        return size

    def _check_batches(self) -> None:
        delivered = self._deliveries.batches
        if delivered is None:
            delivered = sum(map(self._batches_of, self._streams.values()))
        if self._default_reports >= delivered:
            raise AccountingError(
                f"{self._default_reports + 1} batch(es) are reported as trained on, and {delivered} were "
                f"delivered in this pass: {_REMEDY}"
            )

    def _count(self, batch_size: int | None) -> None:
        if batch_size is None:
            self._default_reports += 1
        else:
            self._is_explicit = True
            self._explicit_records += batch_size

    def _proved(self, stream: _Stream) -> int:
        others = [other for other in self._streams.values() if other is not stream]
        if self._is_explicit:
            delivered, _ = self._deliveries.records(self._streams.values())  # at least
            return min(self._explicit_records, delivered) - sum(other.granted for other in others)
        return self._batch_size * (self._default_reports - sum(self._batches_of(other) for other in others))

    def _batches_of(self, stream: _Stream) -> int:
        return -(-stream.granted // self._batch_size)


@dataclass(slots=True)
class PlainPass:
    """The streams of the plain pass that is open, or was last, and what its reports prove.

    `counts` is None where they prove nothing: outside of a pass, and when its leases are void.
    """

    counts: StreamCounts | None = None
    begun: set[str] = field(default_factory=set)
    ran_out: bool = False  # a stream has read to its end

    @property
    def exact(self) -> bool:
        """Whether reports say precisely which records were trained on."""
        return self.counts is None or self.counts.exact

    @property
    def is_reported(self) -> bool:
        """Whether a batch of this pass was reported."""
        return self.counts is not None and self.counts.is_reported

    @property
    def uncounted(self) -> int:
        """Records that were reported, and nobody can say which ones they are."""
        return 0 if self.counts is None else self.counts.uncounted

    def drew(self, stream: str, grant: Grant | None) -> None:
        """A stream drew a lease, or has read to its end."""
        if grant is None:
            self.ran_out = True
        if self.counts is None:
            return
        if grant is None:
            self.counts.end(stream)
        else:
            self.counts.grant(stream, grant)

    def fail(self, task: int, position: int) -> None:
        """A record went to quarantine: it will not be in a batch."""
        if self.counts is not None:
            self.counts.fail(task, position)

    def report(self, batch_size: int | None) -> list[tuple[int, int, int]]:
        """Return what a report proves, as `StreamCounts.report` does."""
        return [] if self.counts is None else self.counts.report(batch_size)
