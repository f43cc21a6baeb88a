"""Reads leased slices through a reader, sample by sample or by the list, and counts and times what it read.

It names the record when reading fails; `on_bad` decides whether the record is skipped. Of batches that take
no time few are timed, so that it costs nothing that can be seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import compress, islice, starmap
from operator import not_, sub
from time import perf_counter
from typing import Any

from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.errors import AccountingError, BadRecord, ReaderError, SourceChanged
from edl_torch.readers.base import (
    AbstractDataReader,
    Begun,
    IndexedReader,
    can_begin,
    has_expectations,
    has_random_access,
    is_source_error,
    name_record,
)
from edl_torch.readers.map_dataset import MapDatasetReader
from edl_torch.readers.mixture import MixtureReader
from edl_torch.shard import Indices, Shard, Shuffle, Slice, Task

# Times of reading and of transforming -------------------------------------------------------------------


EACH_S = 0.1  # at most one batch in so long: what is timed costs some calls

Times = tuple[float, float]  # seconds of reading and of transforming the records of a batch


class ReadingTimes:
    """Times of the batch that is being made. One per process that collates; its threads do not share it.

    `timing` says that they will be those of all its records; `due_at` is when the next batch may be timed.
    """

    __slots__ = ("_after", "_before", "_read_s", "_transform_s", "due_at", "timing")

    def __init__(self) -> None:
        self.due_at = 0.0
        self._before: list[float] = []  # when the reading of each record began
        self._after: list[float] = []  # and ended
        self.clear()

    def __repr__(self) -> str:
        return f"<ReadingTimes read={self._read_s:.6f} s transform={self._transform_s:.6f} s>"

    def clear(self) -> None:
        self.timing = False
        self._read_s = self._transform_s = 0.0
        self._before.clear()
        self._after.clear()

    def begin(self) -> None:
        """Time the batch that begins now."""
        self.timing = True
        self.due_at = perf_counter() + EACH_S

    def begin_if_due(self) -> bool:
        """Time the batch that begins now, unless the last one that was timed began a moment ago. Returns
        whether it is timed."""
        if perf_counter() < self.due_at:
            return False
        self.begin()
        return True

    def add(self, read_s: float, transform_s: float) -> None:
        """Count work on records of the batch."""
        self._read_s += read_s
        self._transform_s += transform_s

    def reading(self, records: Iterator[Any]) -> Iterator[Any]:
        """Return the records, which a reader yields; the time of each is noted until `drew`.

        It keeps none, and runs no Python for one: `append` returns None, of which an empty dict's `get` makes
        the record, and `not_` what lets it pass.
        """
        now = iter(perf_counter, None)
        read = compress(records, map(not_, map(self._after.append, now)))
        return map({}.get, map(self._before.append, now), read)  # type: ignore[arg-type]

    def drew(self, since: float) -> None:
        """Count what was drawn `since` then of samples that are made of what `reading` returned."""
        now = perf_counter()
        read_s = sum(map(sub, self._after, self._before))
        if len(self._before) > len(self._after):  # reading the last one failed
            read_s += now - self._before[-1]
        self.add(read_s, now - since - read_s)
        self._before.clear()
        self._after.clear()

    def take(self) -> Times:
        """Return the seconds of the batch, which is made, and forget it."""
        times = self._read_s, self._transform_s
        self.clear()
        return times


# Reading ------------------------------------------------------------------------------------------------


Run = list[int]  # of `Tally.start`: its last item is the next position to read
Source = Callable[[Slice], Iterable[Any]]  # the records of a slice, in its order
Transform = Callable[[Any], Any]  # a record to a sample
ToSamples = Callable[[Plan, Slice, Iterable[Any]], Iterable[Any]]
# Called with the position of a record that cannot be read and its error, a BadRecord where the record is to
# blame. Raises, or returns the run in which to count what follows the record.
OnBad = Callable[[int, ReaderError], Run]


class SampleList:
    """The samples of the batch that is being read, `size` when it is whole, and its times. One lease after
    another adds to it; where records take turns it ends with a turn, and with a lease."""

    def __init__(self, size: int, times: ReadingTimes, turn: int = 1) -> None:
        self.times = times
        self._size = size
        self._turn = turn
        self._samples: list[Any] = []

    def draw(self, samples: Iterator[Any], run: Run, stop: int) -> bool:
        """Add samples up to position `stop`, or as many as come, and keep `run` at the next one. Returns
        whether the list is whole."""
        before, position, timing = len(self._samples), run[2], self.times.timing
        ends = stop
        if self._turn > 1:  # the last of a turn may have been bad
            ends = turn_end(position - bool(before), stop, self._turn)
        begun = perf_counter() if timing else 0.0
        try:  # an error leaves what came before it
            self._samples.extend(islice(samples, min(self._size - before, ends - position)))
        finally:
            run[2] = position + len(self._samples) - before
            if timing:
                self.times.drew(begun)
        return len(self._samples) == self._size or (run[2] == ends and self.ends_with_lease())

    def ends_with_lease(self) -> bool:
        """Whether there are samples that nothing is added to after the lease."""
        return self._turn > 1 and bool(self._samples)

    def take(self) -> list[Any]:
        """Return the samples, and begin the next list. Kept nowhere else: they would outlive the batch."""
        samples, self._samples = self._samples, []
        return samples

    def rest(self) -> Iterator[list[Any]]:
        """Yield what is left in the end."""
        if self._samples:
            yield self.take()


class SampleReader:
    """A reader, and how its records become samples: `to_samples(plan, slice, records of the slice)`."""

    def __init__(
        self, reader: AbstractDataReader, to_samples: ToSamples, leases: LeasesAhead | None = None
    ) -> None:
        self._reader = reader
        self._to_samples = to_samples
        self._leases = leases
        self._next: tuple[Grant, Begun] | None = None  # the next lease, whose records are asked for already
        self._random, self._begins = has_random_access(reader), can_begin(reader)
        self._window: _KeptWindow | None = None

    def samples(self, plan: Plan, grant: Grant, run: Run, on_bad: OnBad) -> Iterator[Any]:
        """Yield a sample for every readable record of the lease, in order, and keep `run` at the next one."""
        source = self.source(plan, grant)
        cut = grant.slice
        while (position := run[2]) < cut.stop:
            try:
                part = _from(cut, position)
                samples = iter(self._to_samples(plan, part, source(part)))
                # All that Python does for one record. No name holds the sample: it would outlive its batch.
                for run[2] in range(position + 1, cut.stop + 1):
                    yield next(samples)
                return
            except StopIteration:
                error: Exception = too_few(self._reader, cut.stop - run[2] + 1)
            except Exception as exc:  # noqa: BLE001  a reader is the user's code: whatever it raises is named
                error = exc
            run[2] = max(position, run[2] - 1)
            run = on_bad(run[2], self.named(error, plan, cut, run[2]))

    def lists(
        self, samples: SampleList, plan: Plan, grant: Grant, run: Run, on_bad: OnBad
    ) -> Iterator[list[Any]]:
        """As `samples`, but add to a list and yield it when it is full. For a record no Python runs but the
        reader's and the transform's."""
        asked_at, times = perf_counter(), samples.times
        source = self.source(plan, grant)  # a window that is kept is read here
        cut, stop = grant.slice, grant.slice.stop
        while run[2] < stop:
            try:
                part = _from(cut, run[2])
                records = iter(source(part))
                if times.timing:
                    times.add(perf_counter() - asked_at, 0.0)
                rest, timed = self._drawn(plan, part, records, times), times.timing
                while samples.draw(rest, run, stop):
                    yield samples.take()
                    if perf_counter() >= times.due_at:
                        times.begin()
                    if times.timing is not timed and run[2] < stop:
                        part = _from(cut, run[2])
                        rest, timed = self._drawn(plan, part, records, times), times.timing
                if run[2] == stop:
                    return
                raise StopIteration  # as `next` would have
            except StopIteration:
                error: Exception = too_few(self._reader, stop - run[2])
            except Exception as exc:  # noqa: BLE001  as above
                error = exc
            run = on_bad(run[2], self.named(error, plan, cut, run[2]))
            asked_at = perf_counter()
        if samples.ends_with_lease():  # its last record is bad
            yield samples.take()

    def _drawn(self, plan: Plan, part: Slice, records: Iterator[Any], times: ReadingTimes) -> Iterator[Any]:
        """The samples of a part, timed where the batch is."""
        return iter(self._to_samples(plan, part, times.reading(records) if times.timing else records))

    def named(self, error: Exception, plan: Plan, cut: Slice, position: int) -> ReaderError:
        """Return the error with the name of the record at a position of a slice in front.

        A record that is there no more is not to blame: then its data have changed.
        """
        if isinstance(self._reader, MapDatasetReader | MixtureReader):
            try:
                self._reader.check_unchanged()
            except SourceChanged as exc:
                error = exc
        return name_record(error, *plan.locate(cut.epoch, cut.shard, position))

    def source(self, plan: Plan, grant: Grant) -> Source:
        """Return what reads parts of the lease, each record in the plan's order."""
        begun = self._begin(plan, grant)
        if begun is not None:
            return partial(self._begun, plan, grant.slice, begun)
        if plan.order is Shuffle.NONE:
            return lambda rest: self._range(plan, plan.shard(rest), grant.task)
        if self._random:
            return partial(self._picked, plan)
        return self._permuted(plan, grant)

    def _begin(self, plan: Plan, grant: Grant) -> Begun | None:
        begun, self._next = self._next, None
        if begun is not None and begun[0] is grant:
            return begun[1]
        return begin(self._reader, plan.indices(grant.slice)) if self._begins else None

    def _begun(self, plan: Plan, cut: Slice, begun: Begun, rest: Slice) -> Iterator[Any]:
        """Records that have been asked for. When the last of them is, those of the next lease are."""
        announce(self._reader, plan, rest)  # a mixture may have others
        for number in range(rest.skip - cut.skip, rest.stop - cut.skip):
            if begun.is_all_asked and self._next is None and self._leases is not None:
                following = self._leases.peek()
                following_begun = None if following is None else self._begin(plan, following)
                if following is not None and following_begun is not None:
                    self._next = following, following_begun
            yield begun.record(number)

    def _range(self, plan: Plan, shard: Shard, task: int) -> Iterable[Any]:
        return self._reader.read_records(Task(shard=shard, type=plan.spec.task_type, task_id=task))

    def _picked(self, plan: Plan, rest: Slice) -> Iterable[Any]:
        reader, indices = self._reader, plan.indices(rest)
        announce(reader, plan, rest)
        if indices.sources is None and isinstance(reader, IndexedReader):
            return reader.read_each(indices.names[0], indices.numbers)
        if isinstance(reader, MixtureReader):
            return reader.read_each(indices)
        return starmap(reader.read_record, indices)

    def _permuted(self, plan: Plan, grant: Grant) -> Source:
        """Without random access: the window's records are read in storage order and kept, then picked."""
        if plan.order is Shuffle.GLOBAL:
            raise AccountingError(
                f"{type(self._reader).__name__} has no read_record(name, index), which a global shuffle "
                f"needs: use shuffle_shards=True at the service and shuffle=True at the dataset"
            )
        window = self._window
        if window is None or not window.covers(plan, grant.slice):
            window = self._window = None  # before the next one is read: two would be in memory
            window = self._window = self._read_window(plan, grant)
        window.begin = grant.slice.stop
        kept = window.records

        def pick(name: str, index: int) -> Any:
            found = kept[name].pop(index)
            if isinstance(found, _Unreadable):
                raise found.error
            return found

        return lambda rest: starmap(pick, plan.indices(rest))

    def _read_window(self, plan: Plan, grant: Grant) -> _KeptWindow:
        """Read the shards of a window, and keep what is at the lease's positions and after them."""
        cut = grant.slice
        left = plan.records_in(cut.epoch, cut.shard) - cut.skip
        window = _KeptWindow(plan, cut.epoch, cut.shard)
        wanted = _by_name(plan.indices(replace(cut, limit=left)))
        for shard in plan.storage_of(cut.epoch, cut.shard):
            kept = window.records.setdefault(shard.name, {})
            if window.error is None:
                window.error = self._read_shard(plan, shard, grant.task, wanted[shard.name], kept)
            else:
                kept |= dict.fromkeys(range(shard.start, shard.end), window.error)
        return window

    def _read_shard(
        self, plan: Plan, shard: Shard, task: int, wanted: set[int], kept: dict[int, Any]
    ) -> _Unreadable | None:
        """Read the records of a shard into `kept`. Returns the error if the source itself is in trouble."""
        index = shard.start
        while index < shard.end:
            part = replace(shard, start=index)
            try:
                for record in islice(self._range(plan, part, task), shard.end - index):
                    if index in wanted:
                        kept[index] = record
                    index += 1
            except Exception as exc:  # noqa: BLE001  as above
                kept[index] = _Unreadable(exc)
                if is_source_error(exc):  # the records after it would fail in the same way, each in its time
                    kept |= dict.fromkeys(range(index, shard.end), kept[index])
                    return _Unreadable(exc)
            else:
                if index < shard.end:
                    kept[index] = _Unreadable(too_few(self._reader, shard.end - index))
            index += 1
        return None


def turn_end(position: int, stop: int, turn: int) -> int:
    """Return where the turn of several records ends that a position of a lease is in, or the lease."""
    return min(stop, position - position % turn + turn)


def _from(cut: Slice, position: int) -> Slice:
    return cut if position == cut.skip else replace(cut, skip=position, limit=cut.stop - position)


def begin(reader: AbstractDataReader, indices: Indices) -> Begun | None:
    """Ask for the bytes of records, where the reader does so."""
    if isinstance(reader, MixtureReader):
        return reader.begin(indices)
    if isinstance(reader, IndexedReader) and can_begin(reader) and indices.sources is None:
        return reader.begin(indices.numbers.tolist())
    return None


class LeasesAhead(Iterator[Grant]):
    """Leases as they are drawn; the next one may be drawn before it is read."""

    def __init__(self, draw: Callable[[], Grant | None]) -> None:
        self._draw = draw
        self._drawn: list[Grant | None] = []  # one at most; None for the end

    def peek(self) -> Grant | None:
        """The next one; None at the end."""
        if not self._drawn:
            self._drawn.append(self._draw())
        return self._drawn[0]

    def __next__(self) -> Grant:
        grant = self.peek()
        if grant is None:
            raise StopIteration
        self._drawn.clear()
        return grant


def announce(reader: AbstractDataReader, plan: Plan, part: Slice) -> None:
    """Tell the reader which records come next, where they lie together."""
    if isinstance(reader, MixtureReader) and plan.mixed is not None:
        if reader.expecting:
            reader.expect_of_each(plan.mixed.storage(*plan.indices_of(part), reader.expecting))
        return
    if plan.order is Shuffle.GLOBAL or not has_expectations(reader):
        return
    in_order = plan.order is Shuffle.NONE
    shards = [plan.shard(part)] if in_order else plan.storage_of(part.epoch, part.shard)
    with suppress(ReaderError):  # whoever reads what is not there is told
        reader.expect([(shard.name, shard.start, shard.end) for shard in shards], in_order=in_order)


class _KeptWindow:
    """Records of one window that are in memory, by name and number, until they are picked.

    `begin` is the position from which on all are here. With an `error` some are not: the source was in
    trouble.
    """

    begin: int

    def __init__(self, plan: Plan, epoch: int, number: int) -> None:
        self._of = plan, epoch, number
        self.records: dict[str, dict[int, Any]] = {}
        self.error: _Unreadable | None = None

    def covers(self, plan: Plan, cut: Slice) -> bool:
        """Whether all records of a slice are here."""
        plan_of, epoch, number = self._of
        same = plan_of is plan and (epoch, number) == (cut.epoch, cut.shard)
        return same and cut.skip >= self.begin and self.error is None


def _by_name(indices: Indices) -> dict[str, set[int]]:
    if indices.sources is None:
        return {indices.names[0]: set(indices.numbers.tolist())}
    numbers: defaultdict[str, set[int]] = defaultdict(set)
    for name, index in indices:
        numbers[name].add(index)
    return numbers


class _Unreadable:
    """A record that could not be read, kept until its turn comes."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def too_few(reader: AbstractDataReader, missing: int) -> BadRecord:
    """Return the error of a reader that ended before the range did."""
    return BadRecord(
        f"{type(reader).__name__}.read_records() ended {missing} record(s) early; "
        f"create_shards() promised them"
    )
