"""Records that threads read and transform: jobs, blocks of them that become batches, and the threads.

The thread that iterates makes jobs and takes their values; a pool of threads works on them in between. They
must not know in which order batches are handed over, or how often a bad record may be skipped.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Literal

import torch

from edl_torch.core.calls import Grant
from edl_torch.core.plan import Plan
from edl_torch.data.batches.convert import Rows
from edl_torch.data.batches.transport import Collate
from edl_torch.data.reading.sample_reading import SampleReader, Source, Transform, announce, begin
from edl_torch.data.reading.seeding import record_seeds, transform_in_thread
from edl_torch.errors import InvalidArgument
from edl_torch.readers.base import AbstractDataReader, has_random_access
from edl_torch.shard import Shard, Shuffle, Slice, Task

Seeded = Callable[[Any, int], Any]


class PickedRecords:
    """The records of one lease, for readers of which several threads may read any record."""

    def __init__(self, reader: AbstractDataReader, plan: Plan, grant: Grant) -> None:
        announce(reader, plan, grant.slice)
        self._read = reader.read_record
        self._indices = plan.indices(grant.slice)
        self._skip = grant.slice.skip
        self._begun = begin(reader, self._indices)

    def read(self, position: int) -> Any:
        """The record at a position of the lease's shard."""
        if self._begun is not None:
            return self._begun.record(position - self._skip)
        return self._read(*self._indices[position - self._skip])

    again = read


class StreamedRecords:
    """The records of one lease in their order, for one thread at a time."""

    def __init__(
        self, reader: AbstractDataReader, source: Callable[[Plan, Grant], Source], plan: Plan, grant: Grant
    ) -> None:
        self._reader = reader
        self._make_source = source
        self._plan = plan
        self._grant = grant
        self._source: Source | None = None
        self._records: Iterator[Any] = iter(())
        self._next: int | None = None  # the position of the next of `_records`

    def read(self, position: int) -> Any:
        """The record at a position of the lease's shard; from the same stream where it is the next one."""
        if position != self._next:  # also after an error: its record is skipped
            self._records = self._from(position)
        record = next(self._records)
        self._next = position + 1
        return record

    def again(self, position: int) -> Any:
        """The record, by itself: what its stream has kept is let go when it is read."""
        cut = self._grant.slice
        name, number = self._plan.locate(cut.epoch, cut.shard, position)
        shard = Shard(name=name, start=number, end=number + 1, epoch=cut.epoch)
        task = Task(shard=shard, type=self._plan.spec.task_type, task_id=self._grant.task)
        return next(iter(self._reader.read_records(task)))

    def _from(self, position: int) -> Iterator[Any]:
        if self._source is None:
            self._source = self._make_source(self._plan, self._grant)
        cut = self._grant.slice
        return iter(self._source(replace(cut, skip=position, limit=cut.stop - position)))


class OpenLease:
    """A lease that is being read."""

    def __init__(self, plan: Plan, grant: Grant, records: PickedRecords | StreamedRecords) -> None:
        self.grant = grant
        self.records = records
        self._plan = plan

    @cached_property
    def _seeds(self) -> list[int]:
        plan, part = self._plan, self.grant.slice
        return record_seeds(plan.spec.seed, part.epoch, plan.seeding(part), plan.folder)

    def seed(self, position: int) -> int:
        """What random numbers of the transform of the record at a position are seeded by."""
        return self._seeds[position - self.grant.slice.skip]


@dataclass(slots=True)
class Work:
    """What threads do with each record. The thread that iterates may change it."""

    transform: Transform | None
    collate: Collate | None
    seeds: bool  # random numbers of `transform` are the record's
    only_read: bool = False  # from the next record that is planned
    skip_all: bool = False


class RecordJob:
    """One record on its way: a job for a thread, and what has come of it."""

    __slots__ = (
        *("block", "error", "is_raw", "lease", "position", "read_s", "row", "transform_s", "value", "work"),
    )

    row: int  # its place in the block

    def __init__(self, lease: OpenLease, position: int, work: Work) -> None:
        self.lease = lease
        self.position = position
        self.work = work
        self.is_raw = work.only_read  # its value is the record, which the thread that iterates transforms
        self.block: Block | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.read_s = self.transform_s = 0.0

    def read(self) -> None:
        if not self.work.skip_all:
            begun = perf_counter()
            try:
                self.value = self.lease.records.read(self.position)
            except BaseException as exc:  # noqa: BLE001  the thread that iterates raises it, in its turn
                self.error = exc
            self.read_s = perf_counter() - begun

    def finish(self) -> None:
        """Make a sample of the record."""
        work = self.work
        transform = None if self.is_raw else work.transform
        if transform is not None and self.error is None and not work.skip_all:
            begun = perf_counter()
            try:
                if work.seeds:
                    self.value = transform_in_thread(transform, self.value, self.seed)
                else:
                    self.value = transform(self.value)
            except BaseException as exc:  # noqa: BLE001  as above
                self.error = exc
            self.transform_s = perf_counter() - begun
        self.settle()

    def settle(self) -> None:
        """Tell the block that this record is done."""
        block = self.block
        if block is not None:
            if block.rows is not None:
                with suppress(Exception):  # the thread that iterates makes the batch of samples, or raises
                    self.value = block.rows.place(self.value, self.row)
            block.one_done()

    def transform_here(self, transform: Seeded, *, again: bool) -> None:
        """Make a sample in this thread, by the record's seed; `again` reads the record anew."""
        self.is_raw = False
        if again:
            self.error = None
        if self.error is None:
            try:
                record = self.lease.records.again(self.position) if again else self.value
                begun = perf_counter()
                self.value = transform(record, self.seed)
                self.transform_s = perf_counter() - begun
            except Exception as exc:  # noqa: BLE001  as a reader, a transform is the user's code
                self.error = exc

    @property
    def seed(self) -> int:
        """What random numbers of its transform are seeded by."""
        return self.lease.seed(self.position)

    def take(self) -> Any:
        """The sample. It is kept nowhere else: it would outlive its batch."""
        value, self.value = self.value, None
        return value


class Block:
    """Consecutive records. With `rows` they are a batch; the thread that finishes the last one makes it."""

    def __init__(self, jobs: list[RecordJob], *, rows: Rows | None, keeps_samples: bool) -> None:
        self.jobs = jobs
        self.batch: Any = None
        self.is_batch = False
        self.rows = rows
        self._keeps_samples = keeps_samples
        self._lock = threading.Lock()
        self._left = len(jobs)
        self._done = threading.Event()
        for row, job in enumerate(jobs):
            job.block, job.row = self, row

    def one_done(self) -> None:
        """A thread is done with one of the records."""
        with self._lock:
            self._left -= 1
            if self._left:
                return
        if self.rows is not None:
            self._collate(self.rows)
        self._done.set()

    def _collate(self, rows: Rows) -> None:
        work = self.jobs[0].work
        if work.collate is None or work.skip_all or any(job.error is not None for job in self.jobs):
            return
        try:
            self.batch = work.collate([job.value for job in self.jobs], rows)
        except BaseException:  # noqa: BLE001  the thread that iterates tries it again, and raises
            return
        self.is_batch = True
        if not self._keeps_samples:
            for job in self.jobs:
                job.value = None

    def wait(self) -> None:
        self._done.wait()

    def let_go(self) -> None:
        """Break the circle of block and jobs. Nobody waits for it any more."""
        for job in self.jobs:
            job.block = None
        self._done.set()


def can_pick(reader: AbstractDataReader, plan: Plan) -> bool:
    """Whether several threads may read records at once, and that is no slower than a stream of them."""
    if not (getattr(reader, "thread_safe", False) and has_random_access(reader)):
        return False
    return plan.order is not Shuffle.NONE or not getattr(reader, "reads_blocks", False)


def jobs_of(
    reader: AbstractDataReader, plan: Plan, grants: Iterator[Grant], work: Work, *, picks: bool
) -> Iterator[RecordJob]:
    """Yield a job for each record of the leases; `picks` where several threads read records at once."""
    source = SampleReader(reader, no_samples).source
    for grant in grants:
        records = (
            PickedRecords(reader, plan, grant) if picks else StreamedRecords(reader, source, plan, grant)
        )
        lease = OpenLease(plan, grant, records)
        for position in range(grant.slice.skip, grant.slice.stop):
            yield RecordJob(lease, position, work)


def no_samples(plan: Plan, part: Slice, records: Iterable[Any]) -> Iterable[Any]:
    """Return records as they are: jobs make samples of them."""
    return records


# Threads that run jobs in order ------------------------------------------------------------------------


MOST_BY_THEMSELVES = 8  # threads of "auto": with more of them the interpreter's lock is what they wait for
_JOIN_S = 0.5
_FORK_S = 0.5

NumThreads = int | Literal["auto"] | None


class ReaderThreads:
    """`count` daemon threads, which run jobs until `close`.

    With `one_reads` one job is read at a time, in the order in which they were added, while others are
    finished. torch computes by one thread in each of them, as in loader workers; other threads keep the
    number that they have.
    """

    def __init__(self, count: int, *, one_reads: bool) -> None:
        self._jobs: SimpleQueue[RecordJob | None] = SimpleQueue()
        self._turn: AbstractContextManager[object] = threading.Lock() if one_reads else nullcontext()
        self.running = _Running()
        self._pid = os.getpid()
        self._threads = [
            threading.Thread(target=self._work, name=f"edl-read-{number}", daemon=True)
            for number in range(count)
        ]
        self._start()
        _pools.add(self)

    def __repr__(self) -> str:
        alive = sum(thread.is_alive() for thread in self._threads)
        return f"<ReaderThreads alive={alive} of={len(self._threads)} waiting={self._jobs.qsize()}>"

    def _start(self) -> None:
        before = torch.get_num_threads()
        computes_alone: SimpleQueue[None] = SimpleQueue()
        self._on_start = computes_alone if before > 1 else None
        try:
            for thread in self._threads:
                thread.start()
            if self._on_start is not None:
                for _ in self._threads:
                    computes_alone.get()
        except BaseException:  # no thread to be had, or Ctrl-C: nobody else would end those that run
            self.close()
            raise
        finally:
            torch.set_num_threads(before)  # the number for threads to come, which each of them has set

    def add(self, jobs: Iterable[RecordJob]) -> None:
        """Let the threads run these, after those that wait."""
        for job in jobs:
            self._jobs.put(job)

    def _work(self) -> None:
        if self._on_start is not None:
            torch.get_num_threads()  # first: it is what gives a thread the process's number, once
            torch.set_num_threads(1)
            self._on_start.put(None)
        while True:
            with self._turn:
                job = self._jobs.get()
                if job is None:
                    return
                self.running.begin()
                job.read()
            job.finish()
            self.running.end()
            del job  # what it read would outlive its batch

    def stop(self) -> None:
        """Let each thread end after its job, and forget the others. Takes no lock: finalisers may call it."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)

    def close(self) -> None:
        """End the threads. One whose read hangs is not waited for longer than half a second."""
        self.stop()
        if self._pid != os.getpid():
            return  # the threads are those of the process that this one was forked from
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))


class _Running:
    """The threads that run jobs, and whether more may begin."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._threads: set[int] = set()
        self._paused = False

    def begin(self) -> None:
        with self._changed:
            while self._paused:
                self._changed.wait()
            self._threads.add(threading.get_ident())

    def end(self) -> None:
        with self._changed:
            self._threads.discard(threading.get_ident())
            if self._paused:
                self._changed.notify_all()

    def pause(self) -> None:
        """Begin no job any more, and wait, within bounds, for those that run."""
        own = {threading.get_ident()}  # a transform may be what forks
        with self._changed:
            self._paused = True
            self._changed.wait_for(lambda: self._threads <= own, _FORK_S)

    def go_on(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()


# Of the process, as exit and fork handlers are.
_pools: weakref.WeakSet[ReaderThreads] = weakref.WeakSet()


def _close_all() -> None:
    for pool in tuple(_pools):
        pool.close()


def _pause_all() -> None:
    """A thread that held a reader's lock as its process was forked would leave it locked in the child."""
    for pool in tuple(_pools):
        pool.running.pause()


def _all_go_on() -> None:
    for pool in tuple(_pools):
        pool.running.go_on()


atexit.register(_close_all)  # a thread that computes while the interpreter is torn down can abort it
if hasattr(os, "register_at_fork"):
    # The child has none of the threads, and maybe a lock that one of them held: it forgets the pools.
    os.register_at_fork(before=_pause_all, after_in_parent=_all_go_on, after_in_child=_pools.clear)


def thread_count(num_threads: NumThreads, num_workers: int) -> int:
    """Return how many threads are meant; 0 for none. Raises InvalidArgument.

    "auto" is the cores that this process may use, shared by loader workers and by the trainers that torchrun
    started on this machine; eight at most.
    """
    if num_threads is None:
        return 0
    if num_threads == "auto":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        trainers = os.environ.get("LOCAL_WORLD_SIZE", "1")
        sharing = max(1, num_workers) * (int(trainers) if trainers.isdecimal() and int(trainers) else 1)
        return min(MOST_BY_THEMSELVES, max(1, cores // sharing))
    if isinstance(num_threads, bool) or not isinstance(num_threads, int) or num_threads < 0:
        raise InvalidArgument(
            f"num_threads is {num_threads!r}: it must be a number of threads, 'auto' for as many as there "
            f"are cores, or None for none"
        )
    return num_threads
